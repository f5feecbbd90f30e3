"""Fine-tuning a pre-trained run, or every run of a comparison, and opening what it left."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, Stopped
from pointsman_lab._files import alone
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.finetuning.task import FineTuning
from pointsman_lab.progress import Progress, Quiet, Stop
from pointsman_lab.registry import learner
from pointsman_lab.runs.checkpoints import checksums, steps_of
from pointsman_lab.runs.comparison import required_plan, saved_runs
from pointsman_lab.runs.imports import import_named, import_recorded, imports_of, named_before
from pointsman_lab.runs.paths import EVALUATION, FINETUNE, REPEAT, finetuned_path, run_path
from pointsman_lab.training.compare import default_jobs
from pointsman_lab.training.directory import ELSEWHERE, RunDirectory
from pointsman_lab.training.jobs import Hosts, Work, do_all
from pointsman_lab.training.run import Run, load_run
from pointsman_lab.training.state import Interrupted
from pointsman_lab.training.trainer import TrainResult, train

FORMAT = 1


def open_task(spec: str) -> Any:
    """The data of what `--task` names."""
    return learner(spec).fine_tuning().read(spec)


def finetune(
    run: Path | str,
    settings: Finetuning,
    *,
    seed: int = 0,
    out: Path | str | None = None,
    data: Any = None,
    device: str = "cpu",
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> TrainResult:
    """Fine-tunes a pre-trained run on a task and evaluates it; an interrupted fine-tuning goes on where it was.

    Args:
        run: the pre-trained run's directory; its last whole checkpoint is taken.
        settings: task and settings.
        seed: of the head's weights, the order of the data and dropout.
        out: the run directory; default: `finetuned_path`.
        data: the task's data, if they are loaded already.
        device, progress, stop: as of `training.trainer.train`.

    Returns:
        What is in `out`: a run directory like any other, with accuracies in evaluation.json, and finetune.json beside.

    Raises:
        RunError: no pre-trained run, other settings or other pre-trained weights in `out`, or what `train` raises.
        Interrupted: `stop` was set; the run has saved.
    """
    progress = progress or Quiet()
    pretrained = load_run(run, note=progress.note)
    if pretrained.step < pretrained.config.steps:
        progress.note(f"{run} has trained for {pretrained.step} of {pretrained.config.steps} steps: these are used")
    directory = RunDirectory(out or finetuned_path(run, settings.variant, seed))
    if settings.preset and settings.freeze == settings.defaults.presets[settings.preset][0]:
        settings = settings.for_router(pretrained.config.model.router)  # a dense model lacks what a preset freezes
    if settings.train_top_k is not None and not pretrained.sparse:
        progress.note(
            f"train_top_k={settings.train_top_k} has no effect: {pretrained.config.model.router} has no router"
        )
    data = data or open_task(settings.task)
    config = settings.config(pretrained.config, data, seed)
    weights = None if settings.from_scratch else pretrained.model.state_dict()
    task = settings.kind(data, settings, pretrained.vocabulary, weights)
    for note in task.remarks(config):
        progress.note(note)
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
    return train(config, directory.path, resume=begun, device=device, task=task, progress=progress, stop=stop)


def finetuned_task(run: Run) -> FineTuning:
    """What a fine-tuned run learned.

    Raises:
        RunError: the task's files are gone or have changed.
    """
    settings = _settings_of(run.finetuning)
    data = open_task(settings.task)
    if data.fingerprint != run.finetuning.get("fingerprint"):
        raise RunError(f"{run.path} was fine-tuned on other data: the files of {data.name} have changed")
    task: FineTuning = settings.kind(data, settings, run.vocabulary, None)
    return task


def _settings_of(about: Mapping[str, Any]) -> Finetuning:
    """The settings in finetune.json."""
    kept = {name: about[name] for name in ("task", "balance", "pooling", "head_dropout", "from_scratch")}
    return Finetuning(**kept, freeze=tuple(about["freeze"]))


def open_run(
    path: Path | str, *, step: int | None = None, device: str = "cpu", note: Callable[[str], None] | None = None
) -> Run:
    """Opens a run directory as `training.run.load_run` does, also that of a fine-tuned run."""
    if not is_finetuned(path):
        return load_run(path, step=step, device=device, note=note)
    about = RunDirectory(path).read_json(FINETUNE)
    if about is None or about.get("format") != FORMAT:
        raise RunError(f"{path} is no fine-tuned run: it has no whole {FINETUNE}")
    settings = _settings_of(about)
    name = os.path.basename(os.path.abspath(settings.kind.path(settings.task)))
    build = partial(settings.kind.model, name=name, classes=len(about["classes"]), settings=settings)
    return load_run(path, step=step, device=device, note=note, build=build, finetuning=about)


def is_finetuned(path: Path | str) -> bool:
    return (Path(path) / FINETUNE).is_file()


def identity(run: Run) -> dict[str, str]:
    """Which weights: the checkpoint and its checksum, of one that many ranks wrote that of its parts' checksums."""
    folder = RunDirectory(run.path).checkpoints / f"step-{run.step}"
    parts = [told for name, told in sorted(checksums(folder).items()) if re.match(r"model[./]", name)]
    whole = parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()
    return {"checkpoint": folder.name, "sha256": whole}


