"""The router as one kernel: product with the experts' weights, gate, top-k and combine weights.

    z = x W' + b,   p = softmax(s z) or sigmoid(s z),   the k largest z (of equal ones the lowest index; NaN counts as
    the largest),   w = p there, renormalised or as they are

Shapes: N tokens, A the width of x, E experts. x is read once, in its own dtype; all else is float32. On a device the
products are three TF32 products each, which keep about 22 bits. Backward adds the parts of W's gradient in an order
that does not depend on the run.
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


@triton.jit
def route_backward_kernel(
    w_ptr, scale_ptr, logits_ptr, probs_ptr, expert_ptr, d_logits_ptr, d_probs_ptr, d_weight_ptr,
    d_z_ptr, d_x_ptr, d_scale_ptr, N, A, stride_e,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, OF_LOGITS: tl.constexpr, OF_PROBS: tl.constexpr,
    OF_WEIGHTS: tl.constexpr, SIGMOIDS: tl.constexpr, RENORMALIZE: tl.constexpr, WANT_X: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """d_z [N, E], x's gradient d_z W, and a part of the scale's from each program."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    inside = e < E
    here = t < N
    at = t[:, None].to(tl.int64) * E + e[None, :]
    mask = here[:, None] & inside[None, :]
    probs = tl.load(probs_ptr + at, mask=mask, other=0.0)
    d_probs = tl.zeros((BT, EP), dtype=tl.float32)
    if OF_PROBS:
        d_probs += tl.load(d_probs_ptr + at, mask=mask, other=0.0)
    if OF_WEIGHTS:
        total = tl.zeros((BT,), dtype=tl.float32)
        along = tl.zeros((BT,), dtype=tl.float32)
        of_chosen = tl.zeros((BT, EP), dtype=tl.float32)
        chosen = tl.zeros((BT, EP), dtype=tl.float32)
        for j in tl.static_range(K):
            place = t.to(tl.int64) * K + j
            expert = tl.load(expert_ptr + place, mask=here, other=-1)
            d_weight = tl.load(d_weight_ptr + place, mask=here, other=0.0)
            taken = e[None, :] == expert[:, None]
            prob = tl.sum(tl.where(taken, probs, 0.0), 1)
            total += prob
            along += prob * d_weight
            of_chosen += tl.where(taken, d_weight[:, None], 0.0)
            chosen += tl.where(taken, 1.0, 0.0)
        if RENORMALIZE:  # w = p / max(sum of p, TINY)
            floor = tl.maximum(total, TINY)
            through_sum = tl.where(total >= TINY, along / floor, 0.0)
            of_chosen = (of_chosen - through_sum[:, None] * chosen) / floor[:, None]
        d_probs += of_chosen
    if SIGMOIDS:
        d_scaled = d_probs * probs * (1.0 - probs)
    else:
        d_scaled = probs * (d_probs - tl.sum(probs * d_probs, 1)[:, None])
    d_scaled = tl.where(mask, d_scaled, 0.0)
    d_z = d_scaled * tl.load(scale_ptr)
    z = tl.load(logits_ptr + at, mask=mask, other=0.0)
    tl.store(d_scale_ptr + tl.program_id(0), tl.sum(tl.sum(d_scaled * z, 1), 0))
    if OF_LOGITS:
        d_z += tl.load(d_logits_ptr + at, mask=mask, other=0.0)
    tl.store(d_z_ptr + at, d_z, mask=mask)
    if WANT_X:
        a = tl.arange(0, BA)
        for start in range(0, A, BA):
            there = a[None, :] + start < A
            w = tl.load(w_ptr + e[:, None] * stride_e + a[None, :] + start, mask=inside[:, None] & there, other=0.0)
            d_x = dot(d_z, w, tl.zeros((BT, BA), dtype=tl.float32), PRECISION)
            out = d_x_ptr + t[:, None].to(tl.int64) * A + a[None, :] + start
            tl.store(out, d_x.to(d_x_ptr.dtype.element_ty), mask=here[:, None] & there)


@triton.jit
def weight_kernel(
    d_z_ptr, x_ptr, out_ptr, N, A, SPLITS,
    E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, BT: tl.constexpr, BA: tl.constexpr,
):  # fmt: skip
    """out [SPLITS, E, A]: d_z' x, each part over a run of tokens."""
    split = tl.program_id(1)
    a = tl.program_id(0) * BA + tl.arange(0, BA)
    e = tl.arange(0, EP)
    share = tl.cdiv(tl.cdiv(N, BT), SPLITS) * BT
    end = tl.minimum(N, (split + 1) * share)
    acc = tl.zeros((EP, BA), dtype=tl.float32)
    for first in range(split * share, end, BT):
        t = first + tl.arange(0, BT)
        d_z = tl.load(
            d_z_ptr + t[None, :].to(tl.int64) * E + e[:, None], mask=(t[None, :] < end) & (e[:, None] < E), other=0.0
        )
        x = tl.load(
            x_ptr + t[:, None].to(tl.int64) * A + a[None, :], mask=(t[:, None] < end) & (a[None, :] < A), other=0.0
        )
        acc = dot(d_z, x.to(tl.float32), acc, PRECISION)
    out = out_ptr + (split * E + e[:, None]).to(tl.int64) * A + a[None, :]
    tl.store(out, acc, mask=(e[:, None] < E) & (a[None, :] < A))


