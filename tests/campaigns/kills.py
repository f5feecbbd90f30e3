"""Kills and full disks: whatever stops a command, the same command goes on, and ends as if nothing had happened.

A program is a command and some accidents. Each accident stops one process that runs the command: killed at a disk
operation (a write may be half done), killed at a moment, killed with what was not synced lost, a disk that is full from
an operation on, a limit on the size of files. After each, no checkpoint is torn and no file of JSON is cut. Then the
command runs to its end: every weight, row and result equals that of the unbroken run, and no temporary file is left.
"""

import builtins
import errno
import hashlib
import io
import json
import mmap
import os
import re
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import fixtures
from frame import Campaign, Program, Wrong

from pointsman._errors import RunError
from pointsman_lab.runs.checkpoints import open_checkpoint

TRAINED = ["train", "--config", "small.toml", "--data", "text.txt", "--resume"]
RESUMED = [*TRAINED, "--router", "xmoe:balance=0.1+similarity"]
COMPARED = ["compare", "--config", "small.toml", "--data", "text.txt", "--routers", "smoe,hyperrouter:hyper_dim=4"]
TUNED = ["finetune", "run", "--task", "task.tsv", "--steps", "4", "--length", "8", "--set", "batch_size=2"]
COMMANDS = {
    "train": [*RESUMED, "--out", "out"],
    "decoder": [*TRAINED, "--preset", "tiny-decoder", "--router", "smoe:bias=false", "--out", "out"],
    "compare": [*COMPARED, "--jobs", "1", "--out", "out"],
    "finetune": [*TUNED, "--set", "checkpoint_every=2", "--out", "out"],
    "report": ["report", "run", "--map", "none", "--out", "out/page.html"],
    "export": ["export", "run", "--out", "out"],
    "evaluate": ["evaluate", "run", "--out", "out"],
    "diagnose": ["diagnose", "run", "--eval-tokens", "32", "--out", "out"],
}
OFTEN = {"train": 8, "decoder": 3, "compare": 2, "finetune": 4, "report": 1, "export": 2, "evaluate": 1, "diagnose": 1}
TIMES = ("step_seconds", "work_seconds", "tokens_per_second", "overhead")
SIZES = [0, 1, 100, 1000, 3000, 8000, 20_000]


class Kills(Campaign):
    name, unit, usual, limit = "kills", "accidents", 120, 300.0

    def prepare(self, folder: Path) -> None:
        self.fixtures = folder / "start"
        self.fixtures.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        with fixtures.inside(self.fixtures):
            fixtures.make_files(self.fixtures)
            fixtures.must(*RESUMED, "--out", "run")
        self.unbroken: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        for kind, words in COMMANDS.items():
            warm, place = folder / f"warm-{kind}", folder / kind
            shutil.copytree(self.fixtures, warm)
            with fixtures.inside(warm):
                fixtures.must(*words)  # imports what children then need not import
            shutil.copytree(self.fixtures, place)
            began = time.monotonic()
            code, said, told = in_child(kind, place, None)
            if code != 0:
                raise AssertionError(f"{kind}: {said}")
            self.seconds[kind], self.operations[kind] = time.monotonic() - began, told.operations
            self.unbroken[kind] = results(place)

    def draw(self, random: Random) -> Program:
        kind = random.choices(list(OFTEN), list(OFTEN.values()))[0]
        program: Program = [{"kind": kind}]
        for _ in range(random.choice([1, 2, 3, 5])):
            how = random.choices(["operation", "power", "moment", "full", "limit"], [6, 3, 3, 3, 1])[0]
            accident = {"how": how, "place": round(random.random() ** 1.3, 6), "part": round(random.random(), 3)}
            program.append(accident)
        return program

    def check(self, program: Program, folder: Path) -> Counter[str]:
        [kind] = [step["kind"] for step in program if "kind" in step] or ["train"]
        shutil.copytree(self.fixtures, folder, dirs_exist_ok=True)
        counts = Counter[str]()
        for number, accident in enumerate(step for step in program if "how" in step):
            fault = Fault(
                accident["how"],
                operation=1 + int(accident["place"] * self.operations[kind]),
                seconds=accident["place"] * self.seconds[kind],
                size=SIZES[int(accident["place"] * len(SIZES))],
                part=accident["part"],
            )
            code, said, told = in_child(kind, folder, fault)
            if told.struck:
                counts[self.unit] += 1
                counts[accident["how"]] += 1
            what = f"accident {number}, {accident}, at {told.what or 'a moment'}"
            if "Traceback" in said or code not in (0, 2, -signal.SIGKILL, -signal.SIGALRM):
                raise Wrong(f"{what}: exit code {code}: {said}")
            if code == 2 and not said.rstrip("\n").rpartition("\n")[2].startswith("pointsman"):
                raise Wrong(f"{what}: no line says why: {said}")
            if code == 2 and not told.struck and accident["how"] != "limit":
                raise Wrong(f"{what}: refused, though nothing happened: {said}")
            whole(folder, what)
        code, said, _ = in_child(kind, folder, None)
        if code != 0:
            raise Wrong(f"the next run: exit code {code}: {said}")
        found, wanted = results(folder), self.unbroken[kind]
        if left := sorted(found.keys() - wanted.keys()):
            raise Wrong(f"left after the next run: {left}")
        if missing := sorted(wanted.keys() - found.keys()):
            raise Wrong(f"missing after the next run: {missing}")
        for name in wanted:
            if found[name] != wanted[name]:
                raise Wrong(f"{name} differs from the unbroken run's: {_difference(found[name], wanted[name])}")
        return counts

    def simpler(self, step: Any) -> Iterator[Any]:
        if step.get("how") == "power":
            yield {**step, "how": "operation"}


