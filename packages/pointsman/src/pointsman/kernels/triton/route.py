"""The router as one kernel: product with the experts' weights, gate, top-k and combine weights.

    z = x W' + b,   p = softmax(s z) or sigmoid(s z),   the k largest z (of equal ones the lowest index; NaN counts as
    the largest),   w = p there, renormalised or as they are

Shapes: N tokens, A the width of x, E experts. x is read once, in its own dtype; all else is float32. On a device the
products are three TF32 products each, which keep about 22 bits. Backward is torch's operators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, dot, major_capability, power_of_2, precision
from pointsman.ops.linear import refuse_second_derivatives

TINY = tl.constexpr(1e-20)
"""What keeps a sum of sigmoids away from zero: as in `routers.frame.stages`."""

SOFTMAX, SIGMOID = "softmax", "sigmoid"


@triton.jit
def _gate(z, inside, SIGMOIDS: tl.constexpr):
    """Probabilities of scaled logits [BT, EP]."""
    if SIGMOIDS:
        return 1.0 / (1.0 + tl.exp(-z))
    z = tl.where(inside[None, :], z, float("-inf"))
    most = tl.max(z, 1)
    raised = tl.exp(z - tl.where(most == float("-inf"), 0.0, most)[:, None])
    return raised / tl.sum(raised, 1)[:, None]


@triton.jit
def _key(z, inside):
    """Whole numbers in the order of the logits; no logit's is the least whole number, which padding has."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    key = tl.where(z != z, 2147483647, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(inside[None, :], key, -2147483648)


@triton.jit
def route_kernel(
    x_ptr, w_ptr, bias_ptr, scale_ptr, logits_ptr, probs_ptr, expert_ptr, weight_ptr, N, A, stride_e,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BIAS: tl.constexpr, SIGMOIDS: tl.constexpr,
    RENORMALIZE: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    a = tl.arange(0, BA)
    inside = e < E
    here = t < N
    x_ptrs = x_ptr + t[:, None].to(tl.int64) * A + a[None, :]
    w_ptrs = w_ptr + e[None, :] * stride_e + a[:, None]
    z = tl.zeros((BT, EP), dtype=tl.float32)
    for start in range(0, A, BA):
        x = tl.load(x_ptrs + start, mask=here[:, None] & (a[None, :] + start < A), other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + start, mask=inside[None, :] & (a[:, None] + start < A), other=0.0)
        z = dot(x, w, z, PRECISION)
    if BIAS:
        z += tl.load(bias_ptr + e, mask=inside, other=0.0)[None, :]
    probs = _gate(z * tl.load(scale_ptr), inside, SIGMOIDS)
    at = t[:, None].to(tl.int64) * E + e[None, :]
    mask = here[:, None] & inside[None, :]
    tl.store(logits_ptr + at, z, mask=mask)
    tl.store(probs_ptr + at, probs, mask=mask)
    left = _key(z, inside)
    place = tl.arange(0, KP)
    experts = tl.zeros((BT, KP), dtype=tl.int32)
    weights = tl.zeros((BT, KP), dtype=tl.float32)
    for j in tl.static_range(K):
        first = tl.min(tl.where(left == tl.max(left, 1)[:, None], e[None, :], EP), 1)
        taken = e[None, :] == first[:, None]
        chosen = tl.sum(tl.where(taken, probs, 0.0), 1)
        experts = tl.where(place[None, :] == j, first[:, None], experts)
        weights = tl.where(place[None, :] == j, chosen[:, None], weights)
        left = tl.where(taken, -2147483648, left)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 1), TINY)[:, None]
    out = t[:, None].to(tl.int64) * K + place[None, :]
    mask = here[:, None] & (place[None, :] < K)
    tl.store(expert_ptr + out, experts.to(tl.int64), mask=mask)
    tl.store(weight_ptr + out, weights, mask=mask)


class Tile(NamedTuple):
    """BT tokens of one program, BA of the inner dimension at a time."""

    tokens: int
    inner: int
    warps: int


def tile(padded: int, capability: int) -> Tile:
    """The tile for so many experts (a power of 2); capability 0: the interpreter."""
    if capability == 0:
        return Tile(16, 16, 4)
    if padded <= 64:
        return Tile(64, 32, 4)
    return Tile(16, 64, 8)


@torch.library.custom_op("pointsman::triton_route", mutates_args=())
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, k: int, gate: str, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [N, E], probabilities [N, E], experts [N, k] int64 and weights [N, k], float32.

    Args:
        x: [N, A], float32, bf16 or half.
        weight, bias: [E, A] and [E], float32.
        scale: s, [] or [1], float32.
    """
    with torch.cuda.device_of(x):
        x, weight = x.contiguous(), weight.contiguous()
        (tokens, width), experts = x.shape, len(weight)
        logits, probs = (weight.new_empty(tokens, experts) for _ in range(2))
        expert, weights = logits.new_empty(tokens, k, dtype=torch.int64), logits.new_empty(tokens, k)
        padded = power_of_2(experts, 16)
        rows, inner, warps = tile(padded, major_capability(x.device))
        route_kernel[triton.cdiv(tokens, rows),](
            x, weight, weight if bias is None else bias.contiguous(), scale, logits, probs, expert, weights, tokens,
            width, width, experts, padded, k, power_of_2(k), bias is not None, gate == SIGMOID, renormalize,
            precision(weight), rows, inner, num_warps=warps, **FUSED,
        )  # fmt: skip
        return logits, probs, expert, weights


@forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, k: int, gate: str, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = weight.new_empty(len(x), len(weight))
    chosen = weight.new_empty(len(x), k)
    return logits, torch.empty_like(logits), torch.empty_like(chosen, dtype=torch.int64), chosen


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, scale, _, ctx.gate, ctx.renormalize = inputs
    logits, probs, expert, _ = output
    ctx.save_for_backward(x, weight, scale, logits, probs, expert)
    ctx.mark_non_differentiable(expert)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, d_logits: Tensor | None, d_probs: Tensor | None, _: Tensor | None, d_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """In torch's operators: gradients of x, weight, bias and scale."""
    refuse_second_derivatives("the router's kernel")
    x, weight, scale, logits, probs, expert = ctx.saved_tensors
    through = torch.zeros_like(probs) if d_probs is None else d_probs
    if d_weights is not None:
        if ctx.renormalize:  # w = p / max(sum of p, TINY)
            chosen = probs.gather(1, expert)
            total = chosen.sum(1, keepdim=True)
            floor = total.clamp_min(TINY.value)
            along = (chosen * d_weights).sum(1, keepdim=True) / floor
            d_weights = (d_weights - torch.where(total >= TINY.value, along, 0)) / floor
        through = through.scatter_add(1, expert, d_weights)
    if ctx.gate == SIGMOID:
        d_scaled = through * probs * (1 - probs)
    else:
        d_scaled = probs * (through - (probs * through).sum(1, keepdim=True))
    d_z = d_scaled * scale if d_logits is None else d_scaled * scale + d_logits
    of_x, of_weight, of_bias, of_scale = ctx.needs_input_grad[:4]
    return (
        (d_z @ weight).to(x.dtype) if of_x else None,
        d_z.t() @ x.float() if of_weight else None,
        d_z.sum(0) if of_bias else None,
        (d_scaled * logits).sum().view(scale.shape) if of_scale else None,
        None, None, None,
    )  # fmt: skip


forward.register_autograd(_backward, setup_context=_setup_context)
