"""All experts at once on Triton kernels, forward and backward, as two custom operators.

The mathematics is that of `cpu/sparse.py`. Forward keeps u (and g) alone; backward draws masks and computes hidden
units again. Matrix products are `F.grouped_mm`'s on gathered rows, or our own, which gather on the way; in our own the
passes over hidden units can be parts of the products (`products`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pointsman.kernels.grouped_mm import check_experts, grouped_mm, output_bias_shares, zeros_without_rows
from pointsman.kernels.triton import fused, gemm, units
from pointsman.kernels.triton.rows import combine, gather
from pointsman.kernels.triton.sort import Sorted, sort
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.linear import refuse_second_derivatives

FUSED, GEMM, GROUPED_MM = "fused", "triton", "mixed"
"""The products: ours with the units' work at their ends, ours without, or `F.grouped_mm`'s between our kernels."""


def apply(
    hidden: Tensor,
    weight: Tensor,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
    products: str = GEMM,
) -> Tensor:
    """The experts' combined output [tokens, dim], as `reference.apply_experts`.

    Args:
        hidden: [tokens, dim].
        weight, expert: [tokens, k]; an expert of -1 is none.
        products: `FUSED`, `GEMM` or `GROUPED_MM`; the last wants widths of whole 16 bytes.
    """
    p = parameters
    tokens, experts = len(hidden), len(p.w_in)
    check_experts(expert, experts)
    factors = weight.masked_fill((expert < 0) | (expert >= experts), 0)
    seed = torch.randint(2**62, (1,), device=hidden.device) if dropout else expert.new_zeros(1, dtype=torch.int64)
    output: Tensor = forward(
        hidden, factors, expert, seed, p.w_in, p.w_out, p.b_in, p.w_gate, p.b_gate, activation, dropout, products
    )[0]
    if p.b_out is None:
        return output
    shares = output_bias_shares(factors.view(-1), expert.reshape(-1), expert.shape[1], tokens, experts)
    return torch.addmm(output, shares.to(hidden.dtype), p.b_out)


def _times(left: Tensor, weight: Tensor, where: Sorted, products: str) -> Tensor:
    """Rows [S, A] times weight [E, A, N]."""
    return grouped_mm(left, weight, where.ends) if products == GROUPED_MM else gemm.times(left, weight, where)


@torch.library.custom_op("pointsman::triton_experts", mutates_args=())
def forward(
    hidden: Tensor,
    weight: Tensor,
    expert: Tensor,
    seed: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    activation: str,
    dropout: float,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output without b_out, then what backward needs: u, g (empty if there is none), and the four of `Sorted`."""
    with torch.cuda.device_of(hidden):  # where Triton launches
        hidden, weight, k = hidden.contiguous(), weight.contiguous(), expert.shape[1]
        where = sort(expert.contiguous(), len(w_in))
        setting = units.Setting(activation, dropout, seed, b_in, b_gate)
        if products == FUSED:
            up, gate, each = fused.up(hidden, w_in, w_gate, where, k, setting)
        else:
            ours = products == GEMM
            rows = hidden if ours else gather(hidden, where, k)

            def inward(weights: Tensor, rows: Tensor = rows) -> Tensor:
                turned = weights.transpose(1, 2)
                return gemm.times(rows, turned, where, k) if ours else grouped_mm(rows, turned, where.ends)

            up = inward(w_in)
            gate = None if w_gate is None else inward(w_gate)
            each = units.units(up, gate, where, setting)
        output = combine(
            _times(each, w_out.transpose(1, 2), where, products), where, len(hidden), hidden.shape[1], weight
        )
        return output, up, up.new_empty(0) if gate is None else gate, *where


@forward.register_fake
def _(hidden: Tensor, weight: Tensor, expert: Tensor, seed: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
      w_gate: Tensor | None, b_gate: Tensor | None, activation: str, dropout: float, products: str,
      ) -> tuple[Tensor, ...]:  # fmt: skip
    slots, (experts, width, _) = expert.numel(), w_in.shape
    up = hidden.new_empty(slots, width)
    each = (expert.new_empty(size, dtype=torch.int32) for size in (slots, slots, slots, experts))
    return torch.empty_like(hidden), up, up.new_empty(0) if w_gate is None else up.new_empty(slots, width), *each


