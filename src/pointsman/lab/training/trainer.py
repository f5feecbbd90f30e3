"""The training loop: from a RunConfig to a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pointsman._errors import Stopped
from pointsman._files import alone, within, write_whole
from pointsman.lab.data import Corpus
from pointsman.lab.evaluation.over_ranks import AgreedStop, each_its_own
from pointsman.lab.progress import Progress, Quiet, Stop
from pointsman.lab.runs.checkpoints import Checkpoint, last_checkpoint, prune, remove_leftovers
from pointsman.lab.runs.directory import RunDirectory
from pointsman.lab.runs.environment import differing_bits, environment
from pointsman.lab.runs.metrics import MetricsFile
from pointsman.lab.runs.paths import ENVIRONMENT, EVALUATION, METRICS, VOCABULARY
from pointsman.lab.runs.record import label
from pointsman.lab.training.best import FILE, Best
from pointsman.lab.training.checkpoint import stored_tensors, write_checkpoint
from pointsman.lab.training.config import RunConfig, flat
from pointsman.lab.training.kernels import choose_kernels, deterministic_algorithms, saved_kernels
from pointsman.lab.training.language_modelling import LanguageModelling
from pointsman.lab.training.precision import autocast
from pointsman.lab.training.progress import Diverged, Interrupted, Monitor
from pointsman.lab.training.sharded import Saver
from pointsman.lab.training.state import TrainingState
from pointsman.lab.training.task import EvaluationContext, Task
from pointsman.lab.training.tasks import pretraining_task
from pointsman.lab.training.times import Times
from pointsman.lab.training.trackers import Tracker, begin_trackers, find_library, tracked
from pointsman.ops.kernels import Kernels, using
from pointsman.parallel.layout import Layout
from pointsman.parallel.start import one_after_another
from pointsman.ranks import ALONE, Ranks


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
    ranks: Ranks = ALONE,
    layout: Layout | None = None,
) -> TrainResult:
    """Trains and evaluates the run that `config` describes, in the run directory `out`.

    With several ranks every rank calls it with the same arguments. Rank 0 writes the files, all of them the
    checkpoints, and the figures are those of one process with the whole batch.

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
        given = None if corpus is None else LanguageModelling(corpus)
        task = given or one_after_another(ranks, lambda: pretraining_task(config))
    config = task.prepared(config)
    ranks.agree(_what_ranks_share(config, task, layout, out, resume), "the settings")
    # before anything is written: checks all settings
    state = TrainingState(config, task, torch.device(device), ranks=ranks, layout=layout)
    best = Best(state.model, config, task, ranks) if config.choose != "last" else None
    watch = monitor(state.model, config.observe_every, config.seed) if monitor and state.sparse else None
    ranks.by_first(lambda: directory.check(config, resume=resume))  # before a lock is left in somebody else's folder
    with ExitStack() as held:
        ranks.by_first(lambda: held.enter_context(alone(directory.path)))
        return _trained(state, best, directory, watch, kernels, progress, stop, resume=resume)


def _what_ranks_share(config: RunConfig, task: Task, layout: Layout | None, out: Path | str, resume: bool) -> Any:
    here = {"layout": str(layout), "out": str(out), "resume": resume, "data": task.fingerprint}
    versions = {f"version of {name}": of for name, of in environment({})["packages"].items()}
    return {**flat(config.to_dict()), **here, **versions}


