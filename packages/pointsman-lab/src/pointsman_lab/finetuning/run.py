"""Fine-tuning a pre-trained run, and opening what it left."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.ops.kernels import Kernels
from pointsman_lab.data import Vocabulary
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.data.multilingual.splits import XtremeData, is_crosslingual, load_xtreme
from pointsman_lab.data.multilingual.xtreme import XTREME
from pointsman_lab.data.tasks import LabelledTexts, find_task, load_task
from pointsman_lab.finetuning.classification import Classification
from pointsman_lab.finetuning.crosslingual import CrossLingual, head_on
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.models.classifier import Classifier
from pointsman_lab.progress import Monitor, Progress, Quiet, Stop
from pointsman_lab.runs import paths
from pointsman_lab.runs.checkpoints import checksums, open_checkpoint, whole_checkpoint
from pointsman_lab.runs.directory import RunDirectory
from pointsman_lab.runs.paths import EVALUATION, FINETUNE
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import Run, load_run, model_of, vocabulary_of
from pointsman_lab.training.trainer import TrainResult, train

FORMAT = 1


Data = LabelledTexts | XtremeData


def open_task(spec: str) -> Data:
    """`load_task`, or `load_xtreme` of one of XTREME's tasks, with the folder that POINTSMAN_DATA names."""
    return load_xtreme(spec, data_folder()) if is_crosslingual(spec) else load_task(spec, data_dir=data_folder())


def check_task(spec: str) -> None:
    """Refuses a task that does not exist, without reading it.

    Raises:
        RunError: no such task, file or folder.
    """
    if not is_crosslingual(spec):
        find_task(spec, data_dir=data_folder())


def task_of(
    data: Data, settings: Finetuning, vocabulary: Any, weights: Mapping[str, Tensor] | None
) -> Classification | CrossLingual:
    """What is learned from these data."""
    if isinstance(data, XtremeData):
        return CrossLingual(data, settings, vocabulary, weights)
    if not isinstance(vocabulary, Vocabulary):
        raise RunError(f"the task {data.name} is for language models; encoders learn {', '.join(XTREME)}")
    return Classification(data, settings, vocabulary, weights)


def finetuned_path(run: Path | str, settings: Finetuning, seed: int) -> Path:
    """Where a fine-tuning of a run goes unless it is told otherwise: RUN/finetune/VARIANT/seed-S."""
    return paths.finetuned_path(run, settings.variant, seed)


def finetune(
    run: Path | str,
    settings: Finetuning,
    *,
    seed: int = 0,
    out: Path | str | None = None,
    data: Data | None = None,
    device: str = "cpu",
    kernels: Kernels | None = None,
    progress: Progress | None = None,
    monitor: Callable[[nn.Module, int, int], Monitor] | None = None,
    stop: Stop | None = None,
) -> TrainResult:
    """Fine-tunes a pre-trained run on a task and evaluates it; an interrupted fine-tuning goes on where it was.

    Args:
        run: the pre-trained run's directory; its last whole checkpoint is taken.
        settings: task and settings.
        seed: of the head's weights, the order of the data and dropout.
        out: the run directory; default: `finetuned_path`.
        data: the task's data, if they are loaded already.
        device, kernels, progress, monitor, stop: as of `training.trainer.train`.

    Returns:
        What is in `out`: a run directory like any other, with accuracies in evaluation.json, and finetune.json beside.

    Raises:
        RunError: no pre-trained run, other settings or other pre-trained weights in `out`, or what `train` raises.
        Interrupted: `stop` was set; the run has saved.
    """
    progress = progress or Quiet()
    if (Path(run) / FINETUNE).exists():
        raise RunError(f"{run} is a fine-tuned run: give the pre-trained one")
    pretrained = load_run(run, note=progress.note)
    if pretrained.step < pretrained.config.steps:
        progress.note(f"{run} has trained for {pretrained.step} of {pretrained.config.steps} steps: these are used")
    data = data or open_task(settings.task)
    config = settings.config(pretrained.config, data, seed)
    weights = None if settings.from_scratch else pretrained.model.state_dict()
    task = task_of(data, settings, pretrained.vocabulary, weights)
    for note in task.remarks(config):
        progress.note(note)
    directory = RunDirectory(out or finetuned_path(run, settings, seed))
    about = {
        "format": FORMAT,
        **settings.to_dict(),
        "classes": list(data.classes),
        "fingerprint": data.fingerprint,
        "pretrained": None if settings.from_scratch else identity(pretrained),
    }
    _check_same(directory, about)
    begun = directory.exists
    task.files = {FINETUNE: about}
    record = directory.read_json(EVALUATION)
    if begun and record is not None and task.is_current(record, config):  # its checkpoints need not be there any more
        directory.claim(task.prepared(config), resume=True)
        return TrainResult(directory.path, config.steps, record, already_finished=True)
    return train(
        config,
        directory.path,
        resume=begun,
        device=device,
        task=task,
        kernels=kernels or pretrained.kernels,
        progress=progress,
        monitor=monitor,
        stop=stop,
    )