def _check_same(directory: RunDirectory, about: dict[str, Any]) -> None:
    """RunError if the directory holds a fine-tuning of other weights or settings."""
    before = directory.read_json(FINETUNE)
    if before is None and (steps_of(directory.checkpoints) or (directory.path / EVALUATION).exists()):
        raise RunError(f"{directory.path} has no whole {FINETUNE}, which says what was fine-tuned; {ELSEWHERE}")
    before = before or about  # a new one
    differing = [key for key in about | before if about.get(key) != before.get(key)]
    if differing == ["pretrained"]:
        raise RunError(f"{directory.path} was fine-tuned from other weights: pre-training went on; {ELSEWHERE}")
    if differing:
        told = "; ".join(f"{key} is {before.get(key)!r} there, {about.get(key)!r} here" for key in differing)
        raise RunError(f"{directory.path} holds a fine-tuning of another configuration: {told}; {ELSEWHERE}")


def compare_tasks(
    out: Path,
    tasks: Sequence[Finetuning],
    *,
    routers: Sequence[str] | None = None,
    repeats: int = 1,
    device: str = "cpu",
    jobs: int | None = None,
    hosts: Hosts | None = None,
    progress: Progress,
    ended: Callable[[], object] = lambda: None,
    stop: Stop | None = None,
) -> None:
    """Fine-tunes every router and seed of a comparison on these tasks; what is done is left as it is.

    One seed is fine-tuned for all tasks and routers before the next. Rows of one seed see the same batches in the same
    order and start from the same head.

    Args:
        out: a comparison directory whose runs are trained.
        routers: only these rows; default: all that have saved weights.
        repeats: fine-tunings of each pre-trained run.
        jobs, hosts, stop: as of `training.compare.compare`; `jobs` fine-tunings go on at a time.
        ended: called when a fine-tuning has its evaluation.

    Raises:
        RunError: no comparison, another process works in it, or what `finetune` raises.
        Stopped: `stop` was set; everything is saved.
    """
    plan = required_plan(out)
    loaded = {settings.task: open_task(settings.task) for settings in tasks}  # before anything is trained
    runs = saved_runs(out, plan, progress.note, routers)
    imports = imports_of(plan["settings"])
    for router in dict.fromkeys(router for router, _ in runs):
        import_recorded(router, imports)
    todo = [
        (settings, router, seed, seed + REPEAT * repeat)
        for repeat in range(repeats)
        for seed in dict.fromkeys(seed for _, seed in runs)
        for settings in tasks
        for router, own in runs
        if own == seed
    ]
    places = [
        finetuned_path(run_path(out, router, seed), settings.variant, own) for settings, router, seed, own in todo
    ]
    finished = {number for number, place in enumerate(places) if (place / EVALUATION).exists()}
    titles = [
        f"{number}/{len(todo)} {router} on {settings.variant}, seed {own}"
        for number, (settings, router, _, own) in enumerate(todo, 1)
    ]

    prints = {name: data.fingerprint for name, data in loaded.items()}
    setup = partial(_tuner, out, device, named_before(imports), prints)
    with alone(out):
        do_all(
            todo, titles, setup, partial(setup, loaded), jobs, progress=progress,
            ended=lambda number: None if number in finished else ended(), stop=stop, hosts=hosts,
        )  # fmt: skip


def jobs_of(out: Path, device: str, routers: Sequence[str] | None = None) -> int | None:
    """`default_jobs` for the models of a comparison, or of some of its rows."""
    plan = required_plan(out)
    runs = [run_path(out, router, seed) for seed in plan["seeds"] for router in routers or plan["routers"]]
    first = next((run for run in map(RunDirectory, runs) if run.exists), None)
    return None if first is None else default_jobs(first.config(), device)


def _tuner(
    out: Path, device: str, imports: Sequence[str], prints: Mapping[str, str], loaded: Mapping[str, Any] | None = None
) -> Work:
    """Fine-tunes a row, or continues; a worker, without `loaded`, imports and reads each task's data itself.

    Data whose fingerprint is not that in `prints`, which the command read, are refused.
    """
    for name in imports if loaded is None else ():
        import_named(name)
    read = dict(loaded or {})

    def work(one: tuple[Finetuning, str, int, int], progress: Progress, stop: Stop | None) -> None:
        settings, router, seed, own_seed = one
        if settings.task not in read:
            read[settings.task] = open_task(settings.task)
            if read[settings.task].fingerprint != prints[settings.task]:
                raise RunError(f"{settings.task} has changed since this command read it: bring it back as it was")
        run = run_path(out, router, seed)
        try:
            finetune(
                run, settings.for_router(router), seed=own_seed, out=finetuned_path(run, settings.variant, own_seed),
                data=read[settings.task], device=device, progress=progress, stop=stop,
            )  # fmt: skip
        except Interrupted as saved:
            raise Stopped(f"stopped in {saved.out} after step {saved.step}; saved: the same command goes on") from None

    return work