def _trained(
    state: TrainingState,
    best: Best | None,
    directory: RunDirectory,
    watch: Monitor | None,
    kernels: Kernels | None,
    progress: Progress,
    stop: Stop | None,
    *,
    resume: bool,
) -> TrainResult:
    """`train` in a directory that no other process works in."""
    config, task, ranks = state.config, state.task, state.ranks
    for name in config.track:
        find_library(name)
    ranks.by_first(lambda: directory.claim(config, resume=resume))
    checkpoint = _restored(state, watch, directory, progress) if resume else None
    for note in task.notes if checkpoint is None else ():
        progress.note(note)
    record = ranks.by_first(lambda: directory.read_json(EVALUATION))
    if record is not None and state.step == config.steps and task.is_current(record, config):
        progress.note(f"{directory.path} is finished: {config.steps} steps and the evaluation are done")
        return TrainResult(directory.path, state.step, record, already_finished=True)

    def choose() -> Kernels:
        if checkpoint is None:
            return choose_kernels(config, kernels, state.device)
        return saved_kernels(config, checkpoint, state.device)

    chosen = ranks.by_first(choose)
    cuda = state.device.type == "cuda"
    here = environment(
        chosen.to_dict(),
        device=str(state.device),
        device_name=torch.cuda.get_device_name(state.device) if cuda else None,
        threads=torch.get_num_threads(),
    )
    if checkpoint:
        _note_other_machine(checkpoint, here, progress)
    if ranks.count > 1:
        here |= {"ranks": ranks.count, "layout": str(state.layout)}

    def write() -> None:
        directory.write_json(ENVIRONMENT, here)
        for name, values in task.files.items():
            directory.write_json(name, values)
        write_whole(directory.path / VOCABULARY, task.vocabulary.to_json())

    ranks.by_first(write)
    with (
        using(chosen),
        deterministic_algorithms(config.deterministic),
        _Training(state, best, directory, here, watch, progress, stop) as run,
    ):
        if best and checkpoint and run.metrics:
            best.restore(checkpoint, run.metrics.rows, state.step)
        run.loop()
        return TrainResult(directory.path, state.step, run.evaluate())


