"""Independent jobs side by side: workers with one thread each, one display and one stop for all of them.

Each worker has a pipe of its own and shares no lock with the others, so that one that is killed blocks nobody. Workers
are processes of this machine (`Here`) or tasks on the nodes of a cluster (`cluster.Nodes`).
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from pointsman._errors import RunError, Stopped
from pointsman_lab.processes import ending_signals, out_of_memory, without_code_of_this_folder
from pointsman_lab.progress import Progress, Stop

ADVANCE_EVERY = 0.1  # seconds between two reports of one worker
POLL = 0.2  # seconds that the parent waits for a report before it looks for a stop
STOP = "stop"

Work = Callable[[Any, Progress, "Stop | None"], None]  # does one job


class Hosts(Protocol):
    """Where workers run."""

    def begin(self, setup: Callable[[], Work], titles: Sequence[str], progress: Progress) -> Sequence[Worker]:
        """Starts the workers; each calls `setup` once."""

    def ready(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those that have something to say, after `POLL` seconds at most."""


def do_all(
    jobs: Sequence[Any],
    titles: Sequence[str],
    setup: Callable[[], Work],
    here: Callable[[], Work],
    count: int | None,
    *,
    progress: Progress,
    ended: Callable[[int], object],
    began: Callable[[int, str], object] = lambda number, node: None,
    stop: Stop | None = None,
    hosts: Hosts | None = None,
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
        began: told the number of a job and the node of a cluster that does it.
        stop: asks all workers to save and end.
        hosts: does the jobs there, and not in `count` processes of this machine.

    Raises:
        Stopped: `stop` was set; all workers have saved.
    """
    with one_thread(count):
        if hosts is None and count is not None and min(count, len(jobs)) > 1:
            hosts = Here(min(count, len(jobs)))
        if hosts is not None:
            _side_by_side(jobs, titles, setup, hosts, progress, ended, began, stop)
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
    hosts: Hosts,
    progress: Progress,
    ended: Callable[[int], object],
    began: Callable[[int, str], object],
    stop: Stop | None,
) -> None:
    """`do_all` on these hosts."""
    workers = hosts.begin(setup, titles, progress)
    todo = dict(enumerate(jobs))
    failures: list[Exception] = []
    stopping = False
    try:
        while left := [worker for worker in workers if not worker.done]:
            if not stopping and (failures or (stop is not None and stop.is_set())):
                stopping = True
                for worker in left:
                    worker.send(STOP)
            for worker in hosts.ready(left):
                kind, values = worker.receive()
                if kind == "ready":
                    number = None if stopping else worker.pick(todo)
                    if number is not None:
                        worker.line.title = titles[number]
                        began(number, worker.node)
                    worker.send(None if number is None else (number, todo.pop(number, jobs[number])))
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
    if len(set(map(str, failures))) == 1:
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


class Worker:
    """The parent's end of a worker."""

    def __init__(self, line: Progress, pipe: Connection[Any, Any] | None) -> None:
        self.line, self.pipe, self.node, self.done = line, pipe, "", False

    def pick(self, todo: Mapping[int, Any]) -> int | None:
        """The number of the job that it does next."""
        return next(iter(todo), None)

    def send(self, message: Any) -> None:
        if self.pipe is not None:
            _send(self.pipe, message)  # where it has died, `receive` tells

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """(kind, values) of its next message; of a dead one what `lost` says."""
        try:
            kind, values = self.pipe.recv() if self.pipe is not None else self.lost()
        except (EOFError, OSError):
            return self.lost()
        self.done = self.done or kind == "finished"
        return kind, values

    def lost(self) -> tuple[str, tuple[Any, ...]]:
        """What stands for the message of one that has died."""
        raise NotImplementedError

    def end(self) -> None:
        """Kills it if it has not finished."""


class Here:
    """Processes of this machine, each of which does one job after another."""

    def __init__(self, count: int) -> None:
        self.count = count

    def begin(self, setup: Callable[[], Work], titles: Sequence[str], progress: Progress) -> Sequence[Worker]:
        with without_code_of_this_folder():
            return [_Process(setup, progress.line()) for _ in range(self.count)]

    def ready(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        found = wait([worker.pipe for worker in workers if worker.pipe], POLL)
        return [worker for worker in workers if worker.pipe in found]


class _Process(Worker):
    """A process of this machine."""

    def __init__(self, setup: Callable[[], Work], line: Progress) -> None:
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        super().__init__(line, pipe)
        self._process = context.Process(target=serve, args=(setup, other), daemon=True)
        _signals("SIG_BLOCK")  # while it imports, the worker does not ignore them yet
        try:
            self._process.start()
        finally:
            _signals("SIG_UNBLOCK")
        other.close()

    def lost(self) -> tuple[str, tuple[Any, ...]]:
        self.done = True
        self._process.join()
        what = f"a worker died with exit code {self._process.exitcode}; what it had saved is kept"
        return "failed", (RunError(f"{what}: the same command goes on"),)

    def end(self) -> None:
        if not self.done:
            self._process.kill()
        self._process.join()
        if self.pipe is not None:
            self.pipe.close()


def _signals(how: str) -> None:
    """Lets `ending_signals` wait ("SIG_BLOCK"), here and in processes that begin now, until "SIG_UNBLOCK"."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        resource_tracker.ensure_running()  # its own start would let them through
        signal.pthread_sigmask(getattr(signal, how), ending_signals())


def _send(pipe: Connection[Any, Any], message: Any) -> None:
    """Sends to the other end, or to nobody if that has ended."""
    with suppress(OSError):
        pipe.send(message)


def serve(setup: Callable[[], Work], pipe: Connection[Any, Any]) -> None:
    """A worker: does jobs until none is left. Only the parent acts on Ctrl-C, which reaches all of a terminal."""
    for number in ending_signals():
        signal.signal(number, signal.SIG_IGN)
    _signals("SIG_UNBLOCK")
    torch.set_num_threads(1)
    line, stop = _Line(pipe), _PipedStop(pipe)
    warnings.showwarning = lambda message, *_: line.note(" ".join(str(message).split()))
    logging.getLogger("pointsman").addHandler(_ToParent(line))
    try:
        work = setup()
        while item := stop.next():
            work(item[1], line, stop)
            _send(pipe, ("ended", (item[0],)))
    except BaseException as error:
        _send(pipe, ("failed", (_told(error),)))
    _send(pipe, ("finished", ()))


def _told(error: BaseException) -> Exception:
    """An error for the parent, of a class that unpickles; a fault of the program has its traceback."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    kinds: Sequence[type[Exception]] = [one for one in (Stopped, RunError, ValueError) if isinstance(error, one)]
    kind: type[Exception] = MemoryError if out_of_memory(error) else (*kinds, RuntimeError)[0]
    return kind(traceback.format_exc() if kind is RuntimeError else str(error))


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
    """Log lines as notes, so that they do not break the display."""

    def __init__(self, line: _Line) -> None:
        super().__init__(logging.WARNING)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.note(record.getMessage())
