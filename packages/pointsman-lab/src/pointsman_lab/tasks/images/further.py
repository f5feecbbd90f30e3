"""Fine-tuning an image classifier: other images, other classes, or the same at another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pointsman._errors import RunError
from pointsman._files import within
from pointsman_lab.finetuning.run import identity
from pointsman_lab.progress import Monitor, Progress, Quiet, Stop
from pointsman_lab.runs.directory import RunDirectory
from pointsman_lab.runs.paths import slug
from pointsman_lab.tasks.images.task import ImageClassification, open_images
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import load_run
from pointsman_lab.training.trainer import TrainResult, train

START = "start.json"
"""File of a fine-tuned image run: the weights that it started from."""

EPOCHS = 3.0
LEARNING_RATE = 1e-4


def finetune_images(
    run: Path | str,
    data: str,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    monitor: Callable[[nn.Module, int, int], Monitor] | None = None,
    stop: Stop | None = None,
) -> TrainResult:
    """Trains a run on images further, on these images; an interrupted fine-tuning goes on where it was.

    Positions are resized bilinearly on their grid where the images are of another size (`data="NAME:size=N"`), and the
    classes' weights start anew where the classes differ in number. Other settings are those of the run, but for a
    learning rate of 1e-4 with a cosine to 0 and no warm-up.

    Args:
        run: the trained run's directory; its last whole checkpoint is taken.
        data: images, as `--data` names them.
        steps: optimizer steps; None: `epochs`, by default 3.
        seed: of the order of the images, augmentations and dropout.
        settings: any others, as `RunConfig.with_overrides` takes them; they win over the arguments.
        out: the run directory; default: RUN/further/DATA-SIDE/seed-S.
        device, progress, monitor, stop: as of `training.trainer.train`.

    Returns:
        What is in `out`: an image run like any other, with start.json beside.

    Raises:
        RunError: no run on images, other weights or settings in `out`, or what `train` raises.
        Interrupted: `stop` was set; the run has saved.
    """
    trained = load_run(run, note=(progress or Quiet()).note)
    if trained.config.model.reads_tokens:
        raise RunError(f"{run} learned text: its tasks are texts")
    images = open_images(data)
    task = ImageClassification(images, weights=trained.model.state_dict())
    count = len(images.split("train")) * (EPOCHS if epochs is None else epochs)
    config = _config(trained.config, data, seed, steps, count, settings or {})
    task.check(config)
    name = f"{slug(images.name)}-{images.side}"
    directory = RunDirectory(out or within(Path(run), "further", name, f"seed-{seed}"))
    start = {"run": trained.path.name, **identity(trained)}
    before = directory.read_json(START)
    if before is not None and before != start:
        raise RunError(
            f"{directory.path} started from other weights ({before.get('checkpoint')}): choose another --out"
        )
    task.files = {START: start}
    return train(
        config,
        directory.path,
        resume=directory.exists,
        device=device,
        task=task,
        kernels=trained.kernels,
        progress=progress,
        monitor=monitor,
        stop=stop,
    )


def _config(
    trained: RunConfig, data: str, seed: int, steps: int | None, count: float, settings: Mapping[str, Any]
) -> RunConfig:
    """The settings of a fine-tuning of so many steps, or images."""
    base = replace(
        trained, data=data, seed=seed, learning_rate=LEARNING_RATE, final_learning_rate=0.0, lr_schedule="cosine",
        warmup_steps=0, train_top_k=str(trained.top_k_schedule.high), preset="finetune",
    )  # fmt: skip
    if changed := {key for key in settings if key.startswith("model.") and "dropout" not in key}:
        raise RunError(f"{min(changed)} cannot be set: the model is that of the trained run")
    told = base.with_overrides(settings)
    if "steps" in settings:
        steps = told.steps
    elif steps is None:
        steps = max(1, round(count / told.batch_size))
    own = replace(base, steps=steps, checkpoint_every=min(250, max(1, steps // 2)), validate_every=0)
    return own.with_overrides(settings)
