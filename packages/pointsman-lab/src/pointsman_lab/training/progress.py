"""How a training run ends before its last step, and what watches its routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from pointsman._errors import RunError, Stopped


class Monitor(Protocol):
    """Observes the routing while a model trains (`diagnostics.RoutingMonitor` is one)."""

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
