"""What long work tells its caller, and how it is asked to stop. Protocols: the display is `cli.progress`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pointsman._errors import Stopped


class Progress(Protocol):
    """A progress display. Phases: "train" (in steps), "validate" and "evaluate" (in batches over all k)."""

    title: str

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase of `total` units starts; a resumed run has `done` of them already."""

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        """`done` units of the phase are finished; training gives loss (nats), bits, top_k and tokens_per_second."""

    def note(self, message: str) -> None:
        """One line that the user should see: a damaged checkpoint, or the step at which a run continues."""

    def line(self) -> Progress:
        """A line of its own on the same display, for work beside other work."""


class Quiet:
    """A `Progress` that shows nothing."""

    title = ""

    def phase(self, name: str, total: int, done: int = 0) -> None: ...

    def advance(self, done: int, figures: Mapping[str, float]) -> None: ...

    def note(self, message: str) -> None: ...

    def line(self) -> Progress:
        return self


class Stop(Protocol):
    """Asks work to stop: a `threading.Event` that a signal handler sets."""

    def is_set(self) -> bool: ...


def check_stop(stop: Stop | None) -> None:
    """Raises `Stopped` if `stop` is set."""
    if stop is not None and stop.is_set():
        raise Stopped("stopped; the same command starts this evaluation anew")
