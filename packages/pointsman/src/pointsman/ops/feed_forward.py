"""The weights of feed-forward experts, their activations, and these activations' derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ExpertParameters(NamedTuple):
    """The weights of E feed-forward experts, in nn.Linear's layout.

    `w_in` [E, hidden, dim], `w_out` [E, dim, hidden]; `b_in` [E, hidden], `b_out` [E, dim] or None;
    gated experts also `w_gate` [E, hidden, dim] and, with biases, `b_gate` [E, hidden].
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None
    w_gate: Tensor | None = None
    b_gate: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> ExpertParameters:
        """`function` of each tensor; None stays."""
        return ExpertParameters(*[None if tensor is None else function(tensor) for tensor in self])  # type: ignore[arg-type]


ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}

DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}
"""(gradient of act(u), u) -> gradient of u; for ReLU also (gradient, act(u))."""
