"""What a training run tells the outside, and what the outside may tell it: protocols, no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pointsman._errors import RunError, Stopped


class Progress(Protocol):
    """A progress display. Phases: "train" (in steps), "validate" and "evaluate" (in segments)."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """A phase starts, of which `done` of `total` units lie behind (a resumed run)."""

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        """So many units of the phase are done; training gives loss (nats), bits, top_k and tokens_per_second."""

    def note(self, message: str) -> None:
        """One line that the user should see: a damaged checkpoint that was passed over, where a run goes on."""


class Quiet:
    """No display."""

    def phase(self, name: str, total: int, done: int = 0) -> None:
        return

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        return

    def note(self, message: str) -> None:
        return


class Stop(Protocol):
    """Asks a run to save and end: a `threading.Event` that a signal handler sets is one."""

    def is_set(self) -> bool: ...


class Monitor(Protocol):
    """Looks at the routing while a model trains (`diagnostics.RoutingMonitor` is one)."""

    def observe(self, step: int) -> AbstractContextManager[None]:
        """Entered around the forward passes of a step."""

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Lines for metrics.jsonl after that step; usually none."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


class Interrupted(Stopped):
    """The run was asked to stop and has saved.

    Attributes:
        out: the run directory.
        step: how many steps are done and saved.
    """

    def __init__(self, out: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; saved: the same command with --resume (--out {out}) goes on")
        self.out = out
        self.step = step


class Diverged(RunError):  # noqa: N818
    """The loss or the gradient is not finite; the message names the step, the layer and the last good checkpoint."""
