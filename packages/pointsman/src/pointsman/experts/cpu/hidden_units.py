"""An expert's hidden units and their gradient, written out: shared by `sparse` and `dense`.

Notation: x rows [n, dim], u = W_in x + b_in, g = W_gate x + b_gate; hidden units h = act(u), gated h = act(g) u; with
dropout h = mask act(u) / (1 - p). The expert returns W_out h + b_out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pointsman.ops.feed_forward import ACTIVATIONS, DERIVATIVES, ExpertParameters
from pointsman.ops.gemm import BATCHED, Gemm


class Gradients(NamedTuple):
    """Where the gradients of `ExpertParameters` go: tensors of the same shapes, None where not wanted."""

    w_in: Tensor | None
    w_out: Tensor | None
    b_in: Tensor | None
    b_out: Tensor | None
    w_gate: Tensor | None
    b_gate: Tensor | None

    def one(self, index: int) -> Gradients:
        """Those of one expert."""
        return Gradients(*(None if tensor is None else tensor[index] for tensor in self))


def empty_gradients(
    parameters: ExpertParameters, wanted: Sequence[bool], empty: Callable[[Tensor], Tensor] = torch.empty_like
) -> Gradients:
    """An `empty` gradient of each parameter that is wanted."""
    pairs = zip(parameters, wanted, strict=True)
    return Gradients(*(empty(tensor) if needed and tensor is not None else None for tensor, needed in pairs))


def one(parameters: ExpertParameters, index: int) -> ExpertParameters:
    """The parameters of one expert: views without the leading dimension (outside autograd)."""
    return ExpertParameters(*[None if tensor is None else tensor[index] for tensor in parameters])  # type: ignore[arg-type]


Saved = tuple[Tensor, ...]
"""What one expert saves for backward: ungated (h) for ReLU, whose zeros show the mask, else (u); gated (u, g)."""


class Units(NamedTuple):
    """An expert's hidden units, recomputed: h, act(g) of a gated expert, and the dropout mask over 1 - p."""

    units: Tensor
    activated: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class HiddenUnits:
    """The first half of every expert of one call: from rows to hidden units, and the gradient back.

    Forward and backward must visit the experts in the same order: one generator draws all dropout masks.
    """

    activation: str
    dropout: float
    gemm: Gemm
    generator: torch.Generator | None

    def for_group(self, num_experts: int) -> HiddenUnits:
        """The same for a group of so many experts: through torch.bmm."""
        return self if num_experts == 1 else replace(self, gemm=BATCHED)

    def forward(self, rows: Tensor, expert: ExpertParameters) -> tuple[Tensor, Saved]:
        """Hidden units [n, hidden], and what to save for backward."""
        in_place = expert.w_gate is None and self.activation == "relu"
        up = self.gemm.linear(rows, expert.w_in, expert.b_in, relu=in_place)
        gate = None if expert.w_gate is None else self.gemm.linear(rows, expert.w_gate, expert.b_gate)
        return self.activate(up, gate, rectified=in_place)

    def activate(self, up: Tensor, gate: Tensor | None, rectified: bool = False) -> tuple[Tensor, Saved]:
        """Hidden units from u and, gated, g, and what to save for backward.

        Args:
            rectified: u has been through the ReLU of an ungated expert.
        """
        saved: Saved = (up,)
        if gate is not None:
            units, saved = ACTIVATIONS[self.activation](gate).mul_(up), (up, gate)
        elif self.activation == "relu":
            units = up if rectified else up.relu_()
        else:
            units = ACTIVATIONS[self.activation](up)
        self._drop(units)
        return units, saved

    def recomputed(self, saved: Saved, activated: Tensor | None = None) -> Units:
        """The hidden units from what was saved; `activated`, if there, is act(g) of gated experts."""
        if self._holds_units(saved):
            return Units(saved[0])
        if activated is None:
            activated = ACTIVATIONS[self.activation](saved[-1])
        if len(saved) == 1:
            return Units(activated, None, self._drop(activated))
        units = activated * saved[0]
        return Units(units, activated, self._drop(units))

    def backward(self, gradient: Tensor, saved: Saved, units: Units) -> tuple[Tensor, Tensor | None]:
        """Gradients of u and, gated, of g, from that of h, which is overwritten."""
        if self._holds_units(saved):
            torch.ops.aten.threshold_backward.grad_input(gradient, saved[0], 0, grad_input=gradient)
            return (gradient.mul_(self._scale) if self.dropout else gradient), None
        if units.mask is not None:
            gradient.mul_(units.mask)
        derivative = DERIVATIVES[self.activation]
        if units.activated is None:
            return derivative(gradient, saved[0]), None
        through_gate = derivative(gradient * saved[0], saved[1])
        return gradient.mul_(units.activated), through_gate

    def _holds_units(self, saved: Saved) -> bool:
        return len(saved) == 1 and self.activation == "relu"

    @property
    def _scale(self) -> float:
        return 1 / (1 - self.dropout) if self.dropout < 1 else 0.0

    def dropped(self, units: Tensor) -> Tensor:
        """The units with some of them dropped, in place."""
        self._drop(units)
        return units

    def _drop(self, units: Tensor) -> Tensor | None:
        if not self.dropout:
            return None
        mask = torch.empty_like(units).bernoulli_(1 - self.dropout, generator=self.generator).mul_(self._scale)
        units.mul_(mask)
        return mask


TINY = 1e-12


def divisible(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Splits combine weights w = s r: s can be divided by; r is None where it is 1 everywhere.

    Backward multiplies the gradient g of the experts' output by s while it is permuted, where it is narrower than the
    hidden units. With q = W_out' (s g), the gradient of h is r q and that of w is h . q / s.
    """
    tiny = weight.abs() < TINY
    if not bool(tiny.any()):
        return weight, None
    return weight.masked_fill(tiny, 1), weight.where(tiny, 1)
