"""The contract of a task as a library: `check_task` proves what every task promises, of this package or of another."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.parallel import STORE
from pointsman.parallel.start import start
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.evaluation.passes import EvaluationContext
from pointsman_lab.finetuning.run import finetune, open_run, open_task
from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.progress import Progress, Quiet, Stop
from pointsman_lab.runs.checkpoints import whole_checkpoint
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import Interrupted
from pointsman_lab.training.task import Task, pretraining_task
from pointsman_lab.training.trainer import TrainResult, train

Trains = Callable[[Path, Progress | None, Stop | None], TrainResult]


@dataclass(frozen=True)
class Example:
    """A small run of a task, of two steps or more, on data in files.

    Attributes:
        train: trains, or continues, in this directory.
        open: the task and its settings, with the data read anew.
        other: its fingerprint on other data.
        damaged: what the message must name, such as a file -> reads data with this mistake.
    """

    train: Trains
    open: Callable[[], tuple[Task, RunConfig]]
    other: Callable[[], str]
    damaged: Mapping[str, Callable[[], object]]

    @classmethod
    def of(cls, config: RunConfig, other: str, damaged: Mapping[str, str]) -> Example:
        """Of a task that `train` trains.

        Args:
            other: other data, as `--data` names them. damaged: what the message must name -> damaged data.
        """

        def opened(data: str) -> tuple[Task, RunConfig]:
            own = config.with_overrides({"data": data})
            task = pretraining_task(own)
            task.check(own)
            return task, task.prepared(own)

        def trains(folder: Path, progress: Progress | None, stop: Stop | None) -> TrainResult:
            return train(config, folder, resume=(folder / "config.json").exists(), progress=progress, stop=stop)

        return cls(
            trains, lambda: opened(config.data), lambda: opened(other)[0].fingerprint,
            {name: lambda spec=spec: opened(spec) for name, spec in damaged.items()},  # type: ignore[misc]
        )  # fmt: skip

    @classmethod
    def finetuned(cls, run: Path, settings: Finetuning, other: str, damaged: Mapping[str, str]) -> Example:
        """Of a task that is learned from the weights of a run; `other` and `damaged` as `--task` names them."""

        def opened() -> tuple[Task, RunConfig]:
            before, data = load_run(run), open_task(settings.task)
            weights = before.model.state_dict()
            return settings.kind(data, settings, before.vocabulary, weights), settings.config(before.config, data, 0)

        return cls(
            lambda folder, progress, stop: finetune(run, settings, out=folder, progress=progress, stop=stop), opened,
            lambda: str(open_task(other).fingerprint),
            {name: lambda spec=spec: open_task(spec) for name, spec in damaged.items()},  # type: ignore[misc]
        )  # fmt: skip


def check_task(example: Example, folder: Path, *, processes: int = 2) -> None:
    """Runs every check; the runs are left in `folder`.

    Args:
        processes: ranks that share an evaluation; 1: this is not checked.

    Raises:
        AssertionError: in one line, the promise that is broken.
    """
    check_resume(example, folder)
    check_fingerprint(example)
    check_damaged(example)
    if processes > 1:
        check_ranks(example, folder / "whole", processes)


class _StopAfterOneStep(Quiet):
    """A display that asks to stop as soon as a step is done."""

    def __init__(self) -> None:
        self._training = self._asked = False

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self._training = name == "train"

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        self._asked |= self._training and done > 0

    def is_set(self) -> bool:
        return self._asked


def check_resume(example: Example, folder: Path) -> None:
    """A run that is stopped and continued ends with the bits of one that is not: weights, optimizer, figures."""
    whole = example.train(folder / "whole", None, None)
    stopping = _StopAfterOneStep()
    try:
        example.train(folder / "stopped", stopping, stopping)
    except Interrupted:
        pass
    else:
        raise AssertionError("the run was asked to stop after its first step, and went on")
    continued = example.train(folder / "stopped", None, None)
    files = [whole_checkpoint(folder / name / "checkpoints", None) for name in ("whole", "stopped")]
    for file in sorted(path.stem for path in files[0].path.glob("*.safetensors")):
        one, other = (checkpoint_tensors(checkpoint, file) for checkpoint in files)
        assert set(one) == set(other), f"the checkpoint of a resumed run has other tensors in {file}"
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"after resuming, {file}: {name} has other bits"
    for key in ("results", "protocol"):
        assert whole.evaluation[key] == continued.evaluation[key], f"after resuming, the evaluation has other {key}"
    again = example.train(folder / "stopped", None, None)
    assert again.already_finished, "a finished run is trained again: `is_current` or `protocol` are not constant"


def check_fingerprint(example: Example) -> None:
    """The fingerprint follows from the data, and differs with them."""
    first, second = (example.open()[0].fingerprint for _ in range(2))
    assert first == second, f"the same data have the fingerprints {first} and {second}"
    assert example.other() != first, f"other data have the same fingerprint, {first}"


def check_damaged(example: Example) -> None:
    """Damaged data are refused in one line that names what is wrong."""
    assert example.damaged, "no example of damaged data is given"
    for name, reads in example.damaged.items():
        try:
            reads()
        except ValueError as error:
            told = str(error)
            assert name in told.splitlines()[0], f"the refusal of damaged data does not name {name}: {told}"
        else:
            raise AssertionError(f"damaged data are read: {name}")


def check_ranks(example: Example, run: Path, processes: int) -> None:
    """Ranks that evaluate together have the figures of one process, or refuse."""
    alone = _evaluated(example, run, ALONE)
    with tempfile.TemporaryDirectory() as meeting:
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(processes)]
        store = Path(meeting) / "store"
        ranks = [
            context.Process(target=_rank, args=(example, run, rank, processes, store, sent))
            for rank, (_, sent) in enumerate(pipes)
        ]
        for one in ranks:
            one.start()
        told = [received.recv() if received.poll(120) else "no answer" for received, _ in pipes]
        for one in ranks:
            one.join(10)
            one.kill()
    refused = [isinstance(one, RunError) for one in told]
    if all(refused):
        return
    for rank, found in enumerate(told):
        assert isinstance(found, list), f"rank {rank} of {processes} failed: {found}"
        assert _close(found, alone), f"rank {rank} of {processes} has other figures than one process"


def _rank(example: Example, run: Path, rank: int, count: int, store: Path, told: Any) -> None:
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), STORE: str(store)}
        ranks = start(timeout=timedelta(seconds=100))
        told.send(_evaluated(example, run, ranks))
    except RunError as error:
        told.send(error)
    except BaseException:
        told.send(traceback.format_exc())
    finally:
        told.close()
        os._exit(0)


def _evaluated(example: Example, run: Path, ranks: Ranks) -> list[dict[str, Any]]:
    """The figures of a trained run's evaluation."""
    task, config = example.open()
    config = replace(config, eval_batch_size=2)
    model = open_run(run).model
    context = EvaluationContext(ranks=ranks)
    return task.evaluate(model, config, task.reported_split(config), config.eval_top_k, context)


def _close(one: Any, other: Any) -> bool:
    """Equal but for the order of sums."""
    if isinstance(one, Mapping):
        return set(one) == set(other) and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)
    return bool(one == other)
