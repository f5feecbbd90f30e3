"""`check_trainer`: what a trainer does to a router, a verdict a line; and the second process that one line takes.

python -m pointsman.testing.trainers.run TRAINER BALANCE OUT       # one of two ranks, started by this file
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pointsman._errors import did_you_mean
from pointsman.testing.trainers import BALANCES, TRAINERS, coefficient
from pointsman.testing.trainers.case import Setting, Trainer
from pointsman.testing.trainers.coefficient import FACTOR
from pointsman.testing.trainers.lines import LINES, Verdict, judged

SECONDS = 240
"""How long two processes may take."""
_ALONE = "POINTSMAN_TWO_PROCESSES"


HEAD = """# What trainers do to a router

Made on {date} by `pointsman check all --out DIR`, on a CPU, with
{versions}.

Each line is held against float64 on tiny models ([what the lines mean](trainers.md)). "yes": the line holds; **no**:
it does not; "-": the trainer has no such thing; empty: the line was not run. "own" is the loss or bias of the model's
class or of the engine; "pointsman" is `pointsman.hf.balance`, or a router of ours in the engine's layer.
"""


def installed(name: str) -> str:
    """The first package of a trainer that is not installed; "" if all are."""
    try:
        find_trainer(name)
    except ImportError as error:
        return str(error.name)
    return ""


def matrix(found: Mapping[tuple[str, str], Sequence[Verdict]], missing: Sequence[str]) -> str:
    """The page: a table of trainers and lines, then what was found where a line does not hold or has no meaning."""
    packages = sorted({package for name, _ in found for package in find_trainer(name).packages})
    said = textwrap.fill(", ".join(f"{package} {version(package)}" for package in packages), 119)
    marks = {True: "yes", False: "**no**", None: "-"}
    by_line = [{one.line: marks[one.holds] for one in verdicts} for verdicts in found.values()]
    columns = [line for line in LINES if any(line in row for row in by_line)]
    lines = ["| trainer | balance | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for (name, balance), row in zip(found, by_line, strict=True):
        lines.append(f"| {name} | {balance} | " + " | ".join(row.get(line, "") for line in columns) + " |")
    parts = [HEAD.format(date=datetime.now(UTC).date(), versions=said)]
    if missing:
        parts.append(f"Not installed: {', '.join(missing)}.\n")
    parts.append("\n".join(lines) + "\n")
    for (name, balance), verdicts in found.items():
        parts.append(f"## {name}, {balance}\n")
        parts.append("\n".join(f"- {one.line}: {marks[one.holds]}; {one.told}" for one in verdicts) + "\n")
    return "\n".join(parts)


def find_trainer(name: str) -> Trainer:
    """A trainer by its name, or `FILE.py:function` or `module:function`, a step of your own.

    Raises:
        ValueError: no such trainer, file or function.
        ImportError: its package is not installed.
    """
    if name in TRAINERS:
        file, _, of = TRAINERS[name].partition(":")
        found: Trainer = getattr(importlib.import_module(f"pointsman.testing.trainers.{file}"), of)()
        for package in found.packages:
            try:
                version(package)
            except PackageNotFoundError:
                raise ImportError(f"{name}: {package} is not installed", name=package) from None
        return found
    place, colon, function = name.rpartition(":")
    if not colon:
        raise ValueError(f"trainer {name!r}: {did_you_mean(name, [*TRAINERS, 'FILE.py:function'])}")
    from pointsman.testing.trainers.loops import OwnStep

    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ValueError(f"trainer {name!r}: there is no file {place}")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    step = getattr(module, function, None)
    if not callable(step):
        raise ValueError(f"trainer {name!r}: {place} has no function {function!r}")
    own = OwnStep(step)
    own.name = name
    return own


def verdicts(
    trainer: str | Callable[..., object], balance: str = "own", lines: Sequence[str] = ()
) -> Iterator[Verdict]:
    """The verdict of each line, as soon as it is there."""
    for line in lines:
        if line not in LINES:
            raise ValueError(f"line {line!r}: {did_you_mean(line, LINES)}")
    if balance not in BALANCES:
        raise ValueError(f"balance {balance!r}: {did_you_mean(balance, BALANCES)}")
    name = trainer if isinstance(trainer, str) else _reference(trainer)
    found = find_trainer(name) if isinstance(trainer, str) else _own(trainer)
    for line in lines or LINES:
        yield _ranks(found, name, balance) if line == "ranks" else judged(line, found, Setting(balance=balance))


def _own(step: Callable[..., object]) -> Trainer:
    from pointsman.testing.trainers.loops import OwnStep

    return OwnStep(step)


def _reference(step: Callable[..., object]) -> str:
    """`FILE.py:function` of a function at the top of a file; "" for another."""
    name = getattr(step, "__qualname__", "")
    try:
        return f"{inspect.getsourcefile(step)}:{name}" if name.isidentifier() else ""
    except TypeError:
        return ""


def check_trainer(
    trainer: str | Callable[..., object], balance: str = "own", lines: Sequence[str] = ()
) -> tuple[Verdict, ...]:
    """What a trainer does to the router of a tiny mixture of experts, against float64: every line must hold.

        def step(model, batches, max_norm=None):        # one optimizer step on a list of micro-batches
            for batch in batches:
                (model(**batch).loss / len(batches)).backward()
            …
        check_trainer(step)

    Args:
        trainer: a step of your own, which may also take `max_norm` (clip the gradients) and `bf16` (mixed precision);
            or the name of one of `TRAINERS`.
        balance: "own": the loss or the bias of the model's class or of the engine; "pointsman": `hf.balance`, or a
            router of ours in the engine's layer.
        lines: which of `LINES`; none: all.

    Returns:
        the verdicts. Those with `holds=None` are of what the trainer does not have.

    Raises:
        AssertionError: lines do not hold: which, and what was found.
        ValueError: an unknown trainer, line or balance.
        ImportError: the trainer's package is not installed.
    """
    if _ALONE in os.environ:
        raise ValueError("check_trainer was called again by the file of its step: write `if __name__ == '__main__':`")
    found = tuple(verdicts(trainer, balance, lines))
    if wrong := [f"{one.line}: {one.told}" for one in found if one.holds is False]:
        name = trainer if isinstance(trainer, str) else getattr(trainer, "__name__", "step")
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
    """What rank 0 of two processes over gloo says of the coefficient.

    Raises:
        RuntimeError: they failed or took too long: the last line that one of them said.
    """
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
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
