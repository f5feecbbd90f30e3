"""Ranks on this machine: starts them, starts them again when one was killed, and ends all with the first that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pointsman.parallel.start import LOST, STORE

POLL = 0.05  # seconds


def launch(command: Sequence[str], count: int, restarts: int, again: Sequence[str] = ("--resume",)) -> int:
    """Runs a command on `count` ranks, and returns the exit code of all: that of the first to fail.

    A rank that a signal ended, or that waited for another in vain, ends the others too; then all begin anew with the
    words `again`, up to `restarts` times. A user's error, or a fault in the program, is not tried again. SIGINT and
    SIGTERM go on to the ranks. Ranks end with this process.
    """
    command = list(command)
    with _forwarding() as ranks:
        for attempt in range(restarts + 1):
            with tempfile.TemporaryDirectory(prefix="pointsman-ranks-") as folder:
                ranks[:] = [_start(command, rank, count, Path(folder)) for rank in range(count)]
                try:
                    rank, code = _first_failure(ranks)
                finally:
                    _end(ranks)
            lost = code < 0 or code == LOST
            if not lost or attempt == restarts:
                return code if code >= 0 else 128 - code
            if code < 0:
                print(f"pointsman: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            print(f"pointsman: starting again ({attempt + 1} of {restarts})", file=sys.stderr, flush=True)
            command += [word for word in again if word not in command]
    raise AssertionError


def _start(command: Sequence[str], rank: int, count: int, folder: Path) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // count)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **{name: str(of) for name, of in places.items()}}
    environment[STORE] = str(folder / "store")
    # a session of its own: Ctrl-C reaches this process alone, which passes it on; a pipe that closes with this process
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Rank and exit code of the first rank that fails; (0, 0) when all are done."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            # what a signal ended came first: it is what the others lost
            return min(failed, key=lambda one: one[1])
        if all(code == 0 for code in codes):
            return 0, 0
        time.sleep(POLL)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()


@contextmanager
def _forwarding() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Inside, SIGINT and SIGTERM are passed on to the processes in the list."""
    ranks: list[subprocess.Popen[bytes]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ranks
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
