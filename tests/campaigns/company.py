"""Company: commands that run at the same time, and places that are not as usual, spoil nothing.

A program is two or three commands that start within a second of each other in one folder, and one oddity: no HOME, a
HOME or TMPDIR that is not there, a disk that may only be read, a clock that jumps by days, files with a second (hard)
link outside the folder, a run that is moved away while it is read. Each command ends with exit code 0, or with 2 and
one line. Then the oddity is undone, and each command runs alone: every weight, row and result equals that of a command
that never had company, no temporary file is left, and what the second links lead to is as it was.
"""

import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import fixtures
from frame import Campaign, Program, Wrong
from kills import COMMANDS, RESUMED, results, whole

WORDS = {kind: [f"out-{kind}" if word == "out" else word for word in words] for kind, words in COMMANDS.items()}
WORDS["report"] = ["report", "run", "--map", "none", "--out", "page.html"]
OFTEN = {"train": 4, "decoder": 1, "compare": 3, "finetune": 3, "report": 3, "export": 2, "evaluate": 3, "diagnose": 2}
ODDITIES = ("none", "none", "no home", "home is not there", "no temporary folder", "read only", "clock", "hard links",
            "moved")  # fmt: skip
NOBODY = 65534
DAY = 86_400.0


class Company(Campaign):
    name, unit, usual, limit = "company", "commands", 60, 300.0

    def prepare(self, folder: Path) -> None:
        self.fixtures = folder / "start"
        self.fixtures.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        with fixtures.inside(self.fixtures):
            fixtures.make_files(self.fixtures)
            fixtures.must(*RESUMED, "--out", "run")
        self.alone = {"": results(self.fixtures)}
        for kind, words in WORDS.items():
            place = folder / kind
            shutil.copytree(self.fixtures, place)
            with fixtures.inside(place):
                fixtures.must(*words)
            self.alone[kind] = results(place)

    def draw(self, random: Random) -> Program:
        kinds = random.choices(list(OFTEN), list(OFTEN.values()), k=random.choice([2, 2, 3]))
        if random.random() < 0.4:
            kinds[1] = kinds[0]  # two of the same, into one folder
        program: Program = [{"odd": random.choice(ODDITIES), "after": round(random.random(), 3)}]
        return program + [{"kind": kind, "after": round(random.random() ** 2, 3)} for kind in kinds]

    def simpler(self, step: Any) -> Iterator[Any]:
        if step.get("odd", "none") != "none":
            yield {**step, "odd": "none"}
        if "kind" in step and step["after"]:
            yield {**step, "after": 0.0}

    def check(self, program: Program, folder: Path) -> Counter[str]:
        shutil.copytree(self.fixtures, folder, dirs_exist_ok=True)
        commands = [step for step in program if "kind" in step]
        [odd] = [step for step in program if "odd" in step] or [{"odd": "none", "after": 0.0}]
        counts = Counter({self.unit: 2 * len(commands), odd["odd"]: 1})
        outside = folder.with_name(folder.name + "-outside")
        change, undo, between = ODD[odd["odd"]](folder, outside)
        try:
            running = [
                fixtures.forked(folder, WORDS[step["kind"]], lambda wait=step["after"]: (time.sleep(wait), change()))
                for step in commands
            ]
            time.sleep(odd["after"])
            between()
            for step, one in zip(commands, running, strict=True):
                code, said = fixtures.finished(*one)
                judge(f"{step['kind']} in company", code, said)
                counts["done" if code == 0 else "refused"] += 1
            undo()
            whole(folder, "in company")
            for step in commands:
                code, said = fixtures.finished(*fixtures.forked(folder, WORDS[step["kind"]], nothing))
                again = "is not empty" in said or "exists" in said  # done by the first of the two
                judge(f"{step['kind']} afterwards", code, said)
                if code != 0 and not again:
                    raise Wrong(f"{step['kind']} alone, afterwards: exit code {code}: {said}")
        finally:
            shutil.rmtree(outside, ignore_errors=True)
        self.compare(results(folder), {step["kind"] for step in commands})
        return counts

    def compare(self, found: dict[str, Any], kinds: set[str]) -> None:
        """Wrong if a folder is not what the commands leave that never had company."""
        wanted = {name: value for kind in ("", *kinds) for name, value in self.alone[kind].items()}
        if left := sorted(name for name in found.keys() - wanted.keys() if not name.startswith("cache/")):
            raise Wrong(f"left: {left}")
        if missing := sorted(wanted.keys() - found.keys()):
            raise Wrong(f"missing: {missing}")
        for name, value in wanted.items():
            if found[name] != value:
                raise Wrong(f"{name} is not what the command leaves that is alone: {str(found[name])[:300]}")


