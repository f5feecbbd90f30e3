"""Few tokens without gradients: decoding.

The time goes into reading the weights of the chosen experts, and into calls. So there is no permutation, and as few
calls into torch as possible. Which products are used depends on how many rows an expert has, and on whether its weights
fit into the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu.hidden_units import HiddenUnits, one
from pointsman.experts.cpu.permute import refuse_beyond
from pointsman.ops import dots
from pointsman.ops.feed_forward import ACTIVATIONS, ExpertParameters
from pointsman.ops.gemm import BLAS, IN_CACHE, ONEDNN, Gemm

MOST = 256  # assignments; with more, many share an expert, and oneDNN would build a kernel for each new row count
TINY = 1 << 15  # elements of a weight that takes less time to read than a call takes
ALL = 1 << 18  # elements of all experts' weights of one kind that each token may be multiplied by; measured
WORK = 1 << 22  # tokens times these elements up to which that is faster than sorting
FEW = 6  # assignments to experts with such weights for which one torch.mv each takes the fewest calls

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A linear map of rows, each with the weight of its expert: of one expert [out, in], or of all [E, out, in]."""


def forward(
    hidden: Tensor,
    weight: Tensor,
    expert: Tensor,
    parameters: ExpertParameters,
    first: HiddenUnits,
    row: str,
) -> Tensor:
    """The combined output [tokens, dim].

    Args:
        hidden: [tokens, dim].
        weight: [tokens, k], at least float32.
        expert: [tokens, k], -1 for none.
        first: the experts' first half, without dropout.
        row: how an expert's only row is computed: `Kernels.row`.
    """
    tokens, k = expert.shape
    # lists: for so few, Python sorts and counts faster than one call into torch or NumPy
    experts: list[int] = expert.reshape(-1).tolist()
    refuse_beyond(max(experts), len(parameters.w_in))
    if _all_suits(tokens, len(experts), parameters, first):
        output = _by_all(hidden, weight, expert, parameters, first.activation)
        if bool(output.sum().isfinite()):  # 0 times what an expert does with a token that it did not get may be NaN
            return output
    places = list(range(len(experts)))
    if min(experts) < 0:
        places = [place for place in places if experts[place] >= 0]
        if not places:
            return torch.zeros_like(hidden)
        experts = [experts[place] for place in places]
    elif tokens == 1:
        rows = _single_rows(parameters, row, k)(hidden, Assigned([0] * k, experts), parameters, first.activation)
        return torch.mm(weight.to(hidden.dtype), rows)
    token = [place // k for place in places]
    results = _results(hidden, Assigned(token, experts), parameters, first, row)
    factor = weight.to(hidden.dtype).reshape(-1)
    if len(places) < tokens * k:
        factor = factor[_tensor(places)]
        token_offsets = torch.searchsorted(_tensor(token), torch.arange(tokens, device="cpu"))
    else:
        token_offsets = _tensor(range(0, len(places), k))
    return F.embedding_bag(_tensor(results.row), results.rows, token_offsets, mode="sum", per_sample_weights=factor)


def _tensor(values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device="cpu")


def _all_suits(tokens: int, assignments: int, p: ExpertParameters, first: HiddenUnits) -> bool:
    """Whether every token through every expert is faster than to find out who goes where."""
    size, several = p.w_in.numel(), assignments > 2 + len(p.w_in) / 16
    return several and size <= ALL and tokens * size <= WORK and p.w_in.dtype == torch.float32


def _by_all(hidden: Tensor, weight: Tensor, expert: Tensor, p: ExpertParameters, activation: str) -> Tensor:
    """Every token through every expert; the combine weights, 0 where it was not chosen, are factors of hidden units."""
    tokens, num_experts = len(hidden), len(p.w_in)
    weight = weight.masked_fill(expert < 0, 0)
    factor = weight.new_zeros(tokens, num_experts).scatter_add_(1, expert.clamp_min(0), weight).to(hidden.dtype)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(rows, weight.flatten(0, 1), None if bias is None else bias.flatten())

    units = _units(hidden, p, activation, linear).view(tokens, num_experts, -1).mul_(factor[:, :, None])
    output = torch.bmm(units.transpose(0, 1), p.w_out.mT).sum(0)
    return output if p.b_out is None else output.addmm_(factor, p.b_out)


class Assigned(NamedTuple):
    """Assignments in any order: expert `expert[i]` gets the hidden states of token `token[i]`."""

    token: list[int]
    expert: list[int]

    def select(self, places: list[int]) -> Assigned:
        return Assigned([self.token[place] for place in places], [self.expert[place] for place in places])

    def order(self) -> list[int]:
        """The places sorted by expert."""
        return sorted(range(len(self.expert)), key=self.expert.__getitem__)

    def num_tokens_per_expert(self, num_experts: int) -> list[int]:
        counts = [0] * num_experts
        for expert in self.expert:
            counts[expert] += 1
        return counts


class Results(NamedTuple):
    """The experts' outputs: row `row[i]` [A] of `rows` [n, dim] belongs to assignment i."""

    rows: Tensor
    row: Iterable[int]


def _in_order(rows: Tensor, order: list[int]) -> Results:
    """Row i belongs to assignment `order[i]`."""
    place = [0] * len(order)
    for row, assignment in enumerate(order):
        place[assignment] = row
    return Results(rows, place)


def _results(hidden: Tensor, assigned: Assigned, p: ExpertParameters, first: HiddenUnits, row: str) -> Results:
    """The outputs of the experts for their tokens."""
    small = p.w_in.shape[1] * p.w_in.shape[2] <= IN_CACHE
    single_rows = _single_rows(p, row, len(assigned.expert))
    with_dots = single_rows is _by_dots
    counts = assigned.num_tokens_per_expert(len(p.w_in))
    most = max(counts)
    if _is_tiny(p) and p.w_in.dtype == torch.float32 and first.gemm is BLAS and _grouped_suits(hidden, p, first, small):
        if len(assigned.expert) <= FEW:
            return Results(_by_mv(hidden, assigned, p, first.activation), range(len(assigned.expert)))
        order = assigned.order()
        rows = hidden.index_select(0, _tensor(assigned.token[place] for place in order))
        return _in_order(_grouped(rows, counts, p, first.activation), order)
    if small:
        if with_dots and len(assigned.expert) <= _most_rows_for_dots(first.gemm) * sum(map(bool, counts)):
            order = assigned.order()  # so that each weight is read once
            return _in_order(_by_dots(hidden, assigned.select(order), p, first.activation), order)
        if _batched_suits(p, most, len(assigned.expert), first.gemm):
            return _batched(hidden, assigned, counts, most, p, first.activation)
    elif most == 1:
        return Results(single_rows(hidden, assigned, p, first.activation), range(len(assigned.expert)))
    order = shared = assigned.order()
    results = []
    if with_dots or not small:
        alone = [place for place in order if counts[assigned.expert[place]] == 1]
        shared = [place for place in order if counts[assigned.expert[place]] > 1]
        order = alone + shared
        if alone:
            counts = [0 if count == 1 else count for count in counts]
            results.append(single_rows(hidden, assigned.select(alone), p, first.activation))
    if shared:
        rows = hidden.index_select(0, _tensor(assigned.token[place] for place in shared))
        if _grouped_suits(hidden, p, first, small):
            results.append(_grouped(rows, counts, p, first.activation))
        else:
            results.append(_one_by_one(rows, counts, p, first))
    return _in_order(torch.cat(results) if len(results) > 1 else results[0], order)


def _is_tiny(p: ExpertParameters) -> bool:
    return p.w_in.shape[1] * p.w_in.shape[2] <= TINY


def _single_rows(
    p: ExpertParameters, row: str, count: int
) -> Callable[[Tensor, Assigned, ExpertParameters, str], Tensor]:
    """How `count` rows, each the only one of its expert, are computed: [count, dim]."""
    with_mv = count <= FEW if _is_tiny(p) else row == "mv"
    if with_mv or not all(weight is None or dots.suits(weight) for weight in (p.w_in, p.w_gate, p.w_out)):
        return _by_mv
    return _by_dots


def _most_rows_for_dots(gemm: Gemm) -> float:
    """Up to how many rows, as a mean over the experts in use, `ops.dots` is fastest for weights in cache. Measured."""
    return 2.5 if gemm is ONEDNN else 1.25


def _by_mv(hidden: Tensor, assigned: Assigned, p: ExpertParameters, activation: str) -> Tensor:
    """One torch.mv for each row and weight."""

    def linear(row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)

    pairs = zip(*assigned, strict=True)
    return torch.stack([_feed_forward(hidden[row], one(p, index), activation, linear) for row, index in pairs])


def _by_dots(hidden: Tensor, assigned: Assigned, p: ExpertParameters, activation: str) -> Tensor:
    """One call of `ops.dots` for all rows and one of the two or three weights."""
    token, expert = map(_tensor, assigned)
    rows = torch.arange(len(expert), device="cpu")

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dots.linear(inputs, token if inputs is hidden else rows, weight, expert, bias)

    return _feed_forward(hidden, p, activation, linear)


def _batched_suits(p: ExpertParameters, most: int, assignments: int, gemm: Gemm) -> bool:
    """Whether padding and unused experts add few rows, and one call for each expert is slower."""
    num_experts, width, dim = p.w_in.shape
    if gemm is BLAS and p.w_in.dtype == torch.float32 and width * dim > TINY:
        return False
    return num_experts * most <= 4 * assignments + 32


def _batched(
    hidden: Tensor, assigned: Assigned, counts: list[int], most: int, p: ExpertParameters, activation: str
) -> Results:
    """One torch.bmm for each weight: all experts, used or not, each with as many rows as the busiest."""
    size = most if hidden.dtype == torch.float32 else -(-most // 4) * 4  # few sizes: oneDNN builds a kernel for each
    following = [expert * size for expert in range(len(counts))]
    places = []
    for expert in assigned.expert:
        places.append(following[expert])
        following[expert] += 1

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.bmm(inputs, weight.mT)
        return torch.baddbmm(bias[:, None], inputs, weight.mT)

    rows = hidden.index_select(0, _tensor(assigned.token))
    padded = hidden.new_zeros(len(p.w_in) * size, hidden.shape[1]).index_copy_(0, _tensor(places), rows)
    output = _feed_forward(padded.view(len(p.w_in), size, -1), p, activation, linear)
    return Results(output.view(-1, hidden.shape[1]), places)


def _grouped_suits(hidden: Tensor, parameters: ExpertParameters, first: HiddenUnits, small: bool) -> bool:
    """Whether `F.grouped_mm` fits: on a CPU it loops over torch.mm in C++, so it costs few calls, but uses no oneDNN in
    float32. It takes rows of whole 16 bytes."""
    _, width, dim = parameters.w_in.shape
    whole = not (width | dim) * hidden.element_size() % 16
    return whole and (small or first.gemm is not ONEDNN)


def _grouped(rows: Tensor, counts: list[int], p: ExpertParameters, activation: str) -> Tensor:
    """One grouped_mm for each weight: rows sorted by expert, `counts` [E] of them."""
    ends = _tensor(accumulate(counts), torch.int32)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.grouped_mm(rows, weight.mT, offs=ends)
        return output if bias is None else output.add_(bias.repeat_interleave(_tensor(counts), 0))

    return _feed_forward(rows, p, activation, linear)


def _one_by_one(rows: Tensor, counts: list[int], parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    """As `_grouped`, one expert after the other."""
    results, start = [], 0
    for index, count in enumerate(counts):
        if not count:
            continue
        end = start + count
        expert = one(parameters, index)
        units, _ = first.forward(rows[start:end], expert)
        results.append(first.gemm.linear(units, expert.w_out, expert.b_out))
        start = end
    return torch.cat(results)


def _feed_forward(rows: Tensor, p: ExpertParameters, activation: str, linear: Linear) -> Tensor:
    return linear(_units(rows, p, activation, linear), p.w_out, p.b_out)


def _units(rows: Tensor, p: ExpertParameters, activation: str, linear: Linear) -> Tensor:
    """The hidden units, a new tensor."""
    units = linear(rows, p.w_in, p.b_in)
    if p.w_gate is not None:
        return ACTIVATIONS[activation](linear(rows, p.w_gate, p.b_gate)).mul_(units)
    return units.relu_() if activation == "relu" else ACTIVATIONS[activation](units)
