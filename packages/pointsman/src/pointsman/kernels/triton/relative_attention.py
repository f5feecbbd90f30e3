"""Attention with relative positions as flash kernels: no probabilities in memory.

    s_ij = q_i . k_j + P[i, T - 1 - i + j],   j <= i + S - T,   o_i = sum_j softmax_j(s_ij) v_j

q is scale (query + u). P [N, T, W] are the position products by falling distance, made by one product with aligned
rows, so that row i starts T - 1 - i columns later than the keys. Backward writes the scores' gradient into the same
places of a tensor of zeros: each element once, nothing is added atomically.

Shapes: N = heads * sequences, head by head; T queries, S keys, D head width, W >= S distances. A padded key has the
score -1e30, so that a row of padded keys alone gives the mean of its values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, dot, major_capability, power_of_2, precision

MASKED = tl.constexpr(-1e30)
WIDEST = 128
"""Of a head."""


@triton.jit
def _scores(
    q, k, products_ptr, real_ptr, pair, i, j, T, S, W, B, MASK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """[BM, BN] float32: -inf where a key is later than the query; and which keys of which rows there are."""
    seen = (j[None, :] <= i[:, None] + (S - T)) & (j[None, :] < S)
    here = seen & (i[:, None] < T)
    products_ptr += pair.to(tl.int64) * T * W
    at = i[:, None] * (W - 1) + (T - 1) + j[None, :]  # i W + (T - 1 - i) + j
    scores = dot(q, k, tl.load(products_ptr + at, mask=here, other=0.0).to(tl.float32), PRECISION)
    if MASK:
        real = tl.load(real_ptr + (pair % B).to(tl.int64) * S + j, mask=j < S, other=1) != 0
        scores = tl.where(real[None, :], scores, MASKED)
    return tl.where(seen, scores, float("-inf")), here


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, products_ptr, real_ptr, out_ptr, most_ptr, total_ptr, B, T, S, W, D, stride_h, stride_b,
    stride_t, MASK: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """out; and of each row the largest score and the sum of exp(score - largest)."""
    pair = tl.program_id(1)
    first = tl.program_id(0) * BM
    i = first + tl.arange(0, BM)
    d = tl.arange(0, DP)
    row_mask = (i[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + (pair.to(tl.int64) * T + i[:, None]) * D + d[None, :], mask=row_mask, other=0.0)
    most = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, DP), dtype=tl.float32)
    for start in range(0, tl.minimum(S, S - T + first + BM), BN):
        j = start + tl.arange(0, BN)
        at = (pair.to(tl.int64) * S + j) * D
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=(j[None, :] < S) & (d[:, None] < D), other=0.0)
        scores, _ = _scores(q, k, products_ptr, real_ptr, pair, i, j, T, S, W, B, MASK, PRECISION)
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        shrink = tl.exp(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=(j[:, None] < S) & (d[None, :] < D), other=0.0)
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        most = larger
    out = out_ptr + (pair // B).to(tl.int64) * stride_h + (pair % B).to(tl.int64) * stride_b
    out += i[:, None].to(tl.int64) * stride_t + d[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=row_mask)
    tl.store(most_ptr + pair.to(tl.int64) * T + i, most, mask=i < T)
    tl.store(total_ptr + pair.to(tl.int64) * T + i, total, mask=i < T)


@triton.jit
def backward_kernel(
    q_ptr, k_ptr, v_ptr, products_ptr, real_ptr, upper_ptr, delta_ptr, most_ptr, total_ptr, d_k_ptr, d_v_ptr,
    d_products_ptr, B, T, S, W, D,
    MASK: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and of their values, and the scores' in the places of P; `upper` is that of out
    [N, T, D], `delta` its products with out."""
    pair = tl.program_id(1)
    start = tl.program_id(0) * BN
    j = start + tl.arange(0, BN)
    d = tl.arange(0, DP)
    at = (pair.to(tl.int64) * S + j) * D
    key_mask = (j[:, None] < S) & (d[None, :] < D)
    k = tl.load(k_ptr + at[:, None] + d[None, :], mask=key_mask, other=0.0)
    v = tl.load(v_ptr + at[:, None] + d[None, :], mask=key_mask, other=0.0)
    d_k = tl.zeros((BN, DP), dtype=tl.float32)
    d_v = tl.zeros((BN, DP), dtype=tl.float32)
    for first in range(tl.maximum(0, start - (S - T)) // BM * BM, T, BM):
        i = first + tl.arange(0, BM)
        place = pair.to(tl.int64) * T + i
        row_mask = (i[:, None] < T) & (d[None, :] < D)
        q = tl.load(q_ptr + place[:, None] * D + d[None, :], mask=row_mask, other=0.0)
        upper = tl.load(upper_ptr + place[:, None] * D + d[None, :], mask=row_mask, other=0.0)
        scores, here = _scores(q, tl.trans(k), products_ptr, real_ptr, pair, i, j, T, S, W, B, MASK, PRECISION)
        most = tl.load(most_ptr + place, mask=i < T, other=0.0)
        total = tl.load(total_ptr + place, mask=i < T, other=1.0)
        weights = tl.where(here, tl.exp(scores - most[:, None]) / total[:, None], 0.0)
        d_v = dot(tl.trans(weights.to(upper.dtype)), upper, d_v, PRECISION)
        through = dot(upper, tl.trans(v), tl.zeros((BM, BN), dtype=tl.float32), PRECISION)
        d_scores = weights * (through - tl.load(delta_ptr + place, mask=i < T, other=0.0)[:, None])
        if MASK:
            real = tl.load(real_ptr + (pair % B).to(tl.int64) * S + j, mask=j < S, other=1) != 0
            d_scores = tl.where(real[None, :], d_scores, 0.0)
        d_scores = d_scores.to(q.dtype)
        d_k = dot(tl.trans(d_scores), q, d_k, PRECISION)
        skewed = i[:, None] * (W - 1) + (T - 1) + j[None, :]
        tl.store(d_products_ptr + pair.to(tl.int64) * T * W + skewed, d_scores, mask=here)
    tl.store(d_k_ptr + at[:, None] + d[None, :], d_k.to(d_k_ptr.dtype.element_ty), mask=key_mask)
    tl.store(d_v_ptr + at[:, None] + d[None, :], d_v.to(d_v_ptr.dtype.element_ty), mask=key_mask)


@triton.jit
def query_kernel(
    d_products_ptr, k_ptr, d_q_ptr, T, S, W, D,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """d_q [N, T, D]: the gradient of the content queries, from that of the scores."""
    pair = tl.program_id(1)
    first = tl.program_id(0) * BM
    i = first + tl.arange(0, BM)
    d = tl.arange(0, DP)
    place = pair.to(tl.int64) * T + i
    acc = tl.zeros((BM, DP), dtype=tl.float32)
    for start in range(0, tl.minimum(S, S - T + first + BM), BN):
        j = start + tl.arange(0, BN)
        here = (j[None, :] <= i[:, None] + (S - T)) & (j[None, :] < S) & (i[:, None] < T)
        skewed = i[:, None] * (W - 1) + (T - 1) + j[None, :]
        d_scores = tl.load(d_products_ptr + pair.to(tl.int64) * T * W + skewed, mask=here, other=0.0)
        at = (pair.to(tl.int64) * S + j) * D
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=(j[:, None] < S) & (d[None, :] < D), other=0.0)
        acc = dot(d_scores, k, acc, PRECISION)
    out = d_q_ptr + place[:, None] * D + d[None, :]
    tl.store(out, acc.to(d_q_ptr.dtype.element_ty), mask=(i[:, None] < T) & (d[None, :] < D))


class Tile(NamedTuple):
    """Blocks of queries and keys."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile(width: int, capability: int, backward: bool = False) -> Tile:
    """For heads of this width (a power of 2); capability 0: the interpreter."""
    if capability == 0:
        return Tile(16, 16, 4, 1)
    if backward and width > 64:
        return Tile(32, 32, 8, 2)
    return Tile(64, 64, 8, 2) if backward or capability < 9 else Tile(128, 64, 8, 3)


def _sizes(q: Tensor, backward: bool = False) -> tuple[Tile, int]:
    padded = power_of_2(q.shape[2], 16)
    if q.is_cuda and q.dtype == torch.float32:  # twice the bytes, three products
        return Tile(32, 32, 8, 2), padded
    return tile(padded, major_capability(q.device), backward), padded


@torch.library.custom_op("pointsman::triton_attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor, real: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, T, H, D], the largest score [N, T] and the sum of exp(score - largest) [N, T].

    Args:
        q: [N, T, D]; k, v: [N, S, D]; products: [N, T, W]; all contiguous.
        real: [B, S], False for padding.
    """
    with torch.cuda.device_of(q):
        pairs, length, width = q.shape
        batch, keys = pairs // heads, k.shape[1]
        out = q.new_empty(batch, length, heads, width)
        most, total = (q.new_empty(pairs, length, dtype=torch.float32) for _ in range(2))
        (rows, columns, warps, stages), padded = _sizes(q)
        forward_kernel[triton.cdiv(length, rows), pairs](
            q, k, v, products, _mask(real, q), out, most, total, batch, length, keys, products.shape[2], width,
            width, length * heads * width, heads * width, real is not None, _precision(q), rows, columns, padded,
            num_warps=warps, num_stages=stages, **FUSED,
        )  # fmt: skip
        return out, most, total


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, products: Tensor, real: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    pairs, length, width = q.shape
    most = q.new_empty(pairs, length, dtype=torch.float32)
    return q.new_empty(pairs // heads, length, heads, width), most, torch.empty_like(most)


@torch.library.custom_op("pointsman::triton_attention_backward", mutates_args=())
def backward(
    upper: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, products: Tensor, real: Tensor | None,
    most: Tensor, total: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and products; `upper` [N, T, D] is that of out, `delta` [N, T] float32 its products with
    out."""
    with torch.cuda.device_of(q):
        pairs, length, width = q.shape
        batch = pairs if real is None else len(real)
        keys, distances = k.shape[1], products.shape[2]
        d_q, d_k, d_v = (torch.empty_like(tensor) for tensor in (q, k, v))
        d_products = torch.zeros_like(products)
        (rows, columns, warps, stages), padded = _sizes(q, backward=True)
        options = {"num_warps": warps, "num_stages": stages, **FUSED}
        backward_kernel[triton.cdiv(keys, columns), pairs](
            q, k, v, products, _mask(real, q), upper, delta, most, total, d_k, d_v, d_products, batch, length, keys,
            distances, width, real is not None, _precision(q), rows, columns, padded, **options,
        )  # fmt: skip
        query_kernel[triton.cdiv(length, rows), pairs](
            d_products, k, d_q, length, keys, distances, width, _precision(q), rows, columns, padded, **options
        )
        return [d_q, d_k, d_v, d_products]


@backward.register_fake
def _(
    upper: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, products: Tensor, real: Tensor | None,
    most: Tensor, total: Tensor,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(tensor) for tensor in (q, k, v, products)]


def _mask(real: Tensor | None, other: Tensor) -> Tensor:
    return other if real is None else real.to(torch.int8)


def _precision(tensor: Tensor) -> str:
    return precision(tensor) if tensor.dtype == torch.float32 else "ieee"
