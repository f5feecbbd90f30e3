"""The progress display of long operations, and the handling of Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import rich.progress
from rich.cells import cell_len, set_cell_size
from rich.console import Console

from pointsman_lab._values import printable
from pointsman_lab.processes import HANGUP, Interrupted, ending_signals

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Line:
    """One line of a display: the phases of one piece of work."""

    def __init__(self, bar: rich.progress.Progress, console: Console) -> None:
        self.title = ""
        self.console = console
        self._bar, self._live = bar, not bar.disable
        self._task: rich.progress.TaskID | None = None
        self._phase, self._total, self._printed, self._started, self._first = "", 0, 0.0, 0.0, 0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        most = self.console.width // 4
        title = self.title if cell_len(self.title) <= most else set_cell_size(self.title, most - 1) + "…"
        self._task = self._bar.add_task(name, total=total, completed=done, title=title, figures="")
        self._phase, self._total, self._first = name, total, done
        self._started = self._printed = time.monotonic()

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        if self._task is None:
            return
        told = describe(figures)
        shown = list(told.values()) if self.console.width >= 140 else [told["loss"]] if "loss" in told else []
        self._bar.update(self._task, completed=done, figures=" ".join(shown))
        now = time.monotonic()
        if not self._live and (now - self._printed > LINE_EVERY):
            self._printed = now
            left = (now - self._started) / max(done - self._first, 1) * (self._total - done)
            text = "  ".join(told.values())
            words = [self.title, f"{self._phase} {done}/{self._total}", text, f"about {left:.0f} s left"]
            print("  ".join(word for word in words if word), file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        self.console.print(printable(message), highlight=False, markup=False, soft_wrap=True)

    def line(self) -> Line:
        return Line(self._bar, self.console)


class Display(Line):
    """Shows phases of work: a live bar on a terminal, a line now and then elsewhere. A `lab.progress.Progress`.

    A context manager. `title` stands before every phase ("3/8 hyperrouter, seed 0"). `line` gives work that goes on
    beside other work a line of its own.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = _columns(console.width)
        live = console.is_terminal and not console.is_dumb_terminal  # rich shows nothing on a dumb one
        bar = rich.progress.Progress(*columns, console=console, transient=True, disable=not live)
        super().__init__(bar, console)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def data(self, what: str, done: int, total: int) -> None:
        """Progress of reading a corpus: "tokenizing", done and total bytes."""
        if self._phase != what or done < self._first:
            self.phase(what, max(total, 1))
        self.advance(done, {})


def describe(figures: Mapping[str, float]) -> dict[str, str]:
    """The figures of a step in words: loss, bits, k, rate."""
    forms = {"loss": "loss {:.3f}", "bits": "bits {:.3f}", "top_k": "k {:.0f}", "tokens_per_second": "{:,.0f} tokens/s"}
    return {name: form.format(figures[name]) for name, form in forms.items() if name in figures}


def _columns(width: int) -> Iterator[rich.progress.ProgressColumn]:
    """What a line of a terminal so wide shows: title, phase, bar, count, figures, elapsed and remaining time."""
    yield rich.progress.TextColumn("{task.fields[title]}", markup=False)
    yield rich.progress.TextColumn("{task.description}", style="bold", markup=False)
    yield rich.progress.BarColumn(24 if width >= 100 else 10)
    yield rich.progress.MofNCompleteColumn()
    if width >= 70:
        yield rich.progress.TextColumn("{task.fields[figures]}", markup=False)
    if width >= 100:
        yield rich.progress.TimeElapsedColumn()
    if width >= 50:
        yield rich.progress.TimeRemainingColumn()


@contextmanager
def stop_on_signals(*, tell: bool = True) -> Iterator[threading.Event]:
    """Ctrl-C, SIGTERM or a terminal that closes set the event, so that a command can save and end.

    A second Ctrl-C interrupts at once.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            _leave_terminal()
        elif stop.is_set():
            raise Interrupted(number)
        stop.set()
        if tell:
            print("\nstopping: saving first (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in ending_signals()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Writes to a terminal that has closed go nowhere from now on; their errors would end the command unsaved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