class Tile(NamedTuple):
    """BT tokens of one program, BA of the inner dimension at a time."""

    tokens: int
    inner: int
    warps: int


def tile(padded: int, capability: int, backward: bool = False) -> Tile:
    """The tile for so many experts (a power of 2); capability 0: the interpreter."""
    if capability == 0:
        return Tile(16, 16, 4)
    if padded <= 64:
        return Tile(32 if backward else 64, 32, 4)
    return Tile(16, 32 if backward else 64, 8)


def _constants(x: Tensor, weight: Tensor, backward: bool = False) -> tuple[Tile, int]:
    padded = power_of_2(len(weight), 16)
    return tile(padded, major_capability(x.device), backward), padded


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
        (rows, inner, warps), padded = _constants(x, weight)
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


@torch.library.custom_op("pointsman::triton_route_backward", mutates_args=())
def backward(
    d_logits: Tensor | None, d_probs: Tensor | None, d_weights: Tensor | None, x: Tensor, weight: Tensor,
    scale: Tensor, logits: Tensor, probs: Tensor, expert: Tensor, gate: str, renormalize: bool, want: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of the logits' product z and of the scale; then, as far as wanted, those of x and of weight."""
    with torch.cuda.device_of(x):
        x, weight = x.contiguous(), weight.contiguous()
        (tokens, width), experts, k = x.shape, len(weight), expert.shape[1]
        given = [None if one is None else one.contiguous() for one in (d_logits, d_probs, d_weights)]
        d_z, d_x = torch.empty_like(logits), torch.empty_like(x) if want[0] else x
        (rows, inner, warps), padded = _constants(x, weight, backward=True)
        programs = triton.cdiv(tokens, rows)
        d_scale = logits.new_empty(programs)
        exact = precision(weight)
        route_backward_kernel[programs,](
            weight, scale, logits, probs, expert, *(logits if one is None else one for one in given), d_z, d_x,
            d_scale, tokens, width, width, experts, padded, k, *(one is not None for one in given), gate == SIGMOID,
            renormalize, want[0], exact, rows, inner, num_warps=warps, **FUSED,
        )  # fmt: skip
        found = [d_z, d_scale.sum(0).view(scale.shape)]
        if want[0]:
            found.append(d_x)
        if want[1]:
            wide = min(64, power_of_2(width, 16))
            splits = max(1, min(64, tokens // 512))
            parts = weight.new_empty(splits, experts, width)
            grid = triton.cdiv(width, wide), splits
            weight_kernel[grid](
                d_z, x, parts, tokens, width, splits, experts, padded, exact, rows, wide, num_warps=warps,
                **FUSED,
            )  # fmt: skip
            found.append(parts.sum(0))
        return found


@backward.register_fake
def _(
    d_logits: Tensor | None, d_probs: Tensor | None, d_weights: Tensor | None, x: Tensor, weight: Tensor,
    scale: Tensor, logits: Tensor, probs: Tensor, expert: Tensor, gate: str, renormalize: bool, want: list[bool],
) -> list[Tensor]:  # fmt: skip
    others = [torch.empty_like(one) for one, wanted in zip((x, weight), want, strict=True) if wanted]
    return [torch.empty_like(logits), torch.empty_like(scale), *others]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, scale, _, ctx.gate, ctx.renormalize = inputs
    logits, probs, expert, _ = output
    ctx.bias = bias is not None
    ctx.save_for_backward(x, weight, scale, logits, probs, expert)
    ctx.mark_non_differentiable(expert)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, d_logits: Tensor | None, d_probs: Tensor | None, _: Tensor | None, d_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives("the router's kernel")
    want = list(ctx.needs_input_grad[:2])
    d_z, d_scale, *rest = backward(d_logits, d_probs, d_weights, *ctx.saved_tensors, ctx.gate, ctx.renormalize, want)
    found = iter(rest)
    d_x, d_weight = (next(found) if one else None for one in want)
    d_bias = d_z.sum(0) if ctx.bias and ctx.needs_input_grad[2] else None
    return d_x, d_weight, d_bias, d_scale if ctx.needs_input_grad[3] else None, None, None, None


forward.register_autograd(_backward, setup_context=_setup_context)
