"""Experts on a CPU for a few tokens, without gradients: decoding.

Reading the weights of the chosen experts is what takes the time, and beside it the calls into torch: so no plan, and
as few calls as can be. Which way depends on how many rows an expert has, and on whether its weights lie in cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops import dots
from pointsman.ops.dispatch import refuse_beyond
from pointsman.ops.feedforward import HiddenUnits
from pointsman.ops.gemm import IN_CACHE, ONEDNN
from pointsman.ops.packing import Packed
from pointsman.ops.reference import ACTIVATIONS, ExpertParameters

MOST = 256  # assignments; of more, many share an expert, and oneDNN would build a kernel for each new count

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Rows, all experts' weights [E, out, in], and biases [E, out], to each row's product with its expert's."""


def forward(hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    """The combined output [tokens, dim].

    Args:
        hidden: [tokens, dim].
        weight: [tokens, k], at least float32.
        expert: [tokens, k], -1 for none.
        first: the experts' first half, without dropout.
    """
    tokens, k = expert.shape
    weight = weight.to(hidden.dtype)
    chosen = expert.reshape(-1)
    source = torch.arange(tokens, device="cpu")[:, None].expand(-1, k).reshape(-1)
    kept = None
    lowest, highest = map(int, chosen.aminmax())
    refuse_beyond(highest, len(parameters.w_in))
    if lowest < 0:
        kept = (chosen >= 0).nonzero()[:, 0]
        chosen, source = chosen.index_select(0, kept), source.index_select(0, kept)
        weight = weight.masked_fill(expert < 0, 0)
        if not len(kept):
            return torch.zeros_like(hidden)
    rows = _rows(hidden, source, chosen, parameters, first)
    if kept is not None:
        rows = rows.new_zeros(tokens * k, rows.shape[1]).index_copy_(0, kept, rows)
    return torch.bmm(weight[:, None], rows.view(tokens, k, -1))[:, 0]


def _rows(hidden: Tensor, source: Tensor, expert: Tensor, p: ExpertParameters, first: HiddenUnits) -> Tensor:
    """Expert `expert` [S] on the hidden states `source` [S]: [S, dim]."""
    small = p.w_in.shape[1] * p.w_in.shape[2] <= IN_CACHE
    with_dots = all(weight is None or dots.suits(weight) for weight in (p.w_in, p.w_gate, p.w_out))
    if with_dots and len(hidden) == 1:
        return _by_dots(hidden, source, expert, p, first.activation)
    counts = expert.bincount(minlength=len(p.w_in))
    most = int(counts.max())
    if with_dots and (_few_rows_each(counts, len(expert), hidden.dtype) if small else most == 1):
        return _by_dots(hidden, source, expert, p, first.activation)
    if small and _batched_suits(len(p.w_in), most, len(expert)):
        return _batched(hidden.index_select(0, source), expert, most, p, first.activation)
    rows = hidden.new_empty(len(expert), hidden.shape[1])
    alone = counts.index_select(0, expert) <= int(with_dots)
    left = alone.nonzero()[:, 0]
    if len(left):
        rows[left] = _by_dots(hidden, source[left], expert[left], p, first.activation)
    rest = alone.logical_not().nonzero()[:, 0]
    rest = rest.index_select(0, expert.index_select(0, rest).argsort(stable=True))
    inputs, sharing = hidden.index_select(0, source.index_select(0, rest)), expert.index_select(0, rest)
    experts = torch.arange(len(p.w_in), device="cpu")
    ends = torch.searchsorted(sharing, experts, right=True, out_int32=True)
    if _grouped_suits(hidden, p, first, small):
        rows[rest] = _grouped(inputs, sharing, ends, p, first.activation)
    else:
        rows[rest] = _one_by_one(inputs, ends.tolist(), p, first)
    return rows


def _few_rows_each(counts: Tensor, assignments: int, dtype: torch.dtype) -> bool:
    """Whether inner products are fastest for weights in cache: measured, by the mean over the experts in use."""
    most = 2.5 if dtype == torch.float32 else 1.25
    return assignments <= most * int(counts.count_nonzero())


def _by_dots(hidden: Tensor, source: Tensor, expert: Tensor, p: ExpertParameters, activation: str) -> Tensor:
    """All rows in one call a weight; many of them expert by expert, so that each weight is read once."""
    if len(expert) >= 32:
        order = expert.argsort(stable=True)
        results = _each_by_dots(hidden, source[order], expert[order], p, activation)
        return torch.empty_like(results).index_copy_(0, order, results)
    return _each_by_dots(hidden, source, expert, p, activation)


def _each_by_dots(hidden: Tensor, source: Tensor, expert: Tensor, p: ExpertParameters, activation: str) -> Tensor:
    rows = torch.arange(len(expert), device="cpu")

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dots.linear(inputs, source if inputs is hidden else rows, weight, expert, bias)

    return _feed_forward(hidden, p, activation, linear)


def _batched_suits(num_experts: int, most: int, assignments: int) -> bool:
    """Whether the rows of padding and of unused experts are few enough."""
    return num_experts * most <= 4 * assignments + 32


def _batched(rows: Tensor, expert: Tensor, most: int, p: ExpertParameters, activation: str) -> Tensor:
    """All experts, each on as many rows as the busiest has, in one call a weight: used ones and unused ones."""
    size = most if rows.dtype == torch.float32 else -(-most // 4) * 4  # few sizes, for which oneDNN builds its kernels
    ordered, order = expert.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(len(p.w_in), device="cpu"))
    place = ordered * size + torch.arange(len(expert), device="cpu") - starts.index_select(0, ordered)
    slot = torch.empty_like(place).index_copy_(0, order, place)

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.bmm(inputs, weight.mT)
        return torch.baddbmm(bias[:, None], inputs, weight.mT)

    padded = rows.new_zeros(len(p.w_in) * size, rows.shape[1]).index_copy_(0, slot, rows)
    output = _feed_forward(padded.view(len(p.w_in), size, -1), p, activation, linear)
    return output.view(-1, rows.shape[1]).index_select(0, slot)


def _grouped_suits(hidden: Tensor, parameters: ExpertParameters, first: HiddenUnits, small: bool) -> bool:
    """Whether `F.grouped_mm`, on a CPU a loop over `torch.mm` that costs few calls, has the best products, too.

    It takes rows of whole 16 bytes.
    """
    _, width, dim = parameters.w_in.shape
    whole = not (width | dim) * hidden.element_size() % 16
    return whole and (small or not (first.gemm is ONEDNN or isinstance(first.gemm, Packed)))


def _grouped(rows: Tensor, expert: Tensor, ends: Tensor, p: ExpertParameters, activation: str) -> Tensor:
    """`expert` [rows], ascending, and `ends` [E] int32, where each expert's rows end."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.grouped_mm(rows, weight.mT, offs=ends)
        return output if bias is None else output.add_(bias.index_select(0, expert))

    return _feed_forward(rows, p, activation, linear)


def _one_by_one(rows: Tensor, ends: list[int], parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    results = []
    experts = (itertools.repeat(None) if tensor is None else tensor.unbind(0) for tensor in parameters)
    for (start, end), tensors in zip(itertools.pairwise([0, *ends]), zip(*experts, strict=False), strict=False):
        if start < end:
            expert = ExpertParameters(*tensors)
            units, _ = first.forward(rows[start:end], expert)
            results.append(first.gemm.linear(units, expert.w_out, expert.b_out))
    return torch.cat(results)


def _feed_forward(rows: Tensor, p: ExpertParameters, activation: str, linear: Linear) -> Tensor:
    units = linear(rows, p.w_in, p.b_in)
    if p.w_gate is not None:
        units = ACTIVATIONS[activation](linear(rows, p.w_gate, p.b_gate)).mul_(units)
    else:
        units = units.relu_() if activation == "relu" else ACTIVATIONS[activation](units)
    return linear(units, p.w_out, p.b_out)