class ChildReport:
    """What a process says of itself through shared memory, however it ends."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096)

    def say(self, operations: int, what: str, struck: bool) -> None:
        self.memory.seek(0)
        self.memory.write(json.dumps([operations, what, struck]).encode().ljust(4096))

    @property
    def _said(self) -> tuple[int, str, bool]:
        text = self.memory[:].rstrip(b" \0")
        return tuple(json.loads(text)) if text else (0, "", False)

    @property
    def operations(self) -> int:
        return self._said[0]

    @property
    def what(self) -> str:
        return self._said[1]

    @property
    def struck(self) -> bool:
        return self._said[2]


class Fault:
    """Counts the disk operations of this process, and strikes at one of them."""

    def __init__(self, how: str, *, operation: int, seconds: float, size: int, part: float) -> None:
        self.how, self.operation, self.seconds, self.size, self.part = how, operation, seconds, size, part
        self.count = 0
        self.dirty: set[int] = set()
        self.synced: dict[int, int] = {}

    def install(self, told: ChildReport, folder: Path) -> None:
        """Puts itself between Python and the disk."""
        self.told, self.folder = told, folder
        self.real = {name: getattr(os, name) for name in CHANGES}
        for name in CHANGES:
            setattr(os, name, self._wrapped(name))
        self.real_open = io.open
        io.open = builtins.open = self._open  # type: ignore[assignment]
        if self.how == "moment":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            told.say(0, "", True)
            signal.setitimer(signal.ITIMER_REAL, max(self.seconds, 0.001))
        if self.how == "limit":
            told.say(0, f"files of {self.size} bytes", True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))

    def _wrapped(self, name: str) -> Any:
        real = self.real[name]

        def call(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.tick(f"{name} {arguments[0]}")
            if name == "fsync":
                status = os.fstat(arguments[0])
                self.dirty.discard(status.st_ino)
                self.synced[status.st_ino] = status.st_size
            return real(*arguments, **options)

        return call

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
              newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        if not set(mode) & set("wax+"):
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _Watched(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        raw.fault = self
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    def tick(self, what: str, write: Any = None) -> None:
        """Before an operation: nothing, or the accident. `write` writes a part of what was to be written."""
        self.count += 1
        full = self.how == "full" and self.count >= self.operation
        if self.how in ("moment", "limit", "count") or (not full and self.count != self.operation):
            if self.how == "count":
                self.told.say(self.count, "", False)
            return
        self.told.say(self.count, f"operation {self.count}: {what}", True)
        if full:
            if what.startswith(("unlink", "remove", "rmdir", "rename", "replace", "fsync", "chmod")):
                return  # these need no space
            raise OSError(errno.ENOSPC, "No space left on device")
        if write is not None:
            write()
        if self.how == "power":
            self._lose()
        os.kill(os.getpid(), signal.SIGKILL)

    def _lose(self) -> None:
        """What was written and not synced is cut off somewhere."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                place = os.path.join(folder, name)
                status = os.lstat(place)
                if status.st_ino in self.dirty:
                    kept = min(self.synced.get(status.st_ino, 0), status.st_size)
                    os.truncate(place, kept + int((status.st_size - kept) * self.part))


