"""Random programs against a promise, each in a child process; a failure is shrunk to the shortest program that fails.

A campaign draws programs, lists of JSON values, from `Random(seed/number)` and checks each. The same seed and number
give the same program on any machine, so that a failure can be had again by its seed, or by the program that is printed.
"""

import json
import os
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

Program = list[Any]
SHRINKING = 120.0  # seconds
MEMORY = 6 << 30  # bytes of address space that a child may add to its parent's


class Wrong(Exception):  # noqa: N818 - the promise is broken, not the campaign
    """The promise does not hold; the message says how."""


class Campaign:
    """What a campaign does.

    Attributes:
        name: on the command line. unit: what is counted.
        usual: how many of them continuous integration does. limit: seconds that a program may take.
    """

    name: str
    unit: str
    usual: int
    limit: float = 60.0

    def prepare(self, folder: Path) -> None:
        """Makes what all programs start from, once, in `folder`; imports what they need."""

    def draw(self, random: Random) -> Program:
        """A program."""
        raise NotImplementedError

    def check(self, program: Program, folder: Path) -> Counter[str]:
        """Runs a program in the empty `folder`; counts what happened, its units among them. Raises Wrong."""
        raise NotImplementedError

    def simpler(self, step: Any) -> Iterator[Any]:
        """Simpler forms of one step of a program, for shrinking."""
        return iter(())


@dataclass
class Outcome:
    """What became of a program: None, or how it fails; and what it counted."""

    failure: str | None
    counts: Counter[str] = field(default_factory=Counter)


class Child:
    """A program in a process of its own: neither a crash nor a hang of it ends the campaign."""

    def __init__(self, campaign: Campaign, program: Program, folder: Path) -> None:
        self.campaign, self.program = campaign, program
        self.ends = time.monotonic() + campaign.limit
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.pipe, into = os.pipe()
        self.said = b""
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            os.close(self.pipe)
            status = 1
            try:
                status = self._run(into)
            finally:
                os._exit(status)
        os.close(into)

    def _run(self, into: int) -> int:
        os.chdir(self.folder)
        grown = MEMORY + _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (grown, grown))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            result: Any = [None, self.campaign.check(self.program, self.folder)]
        except Wrong as wrong:
            result = [str(wrong), {}]
        except BaseException:
            result = [traceback.format_exc(), {}]
        with open(into, "wb") as pipe:
            pipe.write(json.dumps(result).encode())
        return 0

    def read(self) -> Outcome | None:
        """What there is to read; the outcome once the child has said it, or has ended."""
        if piece := os.read(self.pipe, 1 << 16):
            self.said += piece
            return None
        return self._end(None)

    def late(self) -> Outcome:
        return self._end(f"still running after {self.campaign.limit:g} s: a hang")

    def _end(self, failure: str | None) -> Outcome:
        os.close(self.pipe)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)  # it has not come to set its group
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)
        if failure is not None:
            return Outcome(failure)
        try:
            said, counts = json.loads(self.said)
        except ValueError:
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            return Outcome(f"the process died: {how}")
        return Outcome(said, Counter(counts))


def run(campaign: Campaign, *, seed: int, count: int, jobs: int, folder: Path, failures: int = 1) -> bool:
    """Checks programs until `count` units are done; prints the counts. Whether all held.

    The first failure ends it, and is shrunk; with `failures` above 1 so many are printed as they are.
    """
    began, number, failed, counts = time.monotonic(), 0, 0, Counter[str]()
    selector = selectors.DefaultSelector()
    running: dict[int, tuple[int, Child]] = {}
    while True:
        while len(running) < jobs and counts[campaign.unit] < count and failed < failures:
            program = campaign.draw(Random(f"{campaign.name}/{seed}/{number}"))
            child = Child(campaign, program, folder)
            running[child.pipe] = (number, child)
            selector.register(child.pipe, selectors.EVENT_READ)
            number += 1
        if not running:
            break
        try:
            ready = {key.fd for key, _ in selector.select(0.5)}
        except KeyboardInterrupt:
            print("interrupted: the counts so far")
            for _, left in running.values():
                left.late()
            break
        for fd, (of, child) in list(running.items()):
            late = time.monotonic() > child.ends
            if fd not in ready and not late:
                continue
            if late:
                selector.unregister(fd)
                outcome: Outcome | None = child.late()
            else:
                outcome = child.read()
                if outcome:
                    selector.unregister(fd)
            if outcome is None:
                continue
            del running[fd]
            if outcome.failure is not None and failures > 1:
                failed += 1
                print(f"{campaign.name}: seed {seed}, program {of} fails:\n{outcome.failure}")
                print(f"    {json.dumps(child.program)}", flush=True)
            elif outcome.failure is not None:
                for other, (_, left) in running.items():
                    selector.unregister(other)
                    left.late()
                _tell(campaign, seed, of, child.program, outcome.failure, folder)
                return False
            counts += outcome.counts
    seconds, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    others = ", ".join(f"{value:,} {what}" for what, value in sorted(counts.items()) if what != campaign.unit)
    print(
        f"{campaign.name}: seed {seed}, {counts[campaign.unit]:,} {campaign.unit} in {number:,} programs, "
        f"{failed} failures, "
        f"{seconds:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU" + (f" ({others})" if others else ""),
        flush=True,
    )
    return not failed


def outcome_of(campaign: Campaign, program: Program, folder: Path) -> Outcome:
    """What becomes of one program."""
    child = Child(campaign, program, folder)
    with selectors.DefaultSelector() as selector:
        selector.register(child.pipe, selectors.EVENT_READ)
        while True:
            if selector.select(max(child.ends - time.monotonic(), 0)):
                if outcome := child.read():
                    return outcome
            elif time.monotonic() > child.ends:
                return child.late()


def shortest(campaign: Campaign, program: Program, folder: Path) -> tuple[Program, str]:
    """A program that fails, of which no step can be left out and none made simpler; and how it fails.

    Stretches of steps are left out, halves first (delta debugging), then each step is made simpler.
    """
    ends = time.monotonic() + SHRINKING
    failure = outcome_of(campaign, program, folder).failure
    if failure is None:
        return program, "it holds when run again: it depends on time or on other programs"

    def fails(smaller: Program) -> bool:
        nonlocal program, failure
        if time.monotonic() > ends:
            return False
        found = outcome_of(campaign, smaller, folder).failure
        if found is None:
            return False
        program, failure = smaller, found
        return True

    size = len(program)
    while size:
        start = 0
        while start < len(program):
            if len(program) == 1 or not fails(program[:start] + program[start + size :]):
                start += size
        size //= 2
    again = True
    while again and time.monotonic() < ends:
        again = any(
            fails([*program[:place], simpler, *program[place + 1 :]])
            for place, step in enumerate(program)
            for simpler in campaign.simpler(step)
        )
    return program, failure


def _tell(campaign: Campaign, seed: int, number: int, program: Program, failure: str, folder: Path) -> None:
    print(f"{campaign.name}: seed {seed}, program {number} fails:\n{failure}\nshrinking", flush=True)
    small, why = shortest(campaign, program, folder)
    print(f"the shortest program that fails ({len(small)} of {len(program)} steps):")
    for step in small:
        print(f"    {json.dumps(step)}")
    print(f"{why}\nagain: python tests/campaigns {campaign.name} --program {_quoted(json.dumps(small))}", flush=True)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _address_space() -> int:
    """Bytes of address space of this process (Linux; elsewhere 0)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