def task_data(run: Run) -> LabelledTexts:
    """The data of a run fine-tuned to classify texts.

    Raises:
        RunError: the task's files are gone or have changed, or it is one of XTREME's.
    """
    data = _unchanged(run)
    if isinstance(data, XtremeData):
        raise RunError(f"{run.path} was fine-tuned on {data.name}: attacks are for classifiers of single texts")
    return data


def finetuned_task(run: Run) -> CrossLingual | None:
    """What a run learned, if it is one of XTREME's tasks.

    Raises:
        RunError: the task's files are gone or have changed.
    """
    if not is_crosslingual(str(run.finetuning["task"])):
        return None
    data = _unchanged(run)
    assert isinstance(data, XtremeData), "is_crosslingual"
    kept = {name: run.finetuning[name] for name in ("task", "balance", "head_dropout", "from_scratch")}
    settings = Finetuning(**kept, freeze=tuple(run.finetuning["freeze"]), pooling=run.finetuning["pooling"])
    return CrossLingual(data, settings, run.vocabulary, None)


def _unchanged(run: Run) -> Data:
    data = open_task(str(run.finetuning["task"]))
    if data.fingerprint != run.finetuning.get("fingerprint"):
        raise RunError(f"{run.path} was fine-tuned on other data: the files of {data.name} have changed")
    return data


def load_finetuned(
    path: Path | str, *, step: int | None = None, device: str = "cpu", note: Callable[[str], None] | None = None
) -> Run:
    """Opens a fine-tuned run: the weights of its last whole checkpoint, or of the one at `step`.

    Raises:
        RunError: it is no fine-tuned run, or it has no whole checkpoint.
    """
    directory = RunDirectory(path)
    config = directory.config(RunConfig)
    about = directory.read_json(FINETUNE)
    if about is None or about.get("format") != FORMAT:
        raise RunError(f"{directory.path} is no fine-tuned run: it has no whole {FINETUNE}")
    if step is None:
        checkpoint = whole_checkpoint(directory.checkpoints, note)
    else:
        checkpoint = open_checkpoint(directory.checkpoints / f"step-{step}")
    dropout = about["head_dropout"]
    classes, pooling = len(about["classes"]), about["pooling"]

    def build() -> nn.Module:
        if is_crosslingual(str(about["task"])):
            kind = XTREME[str(about["task"]).partition(":")[0]].kind
            return head_on(kind, classes, config, pooling, dropout)
        return Classifier(config.model, classes, pooling=pooling, dropout=dropout)

    model, kernels = model_of(checkpoint, config, device, build)
    return Run(directory.path, config, checkpoint.step, model, vocabulary_of(directory, checkpoint), kernels, about)


def is_finetuned(path: Path | str) -> bool:
    """Whether this is the directory of a fine-tuned run."""
    return (Path(path) / FINETUNE).is_file()


def identity(run: Run) -> dict[str, str]:
    """Which weights: the checkpoint and its checksum, of one that many ranks wrote that of its parts' checksums."""
    folder = RunDirectory(run.path).checkpoints / f"step-{run.step}"
    parts = [told for name, told in sorted(checksums(folder).items()) if re.match(r"model[./]", name)]
    whole = parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()
    return {"checkpoint": folder.name, "sha256": whole}


def _check_same(directory: RunDirectory, about: dict[str, Any]) -> None:
    """RunError if the directory holds a fine-tuning of other weights or settings."""
    before = directory.read_json(FINETUNE) or about
    differing = [key for key in about | before if about.get(key) != before.get(key)]
    if differing == ["pretrained"]:
        raise RunError(
            f"{directory.path} was fine-tuned from other weights: pre-training went on; choose another --out"
        )
    if differing:
        told = "; ".join(f"{key} is {before.get(key)!r} there, {about.get(key)!r} here" for key in differing)
        raise RunError(f"{directory.path} holds a fine-tuning of another configuration: {told}; choose another --out")
