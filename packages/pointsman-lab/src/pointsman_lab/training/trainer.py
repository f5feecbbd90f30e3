"""The training loop: from a RunConfig to a run directory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.ops.kernels import using
from pointsman.parallel.layout import Layout
from pointsman.ranks import ALONE, Ranks
from pointsman_lab._files import alone, write_whole
from pointsman_lab.processes import one_after_another
from pointsman_lab.progress import Progress, Quiet, Stop
from pointsman_lab.runs.checkpoints import Checkpoint, CheckpointError, last_checkpoint, prune, remove_leftovers
from pointsman_lab.runs.environment import differing_bits, environment
from pointsman_lab.runs.imports import check_imported, origin_of
from pointsman_lab.runs.paths import ENVIRONMENT, EVALUATION, VOCABULARY
from pointsman_lab.training.checkpoint import misfit, stored_tensors
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.kernels import check_kernels, deterministic_algorithms
from pointsman_lab.training.loop import TrainingLoop
from pointsman_lab.training.settings import flat
from pointsman_lab.training.state import TrainingState
from pointsman_lab.training.task import Task, pretraining_task
from pointsman_lab.training.trackers import find_library


@dataclass(frozen=True)
class TrainResult:
    """What a run left: its directory, finished steps, evaluation.json; and whether nothing was left to do."""

    out: Path
    step: int
    evaluation: Mapping[str, Any]
    already_finished: bool = False


def train(
    config: RunConfig,
    out: Path | str,
    *,
    resume: bool = False,
    device: str = "cpu",
    task: Task | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
    ranks: Ranks = ALONE,
    layout: Layout | None = None,
) -> TrainResult:
    """Trains and evaluates the run that `config` describes, in the run directory `out`.

    With several ranks every rank calls it with the same arguments. Rank 0 writes the files, all of them the
    checkpoints, and the figures are those of one process with the whole batch.

    Args:
        out: made if need be.
        resume: go on from the last whole checkpoint, at step 0 without one. A finished run stays as it is.
        device: "cpu", "cuda", "cuda:1", …
        task: what is learned; None: what models of this family are trained on.
        stop: asks the run to save and end; one rank's is enough.
        ranks: who shares each batch.
        layout: how they divide the model; None: in shards.

    Raises:
        RunError: settings, data, directory or disk that do not allow the run; in one line.
        Diverged: a loss or gradient that is not finite (also a RunError); names step, layer and last good checkpoint.
        Interrupted: `stop` was set; the run has saved.
    """
    progress = progress if progress and ranks.first else Quiet()
    directory = RunDirectory(out)
    if task is None:
        check_imported([config.model.router], config.model.dim, config.model.num_experts)
        task = one_after_another(ranks, lambda: pretraining_task(config))
    config = task.prepared(config)
    versions = {f"version of {name}": of for name, of in environment({})["packages"].items()}
    here = {"layout": str(layout), "out": str(out), "resume": resume, "data": task.fingerprint}
    ranks.agree({**flat(config.to_dict()), **here, **versions}, "the settings")
    # before anything is written: checks all settings, and data that the end needs
    check_kernels(config, torch.device(device))
    task.check(config)
    state = TrainingState(config, task, torch.device(device), ranks=ranks, layout=layout)
    _check_choice(config, task, ranks)
    watch = RoutingMonitor(state.model, config.observe_every, config.seed) if state.sparse else None
    ranks.by_first(lambda: directory.check(config, resume=resume))  # before a lock is left in somebody else's folder
    for name in config.track:
        find_library(name)
    with ExitStack() as held:
        ranks.by_first(lambda: held.enter_context(alone(directory.path)))
        ranks.by_first(lambda: directory.claim(config, resume=resume))
        checkpoint = _restored(state, watch, directory, progress) if resume else None
        for note in task.notes if checkpoint is None else ():
            progress.note(note)
        record = ranks.by_first(lambda: directory.read_json(EVALUATION))
        if record is not None and state.step == config.steps and task.is_current(record, config):
            if checkpoint and checkpoint.state.get("vocabulary") == task.vocabulary.digest:
                ranks.by_first(lambda: _write_vocabulary(directory, task))  # it may be lost or damaged
            progress.note(f"{directory.path} is finished: {config.steps} steps and the evaluation are done")
            return TrainResult(directory.path, state.step, record, already_finished=True)
        here = _environment(state)
        if checkpoint and (differing := differing_bits(checkpoint.state.get("environment", {}), here)):
            told = "another machine than the checkpoint's, so the last bits may differ"
            progress.note(f"{told}: {'; '.join(differing)}")
        ranks.by_first(lambda: _write_description(directory, task, here))
        held.enter_context(using(config.kernels))
        held.enter_context(deterministic_algorithms(config.deterministic))
        run = held.enter_context(TrainingLoop(state, directory, here, watch, progress, stop))
        run.loop()
        return TrainResult(directory.path, state.step, run.evaluate())


def _check_choice(config: RunConfig, task: Task, ranks: Ranks) -> None:
    """Refuses `choose="best-valid"` for runs that have nothing to choose by."""
    if config.choose == "last":
        return
    if ranks.count > 1:
        raise RunError(f"choose={config.choose}: it is for runs of one process; allowed here is last")
    held_out = task.validation_split(config)
    if not task.may_choose or held_out in (None, task.reported_split(config)):
        told = "it is for fine-tuning on tasks with held-out rows; allowed here is last"
        raise RunError(f"choose={config.choose}: {told}")
    if not config.validate_every:
        raise RunError(f"choose={config.choose}: validate_every must be above 0")


def _environment(state: TrainingState) -> dict[str, Any]:
    """environment.json."""
    name = torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else None
    kernels, threads = asdict(state.config.kernels), torch.get_num_threads()
    here = environment(kernels, device=str(state.device), device_name=name, threads=threads)
    here |= {"origin": origin} if (origin := origin_of(state.config.model.router)) else {}
    return here if state.ranks.count == 1 else {**here, "ranks": state.ranks.count, "layout": str(state.layout)}


def _write_description(directory: RunDirectory, task: Task, here: Mapping[str, Any]) -> None:
    directory.write_json(ENVIRONMENT, here)
    for name, values in task.files.items():
        directory.write_json(name, values)
    _write_vocabulary(directory, task)


def _write_vocabulary(directory: RunDirectory, task: Task) -> None:
    write_whole(directory.path / VOCABULARY, task.vocabulary.to_json())


def _restored(
    state: TrainingState, monitor: RoutingMonitor | None, directory: RunDirectory, progress: Progress
) -> Checkpoint | None:
    """Puts the last usable checkpoint of a run into `state`; says which, and which were passed over and why."""

    ranks = state.ranks

    def foreign(checkpoint: Checkpoint) -> str | None:
        if checkpoint.state.get("data") != state.task.fingerprint:
            other = "was trained on other data (the files have changed)"
            raise RunError(f"{directory.path} {other}: bring them back, or train into another --out")
        try:
            if (chosen := directory.chosen_step(state.config, checkpoint.step)) != checkpoint.step:
                directory.open(state.config, chosen)
        except CheckpointError as error:
            return f"the weights that its validations chose are lost: {error}"
        return misfit(state.model, stored_tensors(checkpoint, "model")) or directory.foreign(state.config, checkpoint)

    def find() -> Checkpoint | None:
        remove_leftovers(directory.checkpoints)
        return last_checkpoint(directory.checkpoints, progress.note, foreign)

    found = ranks.by_first(find)
    if found is None:
        progress.note(f"{directory.path}: there is no whole checkpoint, so the run begins at step 0")
        return None
    ranks.each(lambda: state.restore(found, monitor))
    keep, chosen = state.config.keep_checkpoints, directory.chosen_step(state.config, found.step)
    ranks.by_first(lambda: prune(directory.checkpoints, found.step, keep, chosen))  # a kill may have come before it
    if found.step < state.config.steps:
        progress.note(f"{directory.path} goes on after step {found.step} of {state.config.steps}")
    return found
