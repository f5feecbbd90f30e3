"""One expert's hidden units and their gradient, by hand: what the CPU paths share.

Notation: x rows [n, dim], u = W_in x + b_in, g = W_gate x + b_gate; hidden units h = act(u), gated h = act(g) u; with
dropout h = mask act(u) / (1 - p). The expert returns W_out h + b_out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pointsman.experts.reference import ACTIVATIONS, ExpertParameters
from pointsman.ops.gemm import BATCHED, Gemm


class Gradients(NamedTuple):
    """Where the gradients of `ExpertParameters` go: tensors of the same shapes, None where not wanted."""

    w_in: Tensor | None
    w_out: Tensor | None
    b_in: Tensor | None
    b_out: Tensor | None
    w_gate: Tensor | None
    b_gate: Tensor | None


def one(parameters: ExpertParameters, index: int) -> ExpertParameters:
    """The parameters of one expert: views without the leading dimension (outside autograd)."""
    return ExpertParameters(*[None if tensor is None else tensor[index] for tensor in parameters])  # type: ignore[arg-type]


def one_gradient(gradients: Gradients, index: int) -> Gradients:
    """The same for gradients."""
    return Gradients(*(None if tensor is None else tensor[index] for tensor in gradients))


DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, value: torch.ops.aten.threshold_backward(gradient, value, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}

Kept = tuple[Tensor, ...]
"""What one expert keeps for backward: (h) for ungated ReLU, where the mask shows in h's zeros; (u); gated (u, g)."""


class Units(NamedTuple):
    """An expert's hidden units, recomputed: h, act(g) of a gated expert, and the dropout mask over 1 - p."""

    units: Tensor
    activated: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class HiddenUnits:
    """The first half of every expert of one call: how hidden units come about, and how their gradient goes back.

    Forward and backward must visit the experts in the same order: one generator draws all dropout masks.
    """

    activation: str
    dropout: float
    gemm: Gemm
    generator: torch.Generator | None

    def of(self, experts: int) -> HiddenUnits:
        """The same for so many experts at once."""
        return self if experts == 1 else replace(self, gemm=BATCHED)

    def forward(self, rows: Tensor, expert: ExpertParameters) -> tuple[Tensor, Kept]:
        """Hidden units [n, hidden], and what is to be kept."""
        if expert.w_gate is None and self.activation == "relu":
            units = self.gemm.linear(rows, expert.w_in, expert.b_in, relu=True)
            self._drop(units)
            return units, (units,)
        up = self.gemm.linear(rows, expert.w_in, expert.b_in)
        if expert.w_gate is None:
            units = ACTIVATIONS[self.activation](up)
            self._drop(units)
            return units, (up,)
        gate = self.gemm.linear(rows, expert.w_gate, expert.b_gate)
        units = ACTIVATIONS[self.activation](gate).mul_(up)
        self._drop(units)
        return units, (up, gate)

    def again(self, kept: Kept) -> Units:
        """The hidden units from what was kept."""
        if self._holds_units(kept):
            return Units(kept[0])
        activated = ACTIVATIONS[self.activation](kept[-1])
        if len(kept) == 1:
            return Units(activated, None, self._drop(activated))
        units = activated * kept[0]
        return Units(units, activated, self._drop(units))

    def backward(self, gradient: Tensor, kept: Kept, again: Units) -> tuple[Tensor, Tensor | None]:
        """Gradients of u and, gated, of g, from that of h, which is overwritten."""
        if self._holds_units(kept):
            torch.ops.aten.threshold_backward.grad_input(gradient, kept[0], 0, grad_input=gradient)
            return (gradient.mul_(self._scale) if self.dropout else gradient), None
        if again.mask is not None:
            gradient.mul_(again.mask)
        derivative = DERIVATIVES[self.activation]
        if again.activated is None:
            return derivative(gradient, kept[0]), None
        through_gate = derivative(gradient * kept[0], kept[1])
        return gradient.mul_(again.activated), through_gate

    def _holds_units(self, kept: Kept) -> bool:
        return len(kept) == 1 and self.activation == "relu"

    @property
    def _scale(self) -> float:
        return 1 / (1 - self.dropout) if self.dropout < 1 else 0.0

    def _drop(self, units: Tensor) -> Tensor | None:
        if not self.dropout:
            return None
        mask = torch.empty_like(units).bernoulli_(1 - self.dropout, generator=self.generator).mul_(self._scale)
        units.mul_(mask)
        return mask


TINY = 1e-12


def divisible(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Combine weights w as a product of s, which can be divided by, and a rest r, None where that is 1 everywhere.

    Backward applies s to the gradient g of the experts' output, which is narrower than the hidden units:
    q = W_out' (s g) is what the gradient of h starts from, r q its gradient, and h . q / s the gradient of w.
    """
    tiny = weight.abs() < TINY
    if not bool(tiny.any()):
        return weight, None
    return weight.masked_fill(tiny, 1), weight.where(tiny, 1)


def refuse_second_derivatives() -> None:
    """Called in a backward pass: gradients are on there only under `create_graph=True`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the experts' fast path has no second derivatives: leave create_graph=True out, or compute the forward "
            "inside `with using(PLAIN):` (pointsman.ops.kernels)"
        )
