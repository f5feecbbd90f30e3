"""Experts on a CPU for a few tokens, without gradients: decoding.

Reading the weights of the chosen experts is what takes the time, and beside it the calls into torch: so no plan and
no padding.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.feedforward import HiddenUnits, one
from pointsman.ops.gemm import ONEDNN
from pointsman.ops.reference import ACTIVATIONS, ExpertParameters

MOST = 256  # assignments; of more, many share an expert, and oneDNN would build a kernel for each new count
IN_CACHE = 1 << 19  # elements of a weight so small that calls take the time, and any GEMM will do


def forward(hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    """The combined output [tokens, dim].

    Args:
        hidden: [tokens, dim].
        weight: [tokens, k], at least float32.
        expert: [tokens, k], -1 for none.
        first: the experts' first half, without dropout.
    """
    weight = weight.to(hidden.dtype)
    if len(hidden) == 1:
        return _one_token(hidden, weight, expert[0].tolist(), parameters, first)
    tokens, k = expert.shape
    chosen, order = expert.reshape(-1).sort(stable=True)
    dropped = int((chosen < 0).sum()) if int(chosen[0]) < 0 else 0
    if dropped:
        chosen, order, weight = chosen[dropped:], order[dropped:], weight.masked_fill(expert < 0, 0)
    ends = torch.searchsorted(chosen, torch.arange(len(parameters.w_in), device="cpu"), right=True, out_int32=True)
    rows = hidden.index_select(0, order.div(k, rounding_mode="floor"))
    if _grouped_suits(hidden, parameters, first):
        rows = _grouped(rows, chosen, ends, parameters, first.activation)
    else:
        rows = _one_by_one(rows, ends.tolist(), parameters, first)
    slots = (rows.new_zeros if dropped else rows.new_empty)(tokens * k, rows.shape[1]).index_copy_(0, order, rows)
    return slots.view(tokens, k, -1).mul_(weight[:, :, None]).sum(1)


def _one_token(
    hidden: Tensor, weight: Tensor, chosen: list[int], parameters: ExpertParameters, first: HiddenUnits
) -> Tensor:
    rows = []
    for index in chosen:
        if index >= 0:
            rows.append(_expert(hidden, index, parameters, first))
    if len(rows) < len(chosen):
        weight = weight[:, [slot for slot, index in enumerate(chosen) if index >= 0]]
    return torch.mm(weight, torch.cat(rows)) if rows else torch.zeros_like(hidden)


def _one_by_one(rows: Tensor, ends: list[int], parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    results = [rows[:0]]
    for index, (start, end) in enumerate(pairwise([0, *ends])):
        if start < end:
            results.append(_expert(rows[start:end], index, parameters, first))
    return torch.cat(results)


def _expert(rows: Tensor, index: int, parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    expert = one(parameters, index)
    units, _ = first.forward(rows, expert)
    return first.gemm.linear(units, expert.w_out, expert.b_out)


def _grouped_suits(hidden: Tensor, parameters: ExpertParameters, first: HiddenUnits) -> bool:
    """Whether `F.grouped_mm`, on a CPU a loop over `torch.mm` that costs few calls, has the best products, too.

    It takes rows of whole 16 bytes.
    """
    _, width, dim = parameters.w_in.shape
    whole = not (width | dim) * hidden.element_size() % 16
    return whole and (first.gemm is not ONEDNN or width * dim <= IN_CACHE)


def _grouped(rows: Tensor, expert: Tensor, ends: Tensor, p: ExpertParameters, activation: str) -> Tensor:
    """All experts on their rows: `expert` [rows], ascending, and `ends` [E] int32, where each expert's rows end."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        return output if bias is None else output.add_(bias.index_select(0, expert))

    units = linear(rows, p.w_in, p.b_in)
    if p.w_gate is not None:
        units = ACTIVATIONS[activation](linear(rows, p.w_gate, p.b_gate)).mul_(units)
    else:
        units = units.relu_() if activation == "relu" else ACTIVATIONS[activation](units)
    return linear(units, p.w_out, p.b_out)
