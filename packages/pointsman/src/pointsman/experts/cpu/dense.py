"""k = E: every token visits every expert, so nothing is permuted.

y = sum_e w_e (W_out,e h_e) + w b_out. In backward the sum over experts happens inside the matrix products. Rows are
processed in chunks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pointsman.experts.cpu.hidden_units import Gradients, HiddenUnits, Saved, divisible, one
from pointsman.ops import dots
from pointsman.ops.feed_forward import ExpertParameters


def _chunks(tokens: int, hidden_dim: int, dtype: torch.dtype) -> list[slice]:
    # powers of two: few shapes, for each of which oneDNN builds a kernel
    size = (2048 if hidden_dim <= 2048 else 1024) * 4 // dtype.itemsize
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def saved_rows(tokens: int, parameters: ExpertParameters) -> list[int]:
    """How many rows each item of what `forward` saves has, in its order."""
    num_experts, hidden_dim, _ = parameters.w_in.shape
    chunks = _chunks(tokens, hidden_dim, parameters.w_in.dtype)
    return [rows.stop - rows.start for rows in chunks for _ in range(num_experts)]


def forward(
    hidden: Tensor, weight: Tensor, parameters: ExpertParameters, first: HiddenUnits, save: bool
) -> tuple[Tensor, list[Saved]]:
    """The combined output [tokens, dim], and what each chunk and expert saves for `backward`.

    Args:
        hidden: [tokens, dim].
        weight: [tokens, E], the combine weights in the order of the experts, in the dtype of `hidden`.
        first: the experts' first half.
        save: whether backward will follow.
    """
    output = torch.empty_like(hidden)
    saved: list[Saved] = []
    each = [one(parameters, index) for index in range(weight.shape[1])]
    for rows in _chunks(hidden.shape[0], parameters.w_in.shape[1], hidden.dtype):
        inputs, total = hidden[rows], output[rows]
        for index, (expert, factor) in enumerate(zip(each, weight[rows, :, None].unbind(1), strict=True)):
            units, item = first.forward(inputs, expert)
            if save:
                saved.append(item)
            results = first.gemm.linear(units, expert.w_out)
            if index:
                total.addcmul_(results, factor)
            else:
                torch.mul(results, factor, out=total)
    if parameters.b_out is not None:
        output.addmm_(weight, parameters.b_out)
    return output, saved


def backward(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    parameters: ExpertParameters,
    first: HiddenUnits,
    saved: Sequence[Saved],
    gradients: Gradients,
    hidden_wanted: bool,
    weight_wanted: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `hidden` and `weight`; those of the parameters are written into `gradients`."""
    gemm = first.gemm
    hidden_gradient = torch.empty_like(hidden) if hidden_wanted else None
    factors = weight.t().contiguous()
    factor_gradients = torch.empty_like(factors) if weight_wanted else None
    each = [(one(parameters, index), gradients.one(index)) for index in range(weight.shape[1])]
    for tensor in (gradients.w_out, gradients.b_in, gradients.b_gate):
        if tensor is not None:
            tensor.zero_()
    inward, gate_inward = _transposed(gradients.w_in), _transposed(gradients.w_gate)
    scales, rest = divisible(factors)
    remaining = iter(saved)
    for rows in _chunks(hidden.shape[0], parameters.w_in.shape[1], hidden.dtype):
        outer, total = gradient[rows], None
        # transposed once for all experts: the first operand of the weight gradients
        inputs_columns, outer_columns = hidden[rows].t().contiguous().t(), outer.t().contiguous().t()
        columns = (part[:, rows, None].unbind(0) for part in (factors, scales))
        for index, ((expert, result), factor, scale) in enumerate(zip(each, *columns, strict=True)):
            item = next(remaining)
            recomputed = first.recomputed(item)
            inner = gemm.product(outer * scale, expert.w_out)
            if factor_gradients is not None:
                factor_gradients[index, rows] = dots.each(recomputed.units, inner)
            up, gate = first.backward(inner, item, recomputed)
            if rest is not None:
                up.mul_(rest[index, rows, None])
                gate = None if gate is None else gate.mul_(rest[index, rows, None])
            if result.w_out is not None:
                gemm.weight_gradient(result.w_out, outer_columns * factor, recomputed.units, add=True)
            if inward is not None:
                gemm.weight_gradient(inward[index], inputs_columns, up, add=True)
            if result.b_in is not None:
                result.b_in.add_(up.sum(0))
            if gate is not None:
                if gate_inward is not None:
                    gemm.weight_gradient(gate_inward[index], inputs_columns, gate, add=True)
                if result.b_gate is not None:
                    result.b_gate.add_(gate.sum(0))
            if hidden_gradient is not None:
                total = gemm.product(up, expert.w_in) if total is None else gemm.accumulate(total, up, expert.w_in.t())
                if gate is not None and expert.w_gate is not None:
                    total = gemm.accumulate(total, gate, expert.w_gate.t())
        if hidden_gradient is not None and total is not None:
            hidden_gradient[rows] = total
    weight_gradient = None if factor_gradients is None else factor_gradients.div_(scales).t()
    for whole, collected in ((gradients.w_in, inward), (gradients.w_gate, gate_inward)):
        if whole is not None and collected is not None:
            for one_whole, one_collected in zip(whole, collected, strict=True):
                one_whole.copy_(one_collected.t())
    if parameters.b_out is not None and weight_gradient is not None:
        weight_gradient.addmm_(gradient, parameters.b_out.t())
    if gradients.b_out is not None:
        torch.mm(weight.t(), gradient, out=gradients.b_out)
    return hidden_gradient, weight_gradient


def _transposed(gradient: Tensor | None) -> Tensor | None:
    """Zeros [E, dim, hidden], to which each chunk adds its share of a weight gradient [E, hidden, dim]."""
    return None if gradient is None else gradient.new_zeros(gradient.transpose(1, 2).shape)