@torch.library.custom_op("pointsman::triton_experts_backward", mutates_args=())
def backward(
    gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    up: Tensor,
    gate: Tensor,
    order: Tensor,
    row: Tensor,
    row_expert: Tensor,
    ends: Tensor,
    activation: str,
    dropout: float,
    products: str,
) -> list[Tensor]:
    """Gradients of hidden, weight, w_in, w_out and, where there are such, of b_in, w_gate, b_gate."""
    with torch.cuda.device_of(hidden):
        hidden, weight, gradient = hidden.contiguous(), weight.contiguous(), gradient.contiguous()
        where, k, ours = Sorted(order, row, row_expert, ends), weight.shape[1], products != GROUPED_MM
        gated = gate if w_gate is not None else None
        upper = gradient if ours else gather(gradient, where, k)
        setting = units.Setting(activation, dropout, seed, b_in, b_gate)
        if products == FUSED:
            d_up, d_gate, weighted, d_weight = fused.inner(gradient, w_out, up, gated, weight, where, setting)
        else:
            inner = gemm.times(upper, w_out, where, k) if ours else grouped_mm(upper, w_out, ends)
            d_up, d_gate, weighted, d_weight = units.units_backward(inner, up, gated, weight, where, setting)
            del inner
        d_w_out = _outer(upper, weighted, where, products, left_k=k)
        del upper, weighted
        rows = hidden if ours else gather(hidden, where, k)
        gradients = [d_weight, *_of_weights(d_up, rows, where, products, k, b_in is not None)]
        gradients.insert(2, d_w_out)
        if d_gate is None or w_gate is None:
            through = _times(d_up, w_in, where, products)
        else:
            gradients += _of_weights(d_gate, rows, where, products, k, b_gate is not None)
            if ours:
                through = gemm.times(d_up, w_in, where, second=(d_gate, w_gate))
            else:
                through = grouped_mm(d_up, w_in, ends).add_(grouped_mm(d_gate, w_gate, ends))
        return [combine(through, where, len(hidden), hidden.shape[1]), *gradients]


def _outer(left: Tensor, right: Tensor, where: Sorted, products: str, left_k: int = 0, right_k: int = 0) -> Tensor:
    if products != GROUPED_MM:
        return gemm.outer(left, right, where, left_k, right_k)
    return zeros_without_rows(grouped_mm(left.t(), right, where.ends), where.ends)


def _of_weights(left: Tensor, rows: Tensor, where: Sorted, products: str, k: int, bias: bool) -> list[Tensor]:
    """The gradients of a weight [E, H, D] and of its bias, from those of its products [S, H]."""
    if bias and products == FUSED:
        return list(gemm.outer_and_sums(left, rows, where, k))
    weight = _outer(left, rows, where, products, right_k=k)
    return [weight, units.sums(left, where)] if bias else [weight]


@backward.register_fake
def _(gradient: Tensor, hidden: Tensor, weight: Tensor, seed: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None,
      w_gate: Tensor | None, b_gate: Tensor | None, *rest: Any) -> list[Tensor]:  # fmt: skip
    given = (hidden, weight, w_in, w_out, b_in, w_gate, b_gate)
    return [tensor.new_empty(tensor.shape) for tensor in given if tensor is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, seed, w_in, w_out, b_in, w_gate, b_gate, *ctx.settings = inputs
    ctx.save_for_backward(hidden, weight, seed, w_in, w_out, b_in, w_gate, b_gate, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives()
    if gradient is None:
        return (None,) * 12
    saved = ctx.saved_tensors  # once: activation checkpointing gives them away at the first look
    _, _, _, _, _, b_in, w_gate, b_gate, *_ = saved
    found = iter(backward(gradient, *saved, *ctx.settings))
    d_hidden, d_weight, d_w_in, d_w_out = (next(found) for _ in range(4))
    rest = (next(found) if tensor is not None else None for tensor in (b_in, w_gate, b_gate))
    return d_hidden, d_weight, None, None, d_w_in, d_w_out, *rest, None, None, None


forward.register_autograd(_backward, setup_context=_setup_context)
