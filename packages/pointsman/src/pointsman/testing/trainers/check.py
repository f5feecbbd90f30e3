"""`check_trainer`: what a trainer does to a router, a verdict a line; and the second process that one line takes.

python -m pointsman.testing.trainers.check TRAINER BALANCE OUT       # one of two ranks, started by this file
"""

import gc
import importlib
import inspect
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pointsman._errors import did_you_mean
from pointsman.routers.frame.elsewhere import import_file
from pointsman.testing.trainers import coefficient
from pointsman.testing.trainers.case import Setting, Trainer
from pointsman.testing.trainers.coefficient import FACTOR
from pointsman.testing.trainers.lines import LINES, Verdict, judged
from pointsman.testing.trainers.own import OwnStep

BALANCES = ("own", "pointsman")
SECONDS = 240
"""How long two processes may take."""
_ALONE = "POINTSMAN_TWO_PROCESSES"


def find_trainer(name: str) -> Trainer:
    """What `FILE.py:name` or `module:name` is, a subclass of `Trainer` or a step of your own; ValueError without it."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise ValueError(f"trainer {name!r}: allowed: a function, FILE.py:function or module:function")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"trainer {name!r}: there is no file {place}")
        module = import_file("pointsman_trainer", Path(place).absolute())
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"trainer {name!r}: there is no module {error.name!r}") from None
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"trainer {name!r}: {place} has no function {attribute!r}")
    if isinstance(found, type) and issubclass(found, Trainer):
        return found()
    return OwnStep(found, name)


def verdicts(
    trainer: str | Trainer | Callable[..., object], balance: str = "own", lines: Sequence[str] = ()
) -> Iterator[Verdict]:
    """The verdict of each line, as soon as it is there."""
    for line in lines:
        if line not in LINES:
            raise ValueError(f"line {line!r}: {did_you_mean(line, LINES)}")
    if balance not in BALANCES:
        raise ValueError(f"balance {balance!r}: {did_you_mean(balance, BALANCES)}")
    if isinstance(trainer, str):
        found, name = find_trainer(trainer), trainer
    elif isinstance(trainer, Trainer):
        found, name = trainer, _reference(trainer.step if isinstance(trainer, OwnStep) else type(trainer))
    else:
        found, name = OwnStep(trainer), _reference(trainer)
    for line in lines or LINES:
        yield _ranks(found, name, balance) if line == "ranks" else judged(line, found, Setting(balance=balance))


def _reference(step: Callable[..., object]) -> str:
    """`FILE.py:name`, or of a file in a package `module:name`, of what stands at the top of a file; "" for another."""
    name = getattr(step, "__qualname__", "")
    spec = getattr(sys.modules.get(getattr(step, "__module__", "")), "__spec__", None)
    try:
        place = spec.name if spec and spec.parent else inspect.getsourcefile(step)
        return f"{place}:{name}" if name.isidentifier() else ""
    except (TypeError, OSError):  # OSError: of a notebook
        return ""


def check_trainer(
    trainer: str | Trainer | Callable[..., object], balance: str = "own", lines: Sequence[str] = ()
) -> tuple[Verdict, ...]:
    """What a trainer does to the router of a tiny mixture of experts, against float64: every line must hold.

        def step(model, batches, max_norm=None):        # one optimizer step on a list of micro-batches
            for batch in batches:
                (model(**batch).loss / len(batches)).backward()
            …
        check_trainer(step)

    Args:
        trainer: a step of your own, which may also take `max_norm` (clip the gradients) and `bf16` (mixed precision);
            or where one is, `FILE.py:function`; or a `Trainer`, of which `pointsman_lab.checks` has those of others.
        balance: "own": the loss or the bias of the model's class or of the engine; "pointsman": `hf.balance`, or a
            router of ours in the engine's layer.
        lines: which of `LINES`; none: all.

    Returns:
        the verdicts. Those with `holds=None` are of what the trainer does not have.

    Raises:
        AssertionError: lines do not hold: which, and what was found.
        ValueError: an unknown trainer, line or balance.
    """
    if _ALONE in os.environ:
        raise ValueError("check_trainer was called again by the file of its step: write `if __name__ == '__main__':`")
    found = tuple(verdicts(trainer, balance, lines))
    if wrong := [f"{one.line}: {one.told}" for one in found if one.holds is False]:
        name = trainer if isinstance(trainer, str) else getattr(trainer, "__name__", "the trainer")
        raise AssertionError(f"{name} changes what the router learns: {'; '.join(wrong)}")
    return found


def _ranks(trainer: Trainer, name: str, balance: str) -> Verdict:
    """The coefficient on two processes beside that of one."""
    if not name:
        return Verdict("ranks", None, "the step is not a function at the top of a file, which a process could import")
    one = judged("ranks", trainer, Setting(balance=balance))
    if not one.holds:
        return one
    try:
        whole, two = float(one.told), float(two_processes(name, balance))
    except RuntimeError as error:
        return Verdict("ranks", False, str(error))
    return Verdict("ranks", abs(two / whole - 1) < FACTOR, f"x {two / whole:.4g} on 2 processes")


def two_processes(name: str, balance: str) -> str:
    """What rank 0 of two processes over gloo says of the coefficient; RuntimeError, with the last line that one of them
    said, if they failed or took too long."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        shared = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", _ALONE: "1",
            "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }  # fmt: skip
        out = Path(folder) / "found.txt"
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name if __spec__ else __name__, name, balance]
        logs = [Path(folder) / f"rank-{rank}.txt" for rank in range(2)]
        started = []
        for rank, log in enumerate(logs):
            with log.open("w") as stream:
                environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(
                    subprocess.Popen([*command, str(out)], env=environment, stdout=stream, stderr=subprocess.STDOUT)
                )
        try:
            for process, log in zip(started, logs, strict=True):
                if process.wait(timeout=SECONDS):
                    said = [line for line in log.read_text().splitlines() if line.strip()]
                    raise RuntimeError(f"a process failed: {said[-1] if said else 'without a word'}")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"two processes took more than {SECONDS} seconds") from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        return out.read_text()


def main(name: str, balance: str, out: str) -> None:
    """One of two ranks."""
    import torch.distributed as dist

    trainer = find_trainer(name)
    if trainer.starts_group:
        dist.init_process_group("gloo")
    holds, told = coefficient.ranks(trainer, Setting(balance=balance))
    if os.environ["RANK"] == "0":
        Path(out).write_text(told if holds else "nan")
    if dist.is_initialized():
        gc.collect()  # a DDP module that outlives its group can wait for ever
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
