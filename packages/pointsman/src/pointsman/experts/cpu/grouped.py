"""Small experts in float32: `F.grouped_mm` for all of them at once, so that calls do not bound the time.

On a CPU `F.grouped_mm` loops over BLAS's products in C++. Rows are sorted by expert and not padded. Activations are
computed for all rows together. The equations are those of `sparse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu.hidden_units import Gradients, HiddenUnits, Saved, divisible
from pointsman.experts.cpu.permute import Assignments, refuse_beyond
from pointsman.ops import dots
from pointsman.ops.feed_forward import ACTIVATIONS, ExpertParameters
from pointsman.ops.gemm import BLAS, Gemm

SMALL = 1 << 16  # elements of one expert's weight up to which calls bound the time
MOST = 1 << 20  # elements of all rows: what is in memory at once


def suits(parameters: ExpertParameters, assignments: int, gemm: Gemm) -> bool:
    """Whether this path takes the call: small experts, few enough rows, and products of BLAS."""
    _, width, dim = parameters.w_in.shape
    return (
        gemm is BLAS
        and parameters.w_in.dtype == torch.float32
        and not (width | dim) % 4  # grouped_mm takes rows of whole 16 bytes
        and width * dim <= SMALL
        and 0 < assignments * max(width, dim) <= MOST
    )


@dataclass(frozen=True)
class Sorted:
    """Assignments sorted by expert; A of them.

    Attributes:
        order: [A], the assignments in this order.
        row: [A], where each assignment, in token order, now stands.
        token: [A], the token of each row.
        token_offsets: [tokens], the first assignment of each token.
        ends: [E] int32, where each expert's rows end.
        counts: [E], each expert's number of rows.
    """

    order: Tensor
    row: Tensor
    token: Tensor
    token_offsets: Tensor
    ends: Tensor
    counts: Tensor

    def combine(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """The sum of each token's rows [A, dim], weighted or not: [tokens, dim]."""
        return F.embedding_bag(self.row, rows, self.token_offsets, mode="sum", per_sample_weights=weight)

    @property
    def each(self) -> Tensor:
        """[A]: the place of each row."""
        return torch.arange(len(self.order), device="cpu")

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of each expert's rows [A, width]: [E, width]."""
        starts = self.ends.long() - self.counts
        return F.embedding_bag(self.each, rows, starts, mode="sum")


def sort(assignments: Assignments, num_experts: int) -> Sorted:
    """Sorts assignments by expert. NumPy sorts short integers by radix."""
    given = assignments.expert.numpy()
    refuse_beyond(given.max(), num_experts)
    expert = given.astype(np.uint8 if num_experts <= 256 else np.uint16 if num_experts <= 65536 else np.int64)
    order = np.argsort(expert, kind="stable")
    counts = np.bincount(expert, minlength=num_experts)
    row = np.empty_like(order)
    row[order] = np.arange(order.size)
    k = assignments.per_token
    token = order // k if k else np.searchsorted(assignments.token_offsets.numpy(), order, side="right") - 1
    ends = counts.cumsum(dtype=np.int32)
    return Sorted(
        order=torch.from_numpy(order),
        row=torch.from_numpy(row),
        token=torch.from_numpy(token),
        token_offsets=assignments.token_offsets,
        ends=torch.from_numpy(ends),
        counts=torch.from_numpy(counts),
    )


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, at: Sorted) -> Tensor:
    """Rows [A, in] times their experts' weights [E, out, in] transposed, plus bias [E, out]."""
    # BLAS is slower where its second operand is transposed, by more than a copy of a small weight takes
    output = F.grouped_mm(rows, weight.mT.contiguous(), offs=at.ends)
    return output if bias is None else output.add_(bias.repeat_interleave(at.counts, 0, output_size=len(rows)))


def forward(
    hidden: Tensor, weight: Tensor, parameters: ExpertParameters, at: Sorted, first: HiddenUnits, save: bool
) -> tuple[Tensor, list[Saved]]:
    """The combined output [tokens, dim], and one item of what `backward` needs; arguments as of `sparse.forward`.

    The item: what `HiddenUnits` saves, the gathered rows, and act(g) of gated experts without dropout. `backward`
    computes the last two anew where they are left out.
    """
    p = parameters
    rows = hidden.index_select(0, at.token)
    up = _linear(rows, p.w_in, p.b_in, at)
    if p.w_gate is None:
        units, item = first.activate(up, None)
    else:
        gate = _linear(rows, p.w_gate, p.b_gate, at)
        activated, item = ACTIVATIONS[first.activation](gate), (up, gate)
        units = first.dropped(activated * up)
    output = at.combine(_linear(units, p.w_out, p.b_out, at), weight)
    if not save:
        return output, []
    return output, [(*item, rows) if p.w_gate is None or first.dropout else (*item, rows, activated)]


def backward(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    parameters: ExpertParameters,
    at: Sorted,
    first: HiddenUnits,
    saved: Sequence[Saved],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Gradients]:
    """Gradients of `hidden`, `weight` and the parameters, those of the eight that are wanted."""
    hidden_wanted, weight_wanted, *of_parameters = wanted
    p, ends = parameters, at.ends
    (item,) = saved
    of_units = 1 if p.w_gate is None else 2
    item, kept = item[:of_units], item[of_units:]
    units = first.recomputed(item, *kept[1:])
    scale, rest = divisible(weight)
    scales = scale.index_select(0, at.order)
    outer = F.embedding_bag(at.token, gradient, at.each, mode="sum", per_sample_weights=scales)
    inner = F.grouped_mm(outer, p.w_out, offs=ends)
    weight_gradient = None
    if weight_wanted:
        weight_gradient = dots.each(units.units, inner)
        if p.b_out is not None:
            weight_gradient += dots.each(outer, p.b_out.repeat_interleave(at.counts, 0))
        weight_gradient = weight_gradient.index_select(0, at.row).div_(scale)
    up, gate = first.backward(inner, item, units)
    if rest is not None:
        rest = rest.index_select(0, at.order)[:, None]
        outer, up, gate = outer.mul_(rest), up.mul_(rest), None if gate is None else gate.mul_(rest)
    rows = kept[0] if kept else hidden.index_select(0, at.token)
    pairs = (up, rows), (outer, units.units), (up, None), (outer, None), (gate, rows), (gate, None)

    def of_parameter(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is None:
            return None
        return at.sums(left) if right is None else F.grouped_mm(left.t(), right, offs=ends)

    gradients = Gradients(
        *(of_parameter(*pair) if one else None for pair, one in zip(pairs, of_parameters, strict=True))
    )
    if not hidden_wanted:
        return None, weight_gradient, gradients
    through = F.grouped_mm(up, p.w_in, offs=ends)
    if gate is not None:
        assert p.w_gate is not None
        through.add_(F.grouped_mm(gate, p.w_gate, offs=ends))
    return at.combine(through), weight_gradient, gradients
