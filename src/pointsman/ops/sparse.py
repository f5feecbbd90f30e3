"""Experts on a CPU, each over the tokens that chose it: gather, two matrix products, combine; and the way back.

With slots s = (token t, expert e, weight w), rows x_s = x_t and hidden units h_s:

    y_t = sum_s w_s (W_out h_s + b_out)
    dw_s = h_s . (W_out' dy_t) + b_out . dy_t        so the experts' outputs are not kept
    dW_out = sum_s (w_s dy_t) h_s',   dW_in = sum_s du_s (w_s x_s)',   dx_t = sum_s w_s W_in' du_s

with du_s the gradient of the pre-activation for w_s = 1: the weight only ever multiplies tensors that are dim wide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pointsman.ops.dispatch import Plan
from pointsman.ops.feedforward import Gradients, HiddenUnits, Kept, one, one_gradient
from pointsman.ops.reference import ExpertParameters


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
    for index, part in enumerate(plan.parts):
        if not part.size:
            continue
        expert = one(parameters, index)
        units, keeping = first.forward(plan.gather(hidden, part), expert)
        first.gemm.linear_into(rows[part.rows], units, expert.w_out, expert.b_out)
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
    gemm = first.gemm
    factor = weight.index_select(0, plan.order)
    hidden_rows = hidden.new_empty(plan.total, hidden.shape[1]) if hidden_wanted else None
    weight_gradient = weight.new_empty(plan.total) if weight_wanted else None
    saved = iter(kept)
    for index, part in enumerate(plan.parts):
        result = one_gradient(gradients, index)
        if not part.size:
            for tensor in result:
                if tensor is not None:
                    tensor.zero_()
            continue
        expert = one(parameters, index)
        keeping = next(saved)
        again = first.again(keeping)
        outer = plan.gather(gradient, part)
        inner = gemm.product(outer, expert.w_out)
        if weight_gradient is not None:
            torch.sum(again.units * inner, -1, out=weight_gradient[part.rows])
            if expert.b_out is not None:
                weight_gradient[part.rows] += torch.mv(outer, expert.b_out)
        up, gate = first.backward(inner, keeping, again)
        if result.w_out is not None or result.b_out is not None:
            outer = plan.gather(gradient, part, factor)
        if result.w_out is not None:
            gemm.weight_gradient(result.w_out, outer, again.units)
        if result.b_out is not None:
            torch.sum(outer, 0, out=result.b_out)
        if result.w_in is not None or result.w_gate is not None:
            inputs = plan.gather(hidden, part, factor)
            if result.w_in is not None:
                gemm.weight_gradient(result.w_in, up, inputs)
            if result.w_gate is not None:
                assert gate is not None
                gemm.weight_gradient(result.w_gate, gate, inputs)
        if result.b_in is not None:
            torch.mv(up[: part.size].t(), factor[part.slots], out=result.b_in)
        if result.b_gate is not None:
            assert gate is not None
            torch.mv(gate[: part.size].t(), factor[part.slots], out=result.b_gate)
        if hidden_rows is not None:
            if gate is None:
                gemm.product_into(hidden_rows[part.rows], up, expert.w_in)
            else:
                assert expert.w_gate is not None
                total = gemm.product(up, expert.w_in)
                hidden_rows[part.rows] = gemm.accumulate(total, gate, expert.w_gate.t())
    return (
        None if hidden_rows is None else plan.combine(hidden_rows, weight),
        None if weight_gradient is None else weight_gradient.index_select(0, plan.position),
    )
