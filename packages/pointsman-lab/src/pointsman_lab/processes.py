"""Ranks on this machine: started, started again when one was killed, ended with the first that fails; who is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count as counting
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from pointsman._files import scratch_folder
from pointsman.parallel import STORE

if TYPE_CHECKING:  # the launcher does without torch
    from pointsman.ranks import Ranks

T = TypeVar("T")
LOST = 75
"""Exit code of a rank that waited for another in vain."""
HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""Of a terminal that closes, which may say so twice: by itself and by its shell. Windows has none."""
SAFE_PATH = "PYTHONSAFEPATH"
POLL = 0.05  # seconds
PATIENCE = 5.0  # seconds that ranks have to end after a second signal
ANSWER = 3.0  # seconds in which ranks that can still answer report that they are lost
_calls = counting()  # of `one_after_another`: each has a key of its own


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Interrupted(KeyboardInterrupt):
    """By one of `ending_signals`, its argument.

    A class of its own: where the built-in one passes through code that an extension runs, as torch's import does,
    Python ends by SIGINT whatever exit code is asked for.
    """


@contextmanager
def without_code_of_this_folder() -> Iterator[None]:
    """Python that is started inside looks for no modules in the folder where it starts, which may be a stranger's."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH)
        os.environ |= {} if before is None else {SAFE_PATH: before}


def ending_signals() -> list[int]:
    """SIGINT, SIGTERM, and `HANGUP` unless it is ignored, as under `nohup`."""
    ours: list[int] = [signal.SIGINT, signal.SIGTERM]
    if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
        ours.append(HANGUP)
    return ours


def launch(command: Sequence[str], count: int, restarts: int, again: Sequence[str] = ("--resume",)) -> int:
    """Runs a command on `count` ranks, and returns the exit code of all: that of the first to fail.

    A rank that a signal ended, or that waited for another in vain, ends the others too; then all begin anew with the
    words `again`, up to `restarts` times. A user's error, or a fault in the program, is not tried again, and neither is
    anything after one of `ending_signals`, which go on to the ranks, SIGINT as SIGTERM. A rank ends with this process
    if it calls `end_with_launcher`.

    Raises:
        KeyboardInterrupt: a signal ended the ranks before they could answer it: while they started, or because they did
            not end within `PATIENCE` of a second one. None is left.
    """
    command = list(command)
    with _forwarding() as (ranks, signals):
        for attempt in range(restarts + 1):
            with scratch_folder(Path(tempfile.gettempdir())) as folder:
                try:
                    for rank in range(count):
                        if not signals:
                            ranks.append(_start(command, rank, count, folder))
                    if signals:
                        raise KeyboardInterrupt
                    rank, code = _first_failure(ranks, signals)
                finally:
                    _end(ranks)
            if signals and code < 0:
                raise KeyboardInterrupt
            lost = code < 0 or code == LOST
            if code < 0:
                print(f"pointsman: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
            if not lost or signals or attempt == restarts:
                return code if code >= 0 else 128 - code
            print(f"pointsman: starting again ({attempt + 1} of {restarts})", file=sys.stderr, flush=True)
            command += [word for word in again if word not in command]
    raise AssertionError


def end_with_launcher() -> None:
    """Ends this rank as soon as the process that started it is gone: its end of the pipe closes.

    To be called before anything that takes time: a rank that imports torch or waits for others must not outlive it.
    """

    def watch() -> None:
        while os.read(0, 1):  # the descriptor: a lock on sys.stdin would be in the way of a normal end
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start(command: Sequence[str], rank: int, count: int, folder: Path) -> subprocess.Popen[bytes]:
    threads = max(1, available_cores() // count)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **{name: str(of) for name, of in places.items()}}
    environment[STORE] = str(folder / "store")
    # a session of its own: Ctrl-C reaches this process alone, which passes it on; a pipe that closes with this process
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]], signals: Sequence[float]) -> tuple[int, int]:
    """Rank and exit code of the first rank that fails; (0, 0) when all are done."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            # what a signal ended came first: it is what the others lost
            return min(failed, key=lambda one: one[1])
        if all(code == 0 for code in codes):
            return 0, 0
        if len(signals) > 1 and time.monotonic() > signals[1] + PATIENCE:
            raise KeyboardInterrupt
        time.sleep(POLL)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait()
        if process.stdin:
            process.stdin.close()
    ranks.clear()


@contextmanager
def _forwarding() -> Iterator[tuple[list[subprocess.Popen[bytes]], list[float]]]:
    """Inside, `ending_signals` are passed on to the processes in the first list; the second has their times.

    SIGINT as SIGTERM: what a rank does with both is the same once it trains; before that, SIGTERM ends it at once, even
    while it waits for others in native code, which a KeyboardInterrupt does not.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    signals: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if signals and number == HANGUP:
            return
        signals.append(time.monotonic())
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number if number == HANGUP else signal.SIGTERM)

    before = {number: signal.signal(number, handle) for number in ending_signals()}
    try:
        yield ranks, signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_after_another(ranks: Ranks, function: Callable[[], T]) -> T:
    """What the function returns; the first rank of each machine calls it before the others, who wait up to an hour.

    For what is made once and kept in a cache.
    """
    if ranks.count == 1:
        return function()
    machine = os.environ.get("GROUP_RANK", "0")
    key, store = f"made-{machine}-{next(_calls)}", _store()
    if os.environ.get("LOCAL_RANK", str(ranks.rank)) == "0":
        made = function()
        store.set(key, "1")
        return made
    store.wait([key], timedelta(hours=1))
    return function()


def first_to_tell(ranks: Ranks) -> bool:
    """Whether this rank is the first that reports why the job ends: rank 0 if it says anything within `ANSWER`."""
    try:
        _wait(lambda: _store().add("told", 0) > 0, 0 if ranks.first else ANSWER)
        return bool(_store().add("told", 1) == 1)
    except RuntimeError:  # its owner has ended
        return True


def let_others_ask(ranks: Ranks) -> None:
    """Rank 0 stays until the others have asked `first_to_tell`, at most for `ANSWER`: torchrun's store ends with it.

    The store of `launch` is a file.
    """
    if ranks.first and STORE not in os.environ:
        with suppress(RuntimeError):
            _wait(lambda: _store().add("told", 0) >= ranks.count, ANSWER)


def lost_ranks(ranks: Ranks) -> list[int]:
    """The ranks that report nothing within `ANSWER`, for one that lost the connection: they ended, or they hang."""
    try:
        store = _store()
        store.set(f"lost-{ranks.rank}", "1")
        _wait(lambda: store.check([f"lost-{rank}" for rank in range(ranks.count)]), ANSWER)
        return [rank for rank in range(ranks.count) if not store.check([f"lost-{rank}"])]
    except RuntimeError:  # the store's owner has ended
        return [0]


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: in numpy, or in torch on a CPU or another device."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank did not come to a collective."""
    words = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timeout", "pair closure", "NCCL")
    return isinstance(error, RuntimeError) and (
        type(error).__name__.startswith("Dist") or any(word in str(error) for word in words)
    )


def _wait(done: Callable[[], bool], seconds: float) -> None:
    """Until it is done, at most so long."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(POLL)


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
