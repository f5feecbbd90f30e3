"""k < E: permute, two matrix products for each expert, combine; and the gradients.

For assignments a = (token t, expert e, weight w) with rows x_a = x_t and hidden units h_a:

    y_t = sum_a w_a (W_out h_a + b_out)
    g_a = w_a dy_t, the gradient of the expert's output; dh_a = W_out' g_a
    dw_a = (h_a . dh_a + b_out . g_a) / w_a        so that the experts' outputs need not be saved
    dW_out = sum_a g_a h_a',   dW_in = sum_a du_a x_a',   dx_t = sum_a W_in' du_a

with du_a the gradient of the pre-activation. The weight multiplies dy, which is narrower than h, while dy is permuted.
`hidden_units.divisible` treats weights that are too small to divide by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pointsman.experts.cpu.hidden_units import Gradients, HiddenUnits, Saved, divisible
from pointsman.experts.cpu.permute import Group, Permutation
from pointsman.ops import dots
from pointsman.ops.feed_forward import ExpertParameters


def forward(
    hidden: Tensor,
    weight: Tensor,
    parameters: ExpertParameters,
    permutation: Permutation,
    first: HiddenUnits,
    save: bool,
) -> tuple[Tensor, list[Saved]]:
    """The combined output [tokens, dim], and what each used expert saves for `backward`.

    Args:
        hidden: [tokens, dim].
        weight: [A], the combine weights in token order, in the dtype of `hidden`.
        first: the experts' first half.
        save: whether backward will follow.
    """
    rows = hidden.new_empty(permutation.num_rows, hidden.shape[1])
    saved: list[Saved] = []
    for group, tensors, results in zip(
        permutation.groups, _experts(permutation, parameters), permutation.split_rows(rows), strict=True
    ):
        if not group.size:
            continue
        expert = ExpertParameters(*tensors)  # type: ignore[arg-type]
        units_of_group = first.for_group(group.num_experts)
        units, item = units_of_group.forward(group.permute(hidden), expert)
        units_of_group.gemm.linear(units, expert.w_out, expert.b_out, out=results)
        if save:
            saved.append(item)
    return permutation.combine(rows, weight), saved


def backward(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    parameters: ExpertParameters,
    permutation: Permutation,
    first: HiddenUnits,
    saved: Sequence[Saved],
    gradients: Gradients,
    hidden_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `hidden` and `weight`; those of the parameters are written into `gradients`."""
    scale, rest = divisible(weight)
    scales = permutation.split_assignments(scale.index_select(0, permutation.order))
    rests: Sequence[Tensor | None] = [None] * len(permutation.groups)
    if rest is not None:
        ones = rest.new_ones(permutation.num_rows, 1)
        rests = permutation.split_rows(ones.index_copy_(0, permutation.row, rest[:, None]))
    hidden_rows = hidden.new_empty(permutation.num_rows, hidden.shape[1]) if hidden_wanted else None
    of_hidden = [None] * len(permutation.groups) if hidden_rows is None else permutation.split_rows(hidden_rows)
    of_weight = [weight[:0]]
    remaining = iter(saved)
    of_experts = _experts(permutation, parameters), _experts(permutation, gradients)
    each = zip(permutation.groups, *of_experts, scales, rests, of_hidden, strict=True)
    for group, tensors, results, of_scale, of_rest, dx in each:
        wanted = Gradients(*results)
        if group.size:
            expert, units = ExpertParameters(*tensors), first.for_group(group.num_experts)
            rows = gradient, hidden, of_scale, of_rest, dx
            dw = _group_backward(group, expert, next(remaining), units, *rows, wanted, weight_wanted)
            if dw is not None:
                of_weight.append(dw)
        for tensor in wanted:
            if tensor is not None and not group.size:
                tensor.zero_()
            elif tensor is not None and group.num_experts > 1:
                for index in group.unused:  # it saw zeros: 0, or NaN of its own
                    tensor[index].zero_()
    return (
        None if hidden_rows is None else permutation.combine(hidden_rows),
        torch.cat(of_weight).index_select(0, permutation.row).div_(scale) if weight_wanted else None,
    )


def _group_backward(
    group: Group,
    expert: ExpertParameters,
    item: Saved,
    first: HiddenUnits,
    gradient: Tensor,
    hidden: Tensor,
    scale: Tensor,
    rest: Tensor | None,
    hidden_rows: Tensor | None,
    wanted: Gradients,
    weight_wanted: bool,
) -> Tensor | None:
    """One group: writes into `wanted` and `hidden_rows`, returns the gradient of its rows' weights times `scale`.

    A function of its own, so that what it needs is freed before the next group.
    """
    gemm = first.gemm
    units = first.recomputed(item)
    outer = group.permute(gradient, scale)
    inner = gemm.product(outer, expert.w_out)
    weight_gradient = None
    if weight_wanted:
        weight_gradient = dots.each(units.units, inner)
        if expert.b_out is not None:
            weight_gradient += torch.matmul(group.by_expert(outer), expert.b_out[..., None]).view(-1)
    up, gate = first.backward(inner, item, units)
    if rest is not None:
        outer.mul_(rest)
        up.mul_(rest)
        gate = None if gate is None else gate.mul_(rest)
    if wanted.w_out is not None:
        gemm.weight_gradient(wanted.w_out, outer, units.units)
    if wanted.b_out is not None:
        torch.sum(group.by_expert(outer), -2, out=wanted.b_out)
    del outer
    if wanted.w_in is not None or wanted.w_gate is not None:
        inputs = group.permute(hidden)
        if wanted.w_in is not None:
            gemm.weight_gradient(wanted.w_in, up, inputs)
        if wanted.w_gate is not None:
            assert gate is not None
            gemm.weight_gradient(wanted.w_gate, gate, inputs)
        del inputs
    for bias, through in ((wanted.b_in, up), (wanted.b_gate, gate)):
        if bias is not None:
            assert through is not None
            torch.sum(group.by_expert(through), -2, out=bias)
    if hidden_rows is not None:
        if gate is None:
            gemm.product(up, expert.w_in, out=hidden_rows)
        else:
            assert expert.w_gate is not None
            total = gemm.product(up, expert.w_in)
            hidden_rows.copy_(gemm.accumulate(total, gate, expert.w_gate.mT))
    return weight_gradient


def _experts(permutation: Permutation, tensors: Iterable[Tensor | None]) -> Iterator[tuple[Tensor | None, ...]]:
    """Of all experts' parameters, or their gradients, those of each group."""
    return zip(*map(permutation.split_experts, tensors), strict=True)
