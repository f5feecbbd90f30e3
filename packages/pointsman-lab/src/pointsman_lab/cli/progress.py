"""The progress display of long operations, and the handling of Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.control import Control
from rich.progress import Progress, ProgressColumn, Task, TaskID
from rich.segment import ControlType
from rich.text import Text

from pointsman._values import printable

LINE_EVERY = 10.0  # seconds between lines where there is no terminal
BAR, SHORTEST_BAR = 24, 10  # columns
NARROWER = ((1000, "elapsed bits top_k"), (24, "tokens_per_second"), (12, "loss left"))
"""Where a line is too wide: columns to which the title is cut, then what goes."""


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
        self._task = self._bar.add_task(name, total=total, completed=done, title=self.title, figures={})
        self._phase, self._total, self._first = name, total, done
        self._started = self._printed = time.monotonic()

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        if self._task is None:
            return
        self._bar.update(self._task, completed=done, figures=figures)
        now = time.monotonic()
        if not self._live and (now - self._printed > LINE_EVERY):
            self._printed = now
            left = (now - self._started) / max(done - self._first, 1) * (self._total - done)
            text = "  ".join(describe(figures).values())
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
        super().__init__(_Lines(console), console)

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


class _Lines(Progress):
    """One line a task, never wider than the terminal.

    Terminals that became narrower have wrapped the lines drawn before: these rows are erased, too.
    """

    def __init__(self, console: Console) -> None:
        row = _Row(console)
        super().__init__(row, console=console, transient=True, disable=not console.is_terminal)
        self._row, self._width = row, console.width

    def refresh(self) -> None:
        width = self.console.width
        if width < self._width and self.live.is_started:
            more = sum(-(-wide // width) - 1 for wide in self._row.drawn.values() if wide)
            self.console.control(Control(*[(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * more))
        self._width = width
        super().refresh()


class _Row(ProgressColumn):
    """Title, phase, bar, count, figures, elapsed and remaining time: what does not fit is left out.

    Attributes:
        drawn: task -> columns of its line as last drawn.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.drawn: dict[TaskID, int] = {}

    def render(self, task: Task) -> Text:
        width = self.console.width - 1  # a full line would wrap in some terminals
        seconds = {"elapsed": task.elapsed, "left": task.time_remaining}
        times = {
            name: _clock(value) + " left" * (name == "left") for name, value in seconds.items() if value is not None
        }
        words = {**describe(task.fields["figures"]), **times}
        title, phase, count = task.fields["title"], task.description, f"{task.completed:.0f}/{task.total:.0f}"

        def free(bar: int) -> int:
            parts = [title, phase, " " * bar, count, *words.values()]
            return width - sum(cell_len(part) + 1 for part in parts if part) + 1

        bar = max(SHORTEST_BAR, min(BAR, BAR + free(BAR)))
        for least, names in NARROWER:
            if (missing := -free(bar)) > 0 and cell_len(title) > least:
                title = set_cell_size(title, max(least, cell_len(title) - missing) - 1) + "…"
            for name in names.split():
                if free(bar) < 0:
                    words.pop(name, None)
        full = 0 if not task.total else int(bar * min(task.completed / task.total, 1))
        plain = self.console.options.ascii_only or self.console.legacy_windows
        line = Text(no_wrap=True, overflow="crop")
        line.append(f"{title} " if title else "")
        line.append(f"{phase} ", "bold")
        line.append(("#" if plain else "━") * full, "bar.complete")
        line.append((" " if plain else "━") * (bar - full), "bar.back")
        line.append(" ".join(["", count, *words.values()]))
        line.truncate(width)
        self.drawn[task.id] = line.cell_len
        return line


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def stop_on_signals(*, tell: bool = True) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event, so that a command can save and end; a second Ctrl-C interrupts at once.

    Args:
        tell: whether to say so.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if tell:
            print("\nstopping: saving first (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
