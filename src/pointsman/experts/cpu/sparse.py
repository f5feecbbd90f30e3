"""Experts on a CPU, each over the tokens that chose it: gather, two matrix products, combine; and the way back.

With slots s = (token t, expert e, weight w), rows x_s = x_t and hidden units h_s:

    y_t = sum_s w_s (W_out h_s + b_out)
    g_s = w_s dy_t, the gradient of the expert's output; dh_s = W_out' g_s
    dw_s = (h_s . dh_s + b_out . g_s) / w_s        so the experts' outputs are not kept
    dW_out = sum_s g_s h_s',   dW_in = sum_s du_s x_s',   dx_t = sum_s W_in' du_s

with du_s the gradient of the pre-activation. The weight only ever multiplies a tensor that is dim wide, while it is
gathered. (For weights too small to divide by see `feedforward.divisible`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pointsman.experts.cpu.dispatch import Part, Plan
from pointsman.experts.cpu.hidden_units import Gradients, HiddenUnits, Kept, divisible
from pointsman.experts.reference import ExpertParameters
from pointsman.ops import dots


def forward(
    hidden: Tensor, weight: Tensor, parameters: ExpertParameters, plan: Plan, first: HiddenUnits, keep: bool
) -> tuple[Tensor, list[Kept]]:
    """The combined output [tokens, dim], and what each used expert keeps for `backward`.

    Args:
        hidden: [tokens, dim].
        weight: [S], the combine weights of the slots in token order, in the dtype of `hidden`.
        first: the experts' first half.
        keep: whether backward will follow.
    """
    rows = hidden.new_empty(plan.total, hidden.shape[1])
    kept: list[Kept] = []
    for part, tensors, results in zip(plan.parts, _experts(plan, parameters), plan.split(rows), strict=True):
        if not part.size:
            continue
        expert = ExpertParameters(*tensors)  # type: ignore[arg-type]
        of_part = first.of(part.number)
        units, keeping = of_part.forward(part.gather(hidden), expert)
        of_part.gemm.linear_into(results, units, expert.w_out, expert.b_out)
        if keep:
            kept.append(keeping)
    return plan.combine(rows, weight), kept


def backward(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    parameters: ExpertParameters,
    plan: Plan,
    first: HiddenUnits,
    kept: Sequence[Kept],
    gradients: Gradients,
    hidden_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `hidden` and `weight`; those of the parameters are written into `gradients`."""
    scale, rest = divisible(weight)
    scales = plan.split_slots(scale.index_select(0, plan.order))
    rests: Sequence[Tensor | None] = [None] * len(plan.parts)
    if rest is not None:
        rests = plan.split(rest.new_ones(plan.total, 1).index_copy_(0, plan.position, rest[:, None]))
    hidden_rows = hidden.new_empty(plan.total, hidden.shape[1]) if hidden_wanted else None
    of_hidden = [None] * len(plan.parts) if hidden_rows is None else plan.split(hidden_rows)
    of_weight = [weight[:0]]
    saved = iter(kept)
    each = zip(plan.parts, _experts(plan, parameters), _experts(plan, gradients), scales, rests, of_hidden, strict=True)
    for part, tensors, results, of_scale, of_rest, dx in each:
        wanted = Gradients(*results)
        if part.size:
            expert = ExpertParameters(*tensors)
            dw = _part_backward(
                part,
                expert,
                next(saved),
                first.of(part.number),
                gradient,
                hidden,
                of_scale,
                of_rest,
                dx,
                wanted,
                weight_wanted,
            )
            if dw is not None:
                of_weight.append(dw)
        for tensor in wanted:
            if tensor is not None and not part.size:
                tensor.zero_()
            elif tensor is not None and part.number > 1:
                for index in part.unused:  # it saw zeros: 0, or NaN of its own
                    tensor[index].zero_()
    return (
        None if hidden_rows is None else plan.combine(hidden_rows),
        torch.cat(of_weight).index_select(0, plan.position).div_(scale) if weight_wanted else None,
    )


def _part_backward(
    part: Part,
    expert: ExpertParameters,
    keeping: Kept,
    first: HiddenUnits,
    gradient: Tensor,
    hidden: Tensor,
    scale: Tensor,
    rest: Tensor | None,
    hidden_rows: Tensor | None,
    wanted: Gradients,
    weight_wanted: bool,
) -> Tensor | None:
    """One part: writes into `wanted` and `hidden_rows`, returns the gradient of its rows' weights times `scale`.

    A function of its own, so that what it needs is freed before the next part.
    """
    gemm = first.gemm
    again = first.again(keeping)
    outer = part.gather(gradient, scale)
    inner = gemm.product(outer, expert.w_out)
    weight_gradient = None
    if weight_wanted:
        weight_gradient = dots.each(again.units, inner)
        if expert.b_out is not None:
            weight_gradient += torch.matmul(part.apart(outer), expert.b_out[..., None]).view(-1)
    up, gate = first.backward(inner, keeping, again)
    if rest is not None:
        outer.mul_(rest)
        up.mul_(rest)
        gate = None if gate is None else gate.mul_(rest)
    if wanted.w_out is not None:
        gemm.weight_gradient(wanted.w_out, outer, again.units)
    if wanted.b_out is not None:
        torch.sum(part.apart(outer), -2, out=wanted.b_out)
    del outer
    if wanted.w_in is not None or wanted.w_gate is not None:
        inputs = part.gather(hidden)
        if wanted.w_in is not None:
            gemm.weight_gradient(wanted.w_in, up, inputs)
        if wanted.w_gate is not None:
            assert gate is not None
            gemm.weight_gradient(wanted.w_gate, gate, inputs)
        del inputs
    for bias, through in ((wanted.b_in, up), (wanted.b_gate, gate)):
        if bias is not None:
            assert through is not None
            torch.sum(part.apart(through), -2, out=bias)
    if hidden_rows is not None:
        if gate is None:
            gemm.product_into(hidden_rows, up, expert.w_in)
        else:
            assert expert.w_gate is not None
            total = gemm.product(up, expert.w_in)
            hidden_rows.copy_(gemm.accumulate(total, gate, expert.w_gate.mT))
    return weight_gradient


def _experts(plan: Plan, tensors: Iterable[Tensor | None]) -> Iterator[tuple[Tensor | None, ...]]:
    """Of all experts' parameters, or their gradients, those of each part."""
    return zip(*map(plan.split_experts, tensors), strict=True)
