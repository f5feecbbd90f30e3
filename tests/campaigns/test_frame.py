"""The frame of the campaigns: failures are found, shrunk and told; crashes and hangs are failures."""

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the campaigns are scripts beside each other

import frame

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Numbers(frame.Campaign):
    name, unit, usual, limit = "numbers", "numbers", 100, 2.0

    def draw(self, random: Random) -> frame.Program:
        return [random.randrange(100) for _ in range(10)]

    def check(self, program: frame.Program, folder: Path) -> Counter[str]:
        if sum(step >= 90 for step in program) >= 2:
            raise frame.Wrong("two large numbers")
        return Counter(numbers=len(program))

    def simpler(self, step: int) -> list[int]:
        return [step - 1] if step else []


def test_a_failure_is_shrunk_to_the_shortest_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = [3, 95, 17, 99, 4, 91]
    assert frame.shortest(Numbers(), program, tmp_path) == ([90, 90], "two large numbers")
    assert not frame.run(Numbers(), seed=0, count=10_000, jobs=2, folder=tmp_path)
    told = capfd.readouterr().out
    assert "numbers: seed 0, program " in told
    assert "again: python tests/campaigns numbers --program '[90, 90]'" in told
    assert not any(tmp_path.iterdir())


def test_crashes_and_hangs_are_failures(tmp_path: Path) -> None:
    class Crash(Numbers):
        def check(self, program: frame.Program, folder: Path) -> Counter[str]:
            os.kill(os.getpid(), signal.SIGKILL)

    class Hang(Numbers):
        limit = 0.2

        def check(self, program: frame.Program, folder: Path) -> Counter[str]:
            time.sleep(60)
            return Counter()

    assert frame.outcome_of(Crash(), [1], tmp_path).failure == "the process died: signal 9"
    assert "a hang" in str(frame.outcome_of(Hang(), [1], tmp_path).failure)


def test_the_same_seed_gives_the_same_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Never(Numbers):
        def check(self, program: frame.Program, folder: Path) -> Counter[str]:
            return Counter(numbers=len(program), total=sum(program))

    told = []
    for seed, jobs in ((1, 1), (1, 3), (2, 1)):
        assert frame.run(Never(), seed=seed, count=20, jobs=jobs, folder=tmp_path)
        told.append(capfd.readouterr().out.partition("(")[2])
    assert told[0] != told[2]


def test_no_command_line_starts_a_worker() -> None:
    import commands

    from pointsman_lab.training import jobs

    with commands.Patched(checked=True), pytest.raises(commands.Reached):
        jobs._side_by_side([1, 2], lambda: None, 2)  # type: ignore[call-arg, arg-type]
    assert jobs._side_by_side.__module__ == jobs.__name__
