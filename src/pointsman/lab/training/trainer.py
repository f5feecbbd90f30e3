"""The training loop: from a RunConfig to a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pointsman._errors import Stopped
from pointsman._files import alone, within, write_whole
from pointsman.lab.data import Corpus
from pointsman.lab.progress import Progress, Quiet, Stop
from pointsman.lab.runs.checkpoints import Checkpoint, last_checkpoint, prune, remove_leftovers
from pointsman.lab.runs.directory import RunDirectory
from pointsman.lab.runs.environment import differing_bits, environment
from pointsman.lab.runs.metrics import MetricsFile
from pointsman.lab.runs.paths import ENVIRONMENT, EVALUATION, METRICS, VOCABULARY
from pointsman.lab.runs.record import label
from pointsman.lab.training.checkpoint import checkpoint_tensors, write_checkpoint
from pointsman.lab.training.config import RunConfig
from pointsman.lab.training.kernels import choose_kernels, deterministic_algorithms, saved_kernels
from pointsman.lab.training.language_modelling import LanguageModelling
from pointsman.lab.training.precision import autocast
from pointsman.lab.training.progress import Diverged, Interrupted, Monitor
from pointsman.lab.training.state import TrainingState
from pointsman.lab.training.task import EvaluationContext, Task
from pointsman.lab.training.tasks import pretraining_task
from pointsman.lab.training.times import Times
from pointsman.lab.training.trackers import begin_trackers, find_library, tracked
from pointsman.ops.kernels import Kernels, using


@dataclass(frozen=True)
class TrainResult:
    """What a run left.

    Attributes:
        out: the run directory.
        step: finished steps.
        evaluation: the content of evaluation.json.
        already_finished: nothing was left to do.
    """

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
    corpus: Corpus | None = None,
    task: Task | None = None,
    kernels: Kernels | None = None,
    progress: Progress | None = None,
    monitor: Callable[[nn.Module, int, int], Monitor] | None = None,
    stop: Stop | None = None,
) -> TrainResult:
    """Trains and evaluates the run that `config` describes, in the run directory `out`.

    Args:
        config: the settings.
        out: made if need be.
        resume: go on from the last whole checkpoint, at step 0 without one. A finished run stays as it is.
        device: "cpu", "cuda", "cuda:1", …
        corpus: the data, if they are loaded already.
        task: what is learned; default: what `tasks.TASKS` says of the model's family.
        kernels: for a new run, instead of what a timing chooses; a resumed run keeps its own.
        progress: a display.
        monitor: makes what looks at the routing on the way, from the model, a number of steps and the seed
            (`diagnostics.RoutingMonitor`).
        stop: asks the run to save and end.

    Raises:
        RunError: settings, data, directory or disk that do not allow the run; in one line.
        Diverged: a loss or gradient that is not finite (also a RunError); names step, layer and last good checkpoint.
        Interrupted: `stop` was set; the run has saved.
    """
    progress = progress or Quiet()
    directory = RunDirectory(out)
    if task is None:
        task = pretraining_task(config) if corpus is None else LanguageModelling(corpus)
    config = task.prepared(config)
    state = TrainingState(config, task, torch.device(device))  # before anything is written: checks all settings
    watch = monitor(state.model, config.observe_every, config.seed) if monitor and state.sparse else None
    directory.check(config, resume=resume)  # before a lock file is left in somebody else's folder
    with alone(directory.path):
        return _trained(state, directory, watch, kernels, progress, stop, resume=resume)


def _trained(
    state: TrainingState,
    directory: RunDirectory,
    watch: Monitor | None,
    kernels: Kernels | None,
    progress: Progress,
    stop: Stop | None,
    *,
    resume: bool,
) -> TrainResult:
    """`train` in a directory that no other process works in."""
    config, task = state.config, state.task
    for name in config.track:
        find_library(name)
    directory.claim(config, resume=resume)
    checkpoint = _restored(state, watch, directory, progress) if resume else None
    for note in task.notes if checkpoint is None else ():
        progress.note(note)
    record = directory.read_json(EVALUATION)
    if record is not None and state.step == config.steps and task.is_current(record, config):
        progress.note(f"{directory.path} is finished: {config.steps} steps and the evaluation are done")
        return TrainResult(directory.path, state.step, record, already_finished=True)
    kernels = choose_kernels(config, kernels) if checkpoint is None else saved_kernels(config, checkpoint)
    cuda = state.device.type == "cuda"
    here = environment(
        kernels.to_dict(),
        device=str(state.device),
        device_name=torch.cuda.get_device_name(state.device) if cuda else None,
        threads=torch.get_num_threads(),
    )
    if checkpoint:
        _note_other_machine(checkpoint, here, progress)
    directory.write_json(ENVIRONMENT, here)
    for name, values in task.files.items():
        directory.write_json(name, values)
    write_whole(directory.path / VOCABULARY, task.vocabulary.to_json())
    with (
        using(kernels),
        deterministic_algorithms(config.deterministic),
        _Training(state, directory, here, watch, progress, stop) as run,
    ):
        run.loop()
        return TrainResult(directory.path, state.step, run.evaluate())


class _Training:
    """The loop of a run, and what it writes."""

    def __init__(
        self,
        state: TrainingState,
        directory: RunDirectory,
        here: Mapping[str, Any],
        monitor: Monitor | None,
        progress: Progress,
        stop: Stop | None,
    ) -> None:
        self.config, self.state, self.directory, self.here = state.config, state, directory, here
        self.monitor, self.progress, self.stop = monitor, progress, stop
        config = self.config
        name = f"{label(config.model.router)}, seed {config.seed}"
        self.trackers = begin_trackers(
            config.track, config.tensorboard, directory.path, state.step, name, config.to_dict()
        )
        self.metrics = MetricsFile(directory.path / METRICS, state.step)
        self.saved = state.step if state.step else -1
        self.times = Times()

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.metrics.close()
        for tracker in self.trackers:
            tracker.close()

    def loop(self) -> None:
        """Steps until the run is done; validates and saves on the way."""
        config, state = self.config, self.state
        self.progress.phase("train", config.steps, state.step)
        while True:
            if self._due(config.validate_every) and (top_k := self._not_validated()):
                self.validate(top_k)
            if state.step == config.steps:
                return
            with self.times:
                self.one_step()
            if self._due(config.checkpoint_every) or self._stopping():
                self.save()
            if self._stopping():
                raise Interrupted(self.directory.path, state.step)

    def one_step(self) -> None:
        """One optimizer step, its line of metrics and the display."""
        try:
            row = self.state.train_step(self.monitor)
        except Diverged as error:
            kept = f"the last good checkpoint is step-{self.saved}" if self.saved > 0 else "there is no checkpoint yet"
            raise Diverged(f"{error}; {kept}; a lower learning_rate or clip_norm may help") from None
        self.times.step(row.pop("step_seconds"), row.pop("work_seconds"))
        speed = self.state.tokens_per_step / self.times.steps[-1]
        self.progress.advance(row["step"], {**row, "tokens_per_second": speed})
        if row["step"] % self.config.log_every == 0 or row["step"] == self.config.steps:
            seconds, overhead = self.times.take()
            speed = self.state.tokens_per_step / seconds
            self._write([{**row, "tokens_per_second": speed, "step_seconds": seconds, "overhead": overhead}])
        if self.monitor:
            self._write(self.monitor.rows())

    def _not_validated(self) -> list[int]:
        """The smallest and the largest k of the final evaluation, but for those with a line of this step.

        A run that is killed while it writes has the lines of some k only.
        """
        wanted = {min(self.config.eval_top_k), max(self.config.eval_top_k)}
        rows = (row for row in self.metrics.rows if row["kind"] == "valid" and row["step"] == self.state.step)
        return sorted(wanted - {row.get("top_k") for row in rows})

    def validate(self, top_k: Sequence[int]) -> None:
        """Scores the validation part at these k."""
        task, config = self.state.task, self.config
        split = task.validation_split(config)
        if split is None:
            return
        with self._saving_if_stopped():
            results = task.evaluate(self.state.model, config, split, top_k, self._context(final=False))
        self._write(
            {"kind": "valid", "step": self.state.step, "top_k": result["top_k"], "loss": result["nats"],
             "metric": result["metric"], "value": result["value"]}
            for result in results
        )  # fmt: skip
        self.progress.phase("train", self.config.steps, self.state.step)

    def evaluate(self) -> Mapping[str, Any]:
        """The final evaluation, of the last step's weights, at every k."""
        task, model, config = self.state.task, self.state.model, self.config
        with self._saving_if_stopped():
            split = task.reported_split(config)
            results = task.evaluate(model, config, split, config.eval_top_k, self._context(final=True))
        record = task.record(model, config, self.state.step, results, self.metrics.rows)
        self.metrics.sync()  # the evaluation says that the run is finished: no row is made up after it
        for name, content in task.result_files(config).items():
            write_whole(within(self.directory.path, *name.split("/")), content)
        self.directory.write_json(EVALUATION, record)
        return record

    def _context(self, *, final: bool) -> EvaluationContext:
        return EvaluationContext(autocast(self.config, self.state.device), self.progress, self.stop, final)

    @contextmanager
    def _saving_if_stopped(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            self.save()
            raise Interrupted(self.directory.path, self.state.step) from None

    def save(self) -> None:
        """Writes a checkpoint of this step, unless it is there or there is nothing to save yet."""
        if self.state.step in (0, self.saved):
            return
        description = {
            "config": self.config.to_dict(),
            "data": self.state.task.fingerprint,
            "vocabulary": self.state.task.vocabulary.digest,
            "kernels": self.here["kernels"],
            "environment": dict(self.here),
        }
        tensors = self.state.tensors(self.monitor)
        keep = self.config.keep_checkpoints
        self.metrics.sync()
        write_checkpoint(self.directory.checkpoints, self.state.step, tensors, description, keep)
        self.saved = self.state.step

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = list(rows)
        if rows:
            self.metrics.write(rows)
            for tracker in self.trackers:
                tracker.log(tracked(rows), rows[0]["step"])

    def _due(self, every: int) -> bool:
        step = self.state.step
        return step == self.config.steps or (every > 0 and step > 0 and step % every == 0)

    def _stopping(self) -> bool:
        return self.stop is not None and self.stop.is_set()


def _restored(
    state: TrainingState, monitor: Monitor | None, directory: RunDirectory, progress: Progress
) -> Checkpoint | None:
    """Puts the last usable checkpoint of a run into `state`; says which, and which were passed over and why."""

    def foreign(checkpoint: Checkpoint) -> str | None:
        if checkpoint.state.get("data") != state.task.fingerprint:
            return "it was trained on other data (the files have changed)"
        return state.misfit(checkpoint_tensors(checkpoint, "model"))

    remove_leftovers(directory.checkpoints)
    found = last_checkpoint(directory.checkpoints, progress.note, foreign)
    if found is None:
        progress.note(f"{directory.path}: there is no whole checkpoint, so the run begins at step 0")
        return None
    state.restore(found, monitor)
    prune(directory.checkpoints, found.step, state.config.keep_checkpoints)  # a kill may have come before it
    if found.step < state.config.steps:
        progress.note(f"{directory.path} goes on after step {found.step} of {state.config.steps}")
    return found


def _note_other_machine(checkpoint: Checkpoint, here: Mapping[str, Any], progress: Progress) -> None:
    if differing := differing_bits(checkpoint.state.get("environment", {}), here):
        progress.note(f"another machine than the checkpoint's, so the last bits may differ: {'; '.join(differing)}")
