"""The progress display of long operations, and the handling of Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from pointsman.lab.progress import Progress as RunProgress

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Line:
    """One line of a display: the phases of one piece of work."""

    def __init__(self, bar: Progress, console: Console) -> None:
        self.title = ""
        self.console = console
        self._bar, self._live = bar, console.is_terminal
        self._task: TaskID | None = None
        self._phase, self._total, self._printed, self._started, self._first = "", 0, 0.0, 0.0, 0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total, completed=done, title=self.title, figures="")
        self._phase, self._total, self._first = name, total, done
        self._started = self._printed = time.monotonic()

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        if self._task is None:
            return
        text = describe(figures)
        self._bar.update(self._task, completed=done, figures=text)
        now = time.monotonic()
        if not self._live and (now - self._printed > LINE_EVERY):
            self._printed = now
            left = (now - self._started) / max(done - self._first, 1) * (self._total - done)
            words = [self.title, f"{self._phase} {done}/{self._total}", text, f"about {left:.0f} s left"]
            print("  ".join(word for word in words if word), file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def line(self) -> Line:
        return Line(self._bar, self.console)


class Display(Line):
    """Shows phases of work: a live bar on a terminal, a line now and then elsewhere. A `lab.progress.Progress`.

    A context manager. `title` stands before every phase ("3/8 hyperrouter, seed 0"). `line` gives work that goes on
    beside other work a line of its own.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        bar = Progress(
            TextColumn("{task.fields[title]}"),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            _Remaining(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
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


class TableUpdates:
    """Shows the current run in the title of its line, and writes the tables after each run."""

    def __init__(self, write: Callable[[], object]) -> None:
        self.write = write

    def begins(self, number: int, total: int, router: str, seed: int, line: RunProgress) -> None:
        line.title = f"{number}/{total} {router}, seed {seed}"

    def ended(self, router: str, seed: int) -> None:
        self.write()


def describe(figures: Mapping[str, float]) -> str:
    """The figures of a step: loss, bits, k, rate."""
    words = []
    if "loss" in figures:
        words.append(f"loss {figures['loss']:.3f}")
    if "bits" in figures:
        words.append(f"bits {figures['bits']:.3f}")
    if "top_k" in figures:
        words.append(f"k {figures['top_k']:.0f}")
    if "tokens_per_second" in figures:
        words.append(f"{figures['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(words)


class _Remaining(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text("" if left is None else f"{int(left) // 60}:{int(left) % 60:02d} left")


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event, so that a command can save and end; a second Ctrl-C interrupts at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("\nstopping: saving first (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