def judge(what: str, code: int, said: str) -> None:
    if "Traceback" in said or code not in (0, 2):
        raise Wrong(f"{what}: exit code {code}: {said}")
    if code == 2 and not said.rstrip("\n").rpartition("\n")[2].startswith("pointsman"):
        raise Wrong(f"{what}: no line says why: {said}")


Change = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]
"""What a command's process does first; what is undone at the end; what happens while they run."""


def nothing() -> None:
    pass


def environment(**variables: str | None) -> Callable[[Path, Path], Change]:
    def change() -> None:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return lambda folder, outside: (change, nothing, nothing)


def read_only(folder: Path, outside: Path) -> Change:
    """Nothing below the folder may be written; a user who may write everywhere becomes nobody."""
    places = [folder, *folder.rglob("*")]
    modes = {place: stat.S_IMODE(place.stat().st_mode) for place in places}
    for place in places:
        place.chmod((modes[place] | 0o555 if place.is_dir() else modes[place] | 0o444) & ~0o222)
    for parent in folder.parents:
        if parent.stat().st_uid == os.getuid() and parent.name:
            parent.chmod(stat.S_IMODE(parent.stat().st_mode) | 0o111)

    def change() -> None:
        if os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    def undo() -> None:
        for place, mode in modes.items():
            place.chmod(mode)

    return change, undo, nothing


def clock(folder: Path, outside: Path) -> Change:
    """Every tenth reading of the clock is a day later or earlier than the one before it."""

    def change() -> None:
        now, now_ns, state = time.time, time.time_ns, {"calls": 0}

        def off() -> float:
            state["calls"] += 1
            return DAY * (state["calls"] // 10 % 5 - 2)

        setattr(time, "time", lambda: now() + off())  # noqa: B010
        setattr(time, "time_ns", lambda: now_ns() + int(off() * 1e9))  # noqa: B010

    return change, nothing, nothing


def hard_links(folder: Path, outside: Path) -> Change:
    """Every file has a second name outside the folder, whose content must stay."""
    outside.mkdir()
    before = {}
    for number, file in enumerate(sorted(place for place in folder.rglob("*") if place.is_file())):
        if file.name == ".lock":
            continue
        link = outside / str(number)
        os.link(file, link)
        before[link] = (file, link.read_bytes())

    def undo() -> None:
        for link, (file, content) in before.items():
            if link.read_bytes() != content:
                raise Wrong(f"{file.relative_to(folder)}: its other name outside the folder was written to")

    return nothing, undo, nothing


def moved(folder: Path, outside: Path) -> Change:
    """The run gets another name while it is read, and its own back at the end."""

    def away() -> None:
        (folder / "run").rename(folder / "elsewhere")

    def undo() -> None:
        if (folder / "run").exists():  # somebody began it anew: what it holds is judged
            raise Wrong(f"a run was made where one was moved away: {sorted(os.listdir(folder / 'run'))}")
        (folder / "elsewhere").rename(folder / "run")

    return nothing, undo, away


ODD: dict[str, Callable[[Path, Path], Change]] = {
    "none": lambda folder, outside: (nothing, nothing, nothing),
    "no home": environment(HOME=None, XDG_CACHE_HOME=None),
    "home is not there": environment(HOME="/nonexistent/home", XDG_CACHE_HOME=None),
    "no temporary folder": environment(TMPDIR="/nonexistent/tmp"),
    "read only": read_only,
    "clock": clock,
    "hard links": hard_links,
    "moved": moved,
}
