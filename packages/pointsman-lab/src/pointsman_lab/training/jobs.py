"""Independent jobs side by side: worker processes with one thread each, one display and one stop for all of them.

Each worker has a pipe of its own and shares no lock with the others, so that one that is killed blocks nobody.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from pointsman._errors import RunError, Stopped
from pointsman_lab.progress import Progress, Stop

ADVANCE_EVERY = 0.1  # seconds between two reports of one worker
POLL = 0.2  # seconds that the parent waits for a report before it looks for a stop
STOP = "stop"

Work = Callable[[Any, Progress, "Stop | None"], None]
"""Does one job."""


def do_all(
    jobs: Sequence[Any],
    titles: Sequence[str],
    setup: Callable[[], Work],
    here: Callable[[], Work],
    count: int | None,
    *,
    progress: Progress,
    ended: Callable[[int], object],
    stop: Stop | None = None,
) -> None:
    """Does all jobs, at most `count` at a time; a job that is done makes room for the next.

    Any `count` gives the same bits: each job has one thread. None: one after another in this process, with all threads.

    Args:
        jobs: in the order in which they begin; must be picklable.
        titles: what the display says while each goes on.
        setup: called once in every worker; gives the function that does a job there. Must be picklable.
        here: as `setup`, for this process, which may share with the jobs what it has read.
        progress: gives every worker a line of its own.
        ended: told the number of a job, counted from 0.
        stop: asks all workers to save and end.

    Raises:
        RunError: a job failed, or its process died; the others have saved what they had.
        Stopped: `stop` was set; all workers have saved.
    """
    with one_thread(count):
        if count is not None and min(count, len(jobs)) > 1:
            _side_by_side(jobs, titles, setup, min(count, len(jobs)), progress, ended, stop)
            return
        work = here()
        for number, job in enumerate(jobs):
            progress.title = titles[number]
            work(job, progress, stop)
            ended(number)


def _side_by_side(
    jobs: Sequence[Any],
    titles: Sequence[str],
    setup: Callable[[], Work],
    count: int,
    progress: Progress,
    ended: Callable[[int], object],
    stop: Stop | None,
) -> None:
    """`do_all` in this many processes."""
    workers = [_Worker(setup, progress.line()) for _ in range(count)]
    todo = list(enumerate(jobs))
    failures: list[Exception] = []
    stopping = False
    try:
        while left := [worker for worker in workers if not worker.done]:
            if not stopping and (failures or (stop is not None and stop.is_set())):
                stopping = True
                for worker in left:
                    worker.send(STOP)
            ready = wait([worker.pipe for worker in left], POLL)
            for worker in [one for one in left if one.pipe in ready]:
                kind, values = worker.receive()
                if kind == "ready":
                    item = None if stopping or not todo else todo.pop(0)
                    if item is not None:
                        worker.line.title = titles[item[0]]
                    worker.send(item)
                elif kind == "ended":
                    ended(*values)
                elif kind == "failed":
                    failures += values
                elif kind != "finished":
                    getattr(worker.line, kind)(*values)
    finally:
        for worker in workers:
            worker.end()
    if wrong := [failure for failure in failures if not isinstance(failure, Stopped)]:
        raise wrong[0]
    if len(failures) == 1:
        raise failures[0]
    if stopping:
        raise Stopped("stopped; every run is saved: the same command goes on")


@contextmanager
def one_thread(count: int | None) -> Iterator[None]:
    """One thread inside, whatever the number of jobs; all of them where `count` is None."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Worker:
    """The parent's end of a worker.

    Attributes:
        line: on the display. pipe: to the worker. done: whether it has ended.
    """

    def __init__(self, setup: Callable[[], Work], line: Progress) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.line, self.done = line, False
        self._process = context.Process(target=_worker, args=(setup, other), daemon=True)
        self._process.start()
        other.close()

    def send(self, message: Any) -> None:
        _send(self.pipe, message)  # where it has died, `receive` tells

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """(kind, values) of its next message; of a dead one that it failed."""
        try:
            kind, values = self.pipe.recv()
        except (EOFError, OSError):
            self.done = True
            self._process.join()
            code = self._process.exitcode
            what = f"a worker died with exit code {code}; what it had saved is kept: the same command goes on"
            return "failed", (RunError(what),)
        self.done = kind == "finished"
        return kind, values

    def end(self) -> None:
        """Waits for it if it has finished; kills it if it has not."""
        if not self.done:
            self._process.kill()
        self._process.join()
        self.pipe.close()


def _send(pipe: Connection[Any, Any], message: Any) -> None:
    """Sends to the other end, or to nobody if that has ended."""
    with suppress(OSError):
        pipe.send(message)


def _worker(setup: Callable[[], Work], pipe: Connection[Any, Any]) -> None:
    """Does jobs until none is left. Ctrl-C reaches every process of a terminal: only the parent acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    line, stop = _Line(pipe), _PipedStop(pipe)
    logging.captureWarnings(True)
    for name in ("pointsman", "py.warnings"):
        logging.getLogger(name).addHandler(_ToParent(line))
    try:
        work = setup()
        while (item := stop.next()) is not None:
            number, job = item
            work(job, line, stop)
            _send(pipe, ("ended", (number,)))
    except (Stopped, ValueError) as error:
        kind = next(kind for kind in (Stopped, RunError, ValueError) if isinstance(error, kind))
        _send(pipe, ("failed", (kind(str(error)),)))  # any subclass might not unpickle
    except BaseException:
        _send(pipe, ("failed", (RuntimeError(traceback.format_exc()),)))
    _send(pipe, ("finished", ()))


class _PipedStop:
    """Set by the parent's message, or by the parent's end."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe, self._set = pipe, False

    def is_set(self) -> bool:
        while not self._set and self._pipe.poll():
            self._receive()
        return self._set

    def next(self) -> Any:
        """The next job, (number, job); None where there is none, or after a stop."""
        if self.is_set():
            return None
        _send(self._pipe, ("ready", ()))
        return self._receive()

    def _receive(self) -> Any:
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            message = STOP
        self._set = self._set or message == STOP
        return None if message == STOP else message


class _Line:
    """A worker's end of its line on the parent's display."""

    title = ""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe, self._sent = pipe, 0.0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        _send(self._pipe, ("phase", (name, total, done)))

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        if time.monotonic() - self._sent > ADVANCE_EVERY:
            self._sent = time.monotonic()
            _send(self._pipe, ("advance", (done, dict(figures))))

    def note(self, message: str) -> None:
        _send(self._pipe, ("note", (message,)))

    def line(self) -> Progress:
        return self


class _ToParent(logging.Handler):
    """Log lines and warnings as notes, so that they do not break the display."""

    def __init__(self, line: _Line) -> None:
        super().__init__(logging.WARNING)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.note(record.getMessage())
