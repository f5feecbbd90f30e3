"""Experts on a CPU for a few tokens, without gradients: decoding.

Reading the weights of the chosen experts is what takes the time, and beside it the calls into torch: so no plan and
no padding.
"""

from __future__ import annotations

import numpy as np
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
    chosen = expert.reshape(-1).numpy()
    order = chosen.argsort(kind="stable")
    dropped = np.count_nonzero(chosen < 0)
    if dropped:
        order, weight = order[dropped:], weight.masked_fill(expert < 0, 0)
    counts = np.bincount(chosen[order], minlength=len(parameters.w_in))
    rows = hidden.index_select(0, torch.from_numpy(order // k))
    if _grouped_suits(hidden, parameters, first):
        rows = _grouped(rows, torch.from_numpy(counts.cumsum(dtype=np.int32)), parameters, first.activation)
    else:
        rows = _one_by_one(rows, counts.tolist(), parameters, first)
    position = np.full(tokens * k, len(order))
    position[order] = np.arange(len(order))
    if dropped:
        rows = F.pad(rows, (0, 0, 0, 1))  # a row of zeros, for assignments to none
    where = torch.from_numpy(position).view(tokens, k)
    return F.embedding_bag(where, rows, mode="sum", per_sample_weights=weight)


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


def _one_by_one(rows: Tensor, counts: list[int], parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    used = [index for index, count in enumerate(counts) if count]
    parts = rows.split([counts[index] for index in used])  # type: ignore[no-untyped-call]
    return torch.cat([rows[:0], *(_expert(*each, parameters, first) for each in zip(parts, used, strict=True))])


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


def _grouped(rows: Tensor, ends: Tensor, p: ExpertParameters, activation: str) -> Tensor:
    """All experts on their rows, which are sorted by expert; `ends` [E] int32, where each expert's end."""
    biases = p.b_in, p.b_out, p.b_gate
    expert = None
    if any(bias is not None for bias in biases):
        expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=torch.int32, device=rows.device), right=True)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        return output if bias is None or expert is None else output.add_(bias.index_select(0, expert))

    units = linear(rows, p.w_in, p.b_in)
    if p.w_gate is not None:
        units = ACTIVATIONS[activation](linear(rows, p.w_gate, p.b_gate)).mul_(units)
    else:
        units = units.relu_() if activation == "relu" else ACTIVATIONS[activation](units)
    return linear(units, p.w_out, p.b_out)