class _Training:
    """The loop of a run, and what it writes."""

    def __init__(
        self,
        state: TrainingState,
        best: Best | None,
        directory: RunDirectory,
        here: Mapping[str, Any],
        monitor: Monitor | None,
        progress: Progress,
        stop: Stop | None,
    ) -> None:
        self.config, self.state, self.directory, self.here = state.config, state, directory, here
        self.best = best
        self.monitor, self.progress, self.stop = monitor, progress, stop
        self.ranks = state.ranks
        self.trackers: list[Tracker] = []
        self.metrics: MetricsFile | None = None  # of rank 0
        self.ranks.by_first(self._open_files)
        self.saver = Saver(self.ranks) if self.ranks.count > 1 else None
        self.saved = state.step if state.step else -1
        self.times = Times()

    def _open_files(self) -> None:
        config, folder, step = self.config, self.directory.path, self.state.step
        name = f"{label(config.model.router)}, seed {config.seed}"
        self.trackers = begin_trackers(config.track, config.tensorboard, folder, step, name, config.to_dict())
        self.metrics = MetricsFile(folder / METRICS, step)

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self.saver:
            self.saver.close()
        if self.metrics:
            self.metrics.close()
        for tracker in self.trackers:
            tracker.close()

    def loop(self) -> None:
        """Steps until the run is done; validates and saves on the way."""
        config, state = self.config, self.state
        self.progress.phase("train", config.steps, state.step)
        while True:
            if self._due(config.validate_every) and (top_k := self.ranks.by_first(self._not_validated)):
                self.validate(top_k)
            if state.step == config.steps:
                if self.best and self.saved == state.step:  # this step's validation came after its checkpoint
                    self.saved = -1
                    self.save()
                return
            with self.times:
                self.one_step()
            if self._due(config.checkpoint_every) or self._stopping():
                self.save()
            if self._stopping():
                self._wait_for_save()
                raise Interrupted(self.directory.path, state.step)

    def one_step(self) -> None:
        """One optimizer step, its line of metrics and the display."""
        try:
            row = self.state.train_step(self.monitor, self.stop)
        except Diverged as error:
            self._wait_for_save()
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
        wanted |= {self.best.top_k} if self.best else set()
        assert self.metrics
        rows = (row for row in self.metrics.rows if row["kind"] == "valid" and row["step"] == self.state.step)
        return sorted(wanted - {row.get("top_k") for row in rows})

    def validate(self, top_k: Sequence[int]) -> None:
        """Scores the validation part at these k."""
        task, config = self.state.task, self.config
        split = task.validation_split(config)
        if split is None:
            return
        with self._saving_if_stopped():
            results = self._evaluated(split, top_k, final=False)
        self._write(
            {"kind": "valid", "step": self.state.step, "top_k": result["top_k"], "loss": result["nats"],
             "metric": result["metric"], "value": result["value"]}
            for result in results
        )  # fmt: skip
        if self.best and self.metrics:
            self.best.consider(self.metrics.rows, self.state.step)
        self.progress.phase("train", self.config.steps, self.state.step)

    def evaluate(self) -> Mapping[str, Any]:
        """The final evaluation, of the last step's weights, at every k."""
        with self._saving_if_stopped(), self.best.in_place() if self.best else nullcontext():
            results = self._evaluated(self.state.task.reported_split(self.config), self.config.eval_top_k, final=True)
            self._wait_for_save()
            return self.ranks.by_first(lambda: self._report(results))

    def _report(self, results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Writes and returns evaluation.json."""
        task, model, config = self.state.task, self.state.model, self.config
        assert self.metrics
        record = task.record(model, config, self.state.step, results, self.metrics.rows)
        if self.best:
            record["chosen_step"] = self.best.step
        self.metrics.sync()  # the evaluation says that the run is finished: no row is made up after it
        for name, content in task.result_files(config).items():
            write_whole(within(self.directory.path, *name.split("/")), content)
        self.directory.write_json(EVALUATION, record)
        return record

    def _evaluated(self, split: str, top_k: Sequence[int], *, final: bool) -> list[dict[str, Any]]:
        task, state = self.state.task, self.state
        stop = self.stop if self.ranks.count == 1 else AgreedStop(self.ranks, self.stop)
        context = EvaluationContext(autocast(self.config, state.device), self.progress, stop, final, self.ranks)
        with each_its_own(state.model):
            return task.evaluate(state.model, self.config, split, top_k, context)

    @contextmanager
    def _saving_if_stopped(self) -> Iterator[None]:
        try:
            yield
        except Stopped:
            self.save()
            self._wait_for_save()
            raise Interrupted(self.directory.path, self.state.step) from None

    def save(self) -> None:
        """Writes a checkpoint of this step, unless it is there or there is nothing to save yet."""
        if self.state.step in (0, self.saved):
            return
        description: dict[str, Any] = {
            "config": self.config.to_dict(),
            "data": self.state.task.fingerprint,
            "vocabulary": self.state.task.vocabulary.digest,
            "kernels": self.here["kernels"],
            "environment": dict(self.here),
        }
        tensors = self.state.tensors(self.monitor)
        if self.best and self.best.step is not None:
            tensors, description = tensors | self.best.files(), description | {FILE: self.best.step}
        keep = self.config.keep_checkpoints
        self.ranks.by_first(lambda: self.metrics.sync() if self.metrics else None)
        folder, step = self.directory.checkpoints, self.state.step
        if self.saver:
            self.saver.save(folder, step, self.state.model, tensors, description, keep)
        else:
            write_checkpoint(folder, step, tensors, description, keep)
        self.saved = step

    def _wait_for_save(self) -> None:
        if self.saver:
            self.saver.wait()

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = list(rows)
        if rows and self.metrics:
            self.metrics.write(rows)
            for tracker in self.trackers:
                tracker.log(tracked(rows), rows[0]["step"])

    def _due(self, every: int) -> bool:
        step = self.state.step
        return step == self.config.steps or (every > 0 and step > 0 and step % every == 0)

    def _stopping(self) -> bool:
        if self.ranks.count > 1:
            return self.state.stopping
        return self.stop is not None and self.stop.is_set()


def _restored(
    state: TrainingState, monitor: Monitor | None, directory: RunDirectory, progress: Progress
) -> Checkpoint | None:
    """Puts the last usable checkpoint of a run into `state`; says which, and which were passed over and why."""

    ranks = state.ranks

    def foreign(checkpoint: Checkpoint) -> str | None:
        if checkpoint.state.get("data") != state.task.fingerprint:
            return "it was trained on other data (the files have changed)"
        return state.misfit(stored_tensors(checkpoint, "model"))

    def find() -> Checkpoint | None:
        remove_leftovers(directory.checkpoints)
        return last_checkpoint(directory.checkpoints, progress.note, foreign)

    found = ranks.by_first(find)
    if found is None:
        progress.note(f"{directory.path}: there is no whole checkpoint, so the run begins at step 0")
        return None
    ranks.each(lambda: state.restore(found, monitor))
    keep = state.config.keep_checkpoints  # a kill may have come before it
    ranks.by_first(lambda: prune(directory.checkpoints, found.step, keep))
    if found.step < state.config.steps:
        progress.note(f"{directory.path} goes on after step {found.step} of {state.config.steps}")
    return found


def _note_other_machine(checkpoint: Checkpoint, here: Mapping[str, Any], progress: Progress) -> None:
    if differing := differing_bits(checkpoint.state.get("environment", {}), here):
        progress.note(f"another machine than the checkpoint's, so the last bits may differ: {'; '.join(differing)}")
