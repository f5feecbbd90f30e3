"""The loop of a run: steps, validation, checkpoints, metrics, and the final evaluation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pointsman._errors import Stopped
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman_lab._files import within, write_whole
from pointsman_lab.evaluation.passes import AgreedStop, EvaluationContext, each_its_own
from pointsman_lab.progress import Progress, Stop
from pointsman_lab.runs.checkpoints import open_checkpoint, prune
from pointsman_lab.runs.paths import EVALUATION, METRICS
from pointsman_lab.runs.record import MetricsFile, label
from pointsman_lab.training.checkpoint import load_weights, write_checkpoint
from pointsman_lab.training.directory import RunDirectory, validated_k
from pointsman_lab.training.kernels import autocast
from pointsman_lab.training.sharded import Saver
from pointsman_lab.training.state import Diverged, Interrupted, TrainingState
from pointsman_lab.training.task import evaluated_k
from pointsman_lab.training.trackers import Library, TensorBoard, tracked


class Times:
    """Times of the steps since the last line of metrics; entered around each turn of the loop."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._work = self._before = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._before += time.perf_counter() - self._began

    def step(self, seconds: float, work: float) -> None:
        """A step took so long, of which forward, backward and optimizer `work`."""
        self.steps.append(seconds)
        self._work += work

    def take(self) -> tuple[float, float]:
        """Median seconds a step, and the share of the loop's time outside forward, backward and optimizer."""
        now = time.perf_counter()
        whole = self._before + now - self._began
        median, overhead = statistics.median(self.steps), 1 - self._work / whole
        self.steps, self._work, self._before, self._began = [], 0.0, 0.0, now
        return median, overhead


class TrainingLoop:
    """The loop of a run, and what it writes."""

    def __init__(
        self,
        state: TrainingState,
        directory: RunDirectory,
        here: Mapping[str, Any],
        monitor: RoutingMonitor | None,
        progress: Progress,
        stop: Stop | None,
    ) -> None:
        self.config, self.state, self.directory, self.here = state.config, state, directory, here
        self.monitor, self.progress, self.stop = monitor, progress, stop
        self.ranks = state.ranks
        self.trackers: list[TensorBoard | Library] = []
        self.metrics: MetricsFile | None = None  # of rank 0
        self.ranks.by_first(self._open_files)
        self.saver = Saver(self.ranks) if self.ranks.count > 1 else None
        self.saved = state.step if state.step else -1
        self.times = Times()

    def _open_files(self) -> None:
        config, folder, step = self.config, self.directory.path, self.state.step
        name = f"{label(config.model.router)}, seed {config.seed}"
        self.trackers = [TensorBoard(folder, step)] if config.tensorboard else []
        self.trackers += [Library(tracker, folder, name, config.to_dict()) for tracker in config.track]
        self.metrics = MetricsFile(folder / METRICS, step)
        if self.metrics.lost:
            self.progress.note(f"{folder / METRICS}: damaged lines left out: {self.metrics.lost:,}")

    def __enter__(self) -> TrainingLoop:
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
                return
            with self.times:
                due = (state.step + 1) % config.log_every == 0 or state.step + 1 == config.steps
                self._tell(self._step(), due)
            stopping = self._stopping()  # asked once: what is not saved now is not called saved below
            chooses = config.choose != "last" and self._due(config.validate_every)
            if stopping or chooses or self._due(config.checkpoint_every):
                self.save()
            if stopping:
                self._wait_for_save()
                raise Interrupted(self.directory.path, state.step)

    def _tell(self, row: dict[str, Any], due: bool) -> None:
        """A step's line on the display and, if it is due, in the metrics; and what the monitor saw."""
        self.times.step(row.pop("step_seconds"), row.pop("work_seconds"))
        figures = {**row, "tokens_per_second": self.state.tokens_per_step / self.times.steps[-1]}
        self.progress.advance(row["step"], figures)
        if due:
            seconds, overhead = self.times.take()
            speed = self.state.tokens_per_step / seconds
            self._write([{**row, "tokens_per_second": speed, "step_seconds": seconds, "overhead": overhead}])
        if self.monitor and (rows := self.monitor.rows()):
            self._write(rows)

    def _step(self) -> dict[str, Any]:
        try:
            return self.state.train_step(self.monitor, self.stop)
        except Diverged as error:
            self._wait_for_save()
            kept = f"the last good checkpoint is step-{self.saved}" if self.saved > 0 else "there is no checkpoint yet"
            raise Diverged(f"{error}; {kept}; a lower learning_rate or clip_norm may help") from None

    def _not_validated(self) -> list[int]:
        """The smallest and the largest k of the final evaluation, but for those with a line of this step.

        A run that is killed while it writes has the lines of some k only.
        """
        wanted = {choose(evaluated_k(self.config)) for choose in (min, max)}
        wanted |= {validated_k(self.config)} if self.config.choose != "last" else set()
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
        self.progress.phase("train", self.config.steps, self.state.step)

    def evaluate(self) -> Mapping[str, Any]:
        """The final evaluation, of the last or the chosen step's weights, at every k."""
        if (chosen := self._chosen()) != self.state.step:
            load_weights(self.state.model, open_checkpoint(self.directory.checkpoints / f"step-{chosen}"))
        with self._saving_if_stopped():
            results = self._evaluated(self.state.task.reported_split(self.config), self.config.eval_top_k, final=True)
            self._wait_for_save()
            return self.ranks.by_first(lambda: self._report(results))

    def _report(self, results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Writes and returns evaluation.json."""
        task, model, config = self.state.task, self.state.model, self.config
        assert self.metrics
        self.directory.check_kept()
        record = task.record(model, config, self.state.step, results, self.metrics.rows)
        if config.choose != "last":
            record["chosen_step"] = self._chosen()
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
        self.ranks.by_first(self.directory.check_kept)
        if self.state.step in (0, self.saved):
            return
        description: dict[str, Any] = {
            "config": self.config.to_dict(),
            "data": self.state.task.fingerprint,
            "vocabulary": self.state.task.vocabulary.digest,
            "environment": dict(self.here),
        }
        tensors = self.state.tensors(self.monitor)
        keep = self.config.keep_checkpoints
        self.ranks.by_first(lambda: self.metrics.sync() if self.metrics else None)
        folder, step = self.directory.checkpoints, self.state.step
        if self.saver:
            self.saver.save(folder, step, self.state.model, tensors, description, keep)
        else:
            write_checkpoint(folder, step, tensors, description)
            prune(folder, step, keep, self._chosen())
        self.saved = step

    def _chosen(self) -> int:
        return self.directory.chosen_step(self.config, self.state.step)

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