CHANGES = ("open", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync", "chmod")


class _Watched(io.FileIO):
    fault: Fault

    def write(self, content: Any) -> int:
        data = bytes(content)
        write = super().write
        self.fault.dirty.add(os.fstat(self.fileno()).st_ino)
        self.fault.tick(f"write of {len(data)} bytes", lambda: write(data[: int(len(data) * self.fault.part)]))
        return write(data)


def in_child(kind: str, folder: Path, fault: Fault | None) -> tuple[int, str, ChildReport]:
    """Runs a command with a fault (None: only counts) in a child: exit code or -signal, its errors, what it told."""
    told = ChildReport()
    fault = fault or Fault("count", operation=0, seconds=0, size=0, part=0)
    code, said = fixtures.finished(*fixtures.forked(folder, COMMANDS[kind], lambda: fault.install(told, folder)))
    return code, said, told


def whole(folder: Path, what: str) -> None:
    """Wrong if a checkpoint is torn, or a JSON file is cut."""
    for step in folder.rglob("step-*"):
        if step.is_dir() and step.parent.name == "checkpoints":
            try:
                open_checkpoint(step)
            except RunError as error:
                raise Wrong(f"{what}: a torn checkpoint: {error}") from None
    for file in folder.rglob("*.json"):
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue  # written aside
        if "cache" in file.relative_to(folder).parts:
            continue
        try:
            json.loads(file.read_text())
        except ValueError as error:
            raise Wrong(f"{what}: {file.relative_to(folder)} is cut: {error}") from None


def results(folder: Path) -> dict[str, Any]:
    """Every file below a folder, and what it holds without times; the names of folders."""
    found: dict[str, Any] = {}
    for place in sorted(folder.rglob("*")):
        name = re.sub("-[0-9a-f]{24}(/|$)", r"-KEY\1", place.relative_to(folder).as_posix())  # of the file's path
        if place.is_dir():
            found[name + "/"] = None
        elif (
            name.startswith("cache/")
            or place.name in ("manifest.json", ".lock")
            or place.suffix in (".html", ".csv", ".md", ".tex", ".txt")
        ):
            found[name] = "there"
        elif place.suffix == ".json":
            found[name] = _timeless(json.loads(place.read_text()))
        elif place.suffix == ".jsonl":
            rows = [_timeless(json.loads(line)) for line in place.read_text().splitlines()]
            found[name] = rows
        elif place.suffix == ".safetensors":
            content = place.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:end])  # the library writes its entries in any order
            found[name] = [header, hashlib.sha256(content[end:]).hexdigest()]
        else:
            found[name] = hashlib.sha256(place.read_bytes()).hexdigest()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in TIMES}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def _difference(found: Any, wanted: Any) -> str:
    """The first place where two values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *found]:
            if found.get(key) != wanted.get(key):
                return f"{key}: {_difference(found.get(key), wanted.get(key))}"
    if isinstance(found, list) and isinstance(wanted, list):
        for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
            if one != other:
                return f"[{index}] {_difference(one, other)}"
        return f"{len(found)} entries, not {len(wanted)}"
    return f"{str(found)[:200]}, not {str(wanted)[:200]}"
