"""Experts on a CPU for a few tokens, without gradients: decoding.

Reading the weights of the chosen experts is what takes the time, and beside it the calls into torch: so no plan, and
as few calls as can be. Which way depends on how many rows an expert has, and on whether its weights lie in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu.dispatch import refuse_beyond
from pointsman.experts.cpu.hidden_units import HiddenUnits, one
from pointsman.experts.reference import ACTIVATIONS, ExpertParameters
from pointsman.ops import dots
from pointsman.ops.gemm import BLAS, IN_CACHE, ONEDNN, Gemm

MOST = 256  # assignments; of more, many share an expert, and oneDNN would build a kernel for each new count

TINY = 1 << 15  # elements of a weight that is read in less time than a call takes

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Inputs, weights and biases, of all experts [E, out, in] or of one, to the products of each row with its expert's."""


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
    # so few that lists are sorted and counted in a fraction of the time that calls into torch or numpy take
    experts: list[int] = expert.reshape(-1).tolist()
    refuse_beyond(max(experts), len(parameters.w_in))
    kept = list(range(len(experts)))
    if min(experts) < 0:
        kept = [place for place in kept if experts[place] >= 0]
        if not kept:
            return torch.zeros_like(hidden)
        experts = [experts[place] for place in kept]
    elif tokens == 1:
        rows = _single(parameters, row)(hidden, Chosen([0] * k, experts), parameters, first.activation)
        return torch.mm(weight.to(hidden.dtype), rows)
    source = [place // k for place in kept]
    results = _results(hidden, Chosen(source, experts), parameters, first, row)
    factor = weight.to(hidden.dtype).reshape(-1)
    if len(kept) < tokens * k:
        factor = factor[_tensor(kept)]
        bags = torch.searchsorted(_tensor(source), torch.arange(tokens, device="cpu"))
    else:
        bags = _tensor(range(0, len(kept), k))
    return F.embedding_bag(_tensor(results.place), results.rows, bags, mode="sum", per_sample_weights=factor)


def _tensor(values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device="cpu")


class Chosen(NamedTuple):
    """Assignments in any order: expert `expert[i]` works on the hidden states of token `source[i]`."""

    source: list[int]
    expert: list[int]

    def take(self, places: list[int]) -> Chosen:
        return Chosen([self.source[place] for place in places], [self.expert[place] for place in places])

    def by_expert(self) -> list[int]:
        """The places in the order of their experts."""
        return sorted(range(len(self.expert)), key=self.expert.__getitem__)

    def counts(self, num_experts: int) -> list[int]:
        """How many assignments each expert has."""
        counts = [0] * num_experts
        for expert in self.expert:
            counts[expert] += 1
        return counts


class Results(NamedTuple):
    """What experts gave: row `place[i]` [S] of `rows` [n, dim] is assignment i's."""

    rows: Tensor
    place: Iterable[int]


def _ordered(rows: Tensor, order: list[int]) -> Results:
    """Row i is of assignment `order[i]`."""
    place = [0] * len(order)
    for row, assignment in enumerate(order):
        place[assignment] = row
    return Results(rows, place)


def _results(hidden: Tensor, chosen: Chosen, p: ExpertParameters, first: HiddenUnits, row: str) -> Results:
    """What the chosen experts [S] give for their tokens."""
    small = p.w_in.shape[1] * p.w_in.shape[2] <= IN_CACHE
    single = _single(p, row)
    with_dots = single is _by_dots
    counts = chosen.counts(len(p.w_in))
    most = max(counts)
    if small:
        if with_dots and len(chosen.expert) <= _few_rows(first.gemm) * sum(map(bool, counts)):
            order = chosen.by_expert()  # so that each weight is read once
            return _ordered(_by_dots(hidden, chosen.take(order), p, first.activation), order)
        if _batched_suits(p, most, len(chosen.expert), first.gemm):
            return _batched(hidden, chosen, counts, most, p, first.activation)
    elif most == 1:
        return Results(single(hidden, chosen, p, first.activation), range(len(chosen.expert)))
    order = shared = chosen.by_expert()
    results = []
    if with_dots or not small:
        left = [place for place in order if counts[chosen.expert[place]] == 1]
        shared = [place for place in order if counts[chosen.expert[place]] > 1]
        order = left + shared
        if left:
            counts = [0 if count == 1 else count for count in counts]
            results.append(single(hidden, chosen.take(left), p, first.activation))
    if shared:
        rows = hidden.index_select(0, _tensor(chosen.source[place] for place in shared))
        if _grouped_suits(hidden, p, first, small):
            results.append(_grouped(rows, counts, p, first.activation))
        else:
            results.append(_one_by_one(rows, counts, p, first))
    return _ordered(torch.cat(results) if len(results) > 1 else results[0], order)


def _single(p: ExpertParameters, row: str) -> Callable[[Tensor, Chosen, ExpertParameters, str], Tensor]:
    """How the rows of experts that have only one come about: [S, dim]."""
    with_mv = row == "mv" and p.w_in.shape[1] * p.w_in.shape[2] > TINY
    if with_mv or not all(weight is None or dots.suits(weight) for weight in (p.w_in, p.w_gate, p.w_out)):
        return _one_by_one_row
    return _by_dots


def _few_rows(gemm: Gemm) -> float:
    """Up to how many rows inner products are fastest for weights in cache: measured, a mean over the experts in use."""
    return 2.5 if gemm is ONEDNN else 1.25


def _one_by_one_row(hidden: Tensor, chosen: Chosen, p: ExpertParameters, activation: str) -> Tensor:
    """A call a row and weight."""

    def linear(row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)

    pairs = zip(*chosen, strict=True)
    return torch.stack([_feed_forward(hidden[row], one(p, index), activation, linear) for row, index in pairs])


def _by_dots(hidden: Tensor, chosen: Chosen, p: ExpertParameters, activation: str) -> Tensor:
    """All rows in one call a weight."""
    source, expert = map(_tensor, chosen)
    rows = torch.arange(len(expert), device="cpu")

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dots.linear(inputs, source if inputs is hidden else rows, weight, expert, bias)

    return _feed_forward(hidden, p, activation, linear)


def _batched_suits(p: ExpertParameters, most: int, assignments: int, gemm: Gemm) -> bool:
    """Whether the rows of padding and of unused experts are few enough, and a call for each expert not as fast."""
    num_experts, width, dim = p.w_in.shape
    if gemm is BLAS and p.w_in.dtype == torch.float32 and width * dim > TINY:
        return False
    return num_experts * most <= 4 * assignments + 32


def _batched(
    hidden: Tensor, chosen: Chosen, counts: list[int], most: int, p: ExpertParameters, activation: str
) -> Results:
    """All experts, each on as many rows as the busiest has, in one call a weight: used ones and unused ones."""
    size = most if hidden.dtype == torch.float32 else -(-most // 4) * 4  # few sizes: oneDNN builds a kernel for each
    following = [expert * size for expert in range(len(counts))]
    slots = []
    for expert in chosen.expert:
        slots.append(following[expert])
        following[expert] += 1

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.bmm(inputs, weight.mT)
        return torch.baddbmm(bias[:, None], inputs, weight.mT)

    rows = hidden.index_select(0, _tensor(chosen.source))
    padded = hidden.new_zeros(len(p.w_in) * size, hidden.shape[1]).index_copy_(0, _tensor(slots), rows)
    output = _feed_forward(padded.view(len(p.w_in), size, -1), p, activation, linear)
    return Results(output.view(-1, hidden.shape[1]), slots)


def _grouped_suits(hidden: Tensor, parameters: ExpertParameters, first: HiddenUnits, small: bool) -> bool:
    """Whether `F.grouped_mm`, on a CPU a loop over `torch.mm` that costs few calls, has the best products, too.

    It takes rows of whole 16 bytes.
    """
    _, width, dim = parameters.w_in.shape
    whole = not (width | dim) * hidden.element_size() % 16
    return whole and (small or first.gemm is not ONEDNN)


def _grouped(rows: Tensor, counts: list[int], p: ExpertParameters, activation: str) -> Tensor:
    """Rows in the order of their experts, of which each has `counts` [E]."""
    ends = _tensor(accumulate(counts), torch.int32)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = F.grouped_mm(rows, weight.mT, offs=ends)
        return output if bias is None else output.add_(bias.repeat_interleave(_tensor(counts), 0))

    return _feed_forward(rows, p, activation, linear)


def _one_by_one(rows: Tensor, counts: list[int], parameters: ExpertParameters, first: HiddenUnits) -> Tensor:
    """What `_grouped` does, one expert after the other."""
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
    units = linear(rows, p.w_in, p.b_in)
    if p.w_gate is not None:
        units = ACTIVATIONS[activation](linear(rows, p.w_gate, p.b_gate)).mul_(units)
    else:
        units = units.relu_() if activation == "relu" else ACTIVATIONS[activation](units)
    return linear(units, p.w_out, p.b_out)
