"""Runs functions of `tests/lab/parallel/worker.py` on several ranks, each a process of its own.

The ranks of a number start once and serve all tests of this process: most of a test's time was their start.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


def on_ranks(function: str, count: int, **arguments: Any) -> list[Any]:
    """What `function(ranks, **arguments)` returns on each rank, as JSON; a rank that fails fails the test."""
    if count not in _worlds:
        _worlds[count] = _World(count)
    try:
        return _worlds[count].call(function, arguments)
    except BaseException:  # the others may wait for a rank that failed
        _worlds.pop(count).end()
        raise


def end_all() -> None:
    """Ends the ranks that wait for work."""
    while _worlds:
        _worlds.popitem()[1].end()


class _World:
    """Ranks that wait for work."""

    def __init__(self, count: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks = [self._start(rank, count) for rank in range(count)]

    def _start(self, rank: int, count: int) -> subprocess.Popen[str]:
        with open(Path(self.folder.name) / f"errors-{rank}", "w") as errors:
            return subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(count), str(Path(self.folder.name) / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def call(self, function: str, arguments: dict[str, Any]) -> list[Any]:
        for rank in self.ranks:
            assert rank.stdin
            rank.stdin.write(json.dumps([function, arguments]) + "\n")
            rank.stdin.flush()
        results: list[Any] = []
        for rank in self.ranks:
            assert rank.stdout
            line = next((line for line in rank.stdout if line.startswith("result: ")), None)
            if line is None:
                raise AssertionError(self._errors())
            results.append(json.loads(line.removeprefix("result: ")))
        return results

    def _errors(self) -> str:
        """What the ranks that failed say; those that wait for them in vain are ended."""
        for rank in self.ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
        told = (Path(self.folder.name) / f"errors-{rank}" for rank in range(len(self.ranks)))
        return "\n".join(f"rank {rank}: {file.read_text()[-3000:]}" for rank, file in enumerate(told))

    def end(self) -> None:
        """Kills the ranks: one may hang."""
        for rank in self.ranks:
            rank.kill()
            for pipe in (rank.stdin, rank.stdout):
                if pipe:
                    pipe.close()
            rank.wait()
        self.folder.cleanup()


_worlds: dict[int, _World] = {}
