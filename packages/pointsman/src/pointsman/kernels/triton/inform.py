"""Tokens inform each other (`routers/mutual/streaming.py`) as flash kernels: no scores in memory.

    s_ij = q_i . k_j + bias_j + P[i, T - 1 - i + j],   lse_i = log sum_j exp s_ij,   out_i = sum_j exp(s_ij - lse_i) v_j

over the keys j that inform i: those not later (if causal), not padding, and not less sure than i's own token; a token
always informs itself. P are position products by falling distance, as in `relative_attention.py`. All is float32, on a
device through three TF32 products each.

Shapes: N sequences, T queries, S keys (the last T are the queries' own tokens), D score width, E values' width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, dot, major_capability, power_of_2, precision


@triton.jit
def _inner(
    x_ptr, y_ptr, i, j, T, S, width, acc, PADDED: tl.constexpr, BW: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """acc + the products of rows i of x [T, width] with rows j of y [S, width], BW columns at a time."""
    for first in range(0, PADDED, BW):
        w = first + tl.arange(0, BW)
        x = tl.load(x_ptr + i[:, None] * width + w[None, :], mask=(i[:, None] < T) & (w[None, :] < width), other=0.0)
        y = tl.load(y_ptr + j[None, :] * width + w[:, None], mask=(j[None, :] < S) & (w[:, None] < width), other=0.0)
        acc = dot(x, y, acc, PRECISION)
    return acc


@triton.jit
def _scores(
    q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr, ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32, -inf where a key does not inform a query; and where one informs one that there is."""
    own = i + (S - T)
    visible = tl.broadcast_to(j[None, :] < S, (BM, BN))
    if CAUSAL:
        visible = visible & (j[None, :] <= own[:, None])
    scores = tl.zeros((BM, BN), dtype=tl.float32)
    if POSITIONS:
        at = i[:, None] * (W - 1) + (T - 1) + j[None, :]  # i W + (T - 1 - i) + j
        scores = tl.load(products_ptr + n.to(tl.int64) * T * W + at, mask=visible & (i[:, None] < T), other=0.0)
    scores = _inner(
        q_ptr + n.to(tl.int64) * T * D, k_ptr + n.to(tl.int64) * S * D, i, j, T, S, D, scores, DP, BD, PRECISION
    )
    keys = n.to(tl.int64) * S
    if BIAS:
        scores += tl.load(bias_ptr + keys + j, mask=j < S, other=0.0)[None, :]
    if REAL:
        real = tl.load(real_ptr + keys + j, mask=j < S, other=0) != 0
        own_real = tl.load(real_ptr + keys + own, mask=i < T, other=0) != 0
        visible = visible & real[None, :] & own_real[:, None]
    if ENTROPY:
        entropy = tl.load(entropy_ptr + keys + j, mask=j < S, other=0.0)
        own_entropy = tl.load(entropy_ptr + keys + own, mask=i < T, other=0.0)
        visible = visible & (entropy[None, :] <= own_entropy[:, None] + tolerance)
    visible = visible | (j[None, :] == own[:, None])
    return tl.where(visible, scores, float("-inf")), visible & (i[:, None] < T)


@triton.jit
def inform_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, out_ptr, lse_ptr, T, S, W, D, E, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr, ENTROPY: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    first = tl.program_id(0) * BM
    i = first + tl.arange(0, BM)
    e = tl.arange(0, EP)
    place = n.to(tl.int64) * T + i
    most = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, EP), dtype=tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, S - T + first + BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        scores, _ = _scores(
            q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, tolerance, BIAS,
            POSITIONS, CAUSAL, REAL, ENTROPY, PRECISION, BM, BN, DP, BD,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # no key so far
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(most - shift)
        total = total * shrink + tl.sum(weights, 1)
        if VALUES:
            at = n.to(tl.int64) * S + j
            v = tl.load(v_ptr + at[:, None] * E + e[None, :], mask=(j[:, None] < S) & (e[None, :] < E), other=0.0)
            acc = dot(weights, v, acc * shrink[:, None], PRECISION)
        most = larger
    total = tl.where(i < T, total, 1.0)  # beyond the last query there may be no key
    tl.store(lse_ptr + place, most + tl.log(total), mask=i < T)
    if VALUES:
        out = acc / total[:, None]
        tl.store(out_ptr + place[:, None] * E + e[None, :], out, mask=(i[:, None] < T) & (e[None, :] < E))


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, upper_ptr, delta_ptr, lse_ptr, d_k_ptr,
    d_v_ptr, d_bias_ptr, d_products_ptr, T, S, W, D, E, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr, ENTROPY: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys, of their values and biases, and of P. `delta` [N, T]: upper . out, less the
    gradient of lse."""
    n = tl.program_id(1)
    start = tl.program_id(0) * BN
    j = start + tl.arange(0, BN)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    at = n.to(tl.int64) * S + j
    d_k = tl.zeros((BN, DP), dtype=tl.float32)
    d_v = tl.zeros((BN, EP), dtype=tl.float32)
    d_bias = tl.zeros((BN,), dtype=tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, start - (S - T)) // BM * BM
    for first in range(begin, T, BM):
        i = first + tl.arange(0, BM)
        place = n.to(tl.int64) * T + i
        scores, here = _scores(
            q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, tolerance, BIAS,
            POSITIONS, CAUSAL, REAL, ENTROPY, PRECISION, BM, BN, DP, BD,
        )  # fmt: skip
        lse = tl.load(lse_ptr + place, mask=i < T, other=0.0)
        weights = tl.where(here, tl.exp(scores - lse[:, None]), 0.0)
        delta = tl.load(delta_ptr + place, mask=i < T, other=0.0)
        through = tl.zeros((BM, BN), dtype=tl.float32)
        if VALUES:
            through = _inner(
                upper_ptr + n.to(tl.int64) * T * E, v_ptr + n.to(tl.int64) * S * E, i, j, T, S, E, through, EP, BE,
                PRECISION,
            )  # fmt: skip
            mask = (i[:, None] < T) & (e[None, :] < E)
            upper = tl.load(upper_ptr + place[:, None] * E + e[None, :], mask=mask, other=0.0)
            d_v = dot(tl.trans(weights), upper, d_v, PRECISION)
        d_scores = weights * (through - delta[:, None])
        q = tl.load(q_ptr + place[:, None] * D + d[None, :], mask=(i[:, None] < T) & (d[None, :] < D), other=0.0)
        d_k = dot(tl.trans(d_scores), q, d_k, PRECISION)
        d_bias += tl.sum(d_scores, 0)
        if POSITIONS:
            skewed = i[:, None] * (W - 1) + (T - 1) + j[None, :]
            tl.store(d_products_ptr + n.to(tl.int64) * T * W + skewed, d_scores, mask=here)
    tl.store(d_k_ptr + at[:, None] * D + d[None, :], d_k, mask=(j[:, None] < S) & (d[None, :] < D))
    if BIAS:
        tl.store(d_bias_ptr + at, d_bias, mask=j < S)
    if VALUES:
        tl.store(d_v_ptr + at[:, None] * E + e[None, :], d_v, mask=(j[:, None] < S) & (e[None, :] < E))


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, upper_ptr, delta_ptr, lse_ptr, d_q_ptr, T, S,
    W, D, E, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, REAL: tl.constexpr, ENTROPY: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """d_q [N, T, D]."""
    n = tl.program_id(1)
    first = tl.program_id(0) * BM
    i = first + tl.arange(0, BM)
    d = tl.arange(0, DP)
    place = n.to(tl.int64) * T + i
    lse = tl.load(lse_ptr + place, mask=i < T, other=0.0)
    delta = tl.load(delta_ptr + place, mask=i < T, other=0.0)
    d_q = tl.zeros((BM, DP), dtype=tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, S - T + first + BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        scores, here = _scores(
            q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, tolerance, BIAS,
            POSITIONS, CAUSAL, REAL, ENTROPY, PRECISION, BM, BN, DP, BD,
        )  # fmt: skip
        through = tl.zeros((BM, BN), dtype=tl.float32)
        if VALUES:
            through = _inner(
                upper_ptr + n.to(tl.int64) * T * E, v_ptr + n.to(tl.int64) * S * E, i, j, T, S, E, through, EP, BE,
                PRECISION,
            )  # fmt: skip
        d_scores = tl.where(here, tl.exp(scores - lse[:, None]), 0.0) * (through - delta[:, None])
        at = n.to(tl.int64) * S + j
        k = tl.load(k_ptr + at[:, None] * D + d[None, :], mask=(j[:, None] < S) & (d[None, :] < D), other=0.0)
        d_q = dot(d_scores, k, d_q, PRECISION)
    tl.store(d_q_ptr + place[:, None] * D + d[None, :], d_q, mask=(i[:, None] < T) & (d[None, :] < D))


class Given(NamedTuple):
    """What scores are made of, contiguous float32: q [N, T, D], k [N, S, D], v [N, S, E] or None, bias [N, S] or None,
    products P [N, T, W] or None, real [N, S] bool or None, entropy [N, S] or None."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    bias: Tensor | None
    products: Tensor | None
    real: Tensor | None
    entropy: Tensor | None


class Tile(NamedTuple):
    """Blocks of queries and keys; `inner` columns of both at a time."""

    queries: int
    keys: int
    inner: int
    warps: int


def tile(width: int, values: int, capability: int) -> Tile:
    """For scores and values of these widths (powers of 2); capability 0: the interpreter."""
    if capability == 0:
        return Tile(16, 16, 16, 4)
    return Tile(32, 32, 32, 8) if width + values <= 256 else Tile(16, 16, 32, 8)


def _launch(given: Given, causal: bool, tolerance: float) -> tuple[list[Tensor], list[object], Tile]:
    """The pointers, the rest of the arguments, and the tile."""
    q, k, v, bias, products, real, entropy = given
    real = None if real is None else real.to(torch.int8)
    pointers = [k if one is None else one for one in (q, k, v, bias, products, real, entropy)]
    wide, values = q.shape[2], 1 if v is None else v.shape[2]
    distances = 0 if products is None else products.shape[2]
    padded = power_of_2(wide, 16)
    narrow = power_of_2(values, 16)
    chosen = tile(padded, narrow, major_capability(q.device))
    flags = [one is not None for one in (bias, products)], [one is not None for one in (real, entropy)]
    sizes = [q.shape[1], k.shape[1], distances, wide, values, tolerance, *flags[0], causal, *flags[1], v is not None]
    rest = [*sizes, precision(q), chosen.queries, chosen.keys, padded, narrow, chosen.inner, min(chosen.inner, narrow)]
    return pointers, rest, chosen


@torch.library.custom_op("pointsman::triton_inform", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, products: Tensor | None, real: Tensor | None,
    entropy: Tensor | None, causal: bool, tolerance: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    count, length, _ = q.shape
    with torch.cuda.device_of(q):
        pointers, rest, chosen = _launch(Given(q, k, v, bias, products, real, entropy), causal, tolerance)
        out = q.new_empty(count, length, 0 if v is None else v.shape[2])
        lse = q.new_empty(count, length)
        grid = triton.cdiv(length, chosen.queries), count
        inform_kernel[grid](*pointers, out, lse, *rest, num_warps=chosen.warps, num_stages=2, **FUSED)
    return out, lse


def forward(given: Given, causal: bool, tolerance: float) -> tuple[Tensor, Tensor]:
    """out [N, T, E] ([N, T, 0] without values) and lse [N, T]."""
    found: tuple[Tensor, Tensor] = _forward(*given, causal, tolerance)
    return found


@torch.library.custom_op("pointsman::triton_inform_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor | None, bias: Tensor | None, products: Tensor | None, real: Tensor | None,
    entropy: Tensor | None, causal: bool, tolerance: float, upper: Tensor | None, delta: Tensor, lse: Tensor,
) -> list[Tensor]:  # fmt: skip
    with torch.cuda.device_of(q):
        pointers, rest, chosen = _launch(Given(q, k, v, bias, products, real, entropy), causal, tolerance)
        d_q, d_k = torch.empty_like(q), torch.empty_like(k)
        d_v, d_bias = (None if one is None else torch.empty_like(one) for one in (v, bias))
        d_products = None if products is None else torch.zeros_like(products)
        others = [*pointers, lse if upper is None else upper, delta, lse]
        options = {"num_warps": chosen.warps, "num_stages": 2, **FUSED}
        written = [d_k if one is None else one for one in (d_k, d_v, d_bias, d_products)]
        count, length, keys = len(d_q), d_q.shape[1], d_k.shape[1]
        keys_kernel[triton.cdiv(keys, chosen.keys), count](*others, *written, *rest, **options)
        queries_kernel[triton.cdiv(length, chosen.queries), count](*others, d_q, *rest, **options)
    return [one for one in (d_q, d_k, d_v, d_bias, d_products) if one is not None]


def backward(
    given: Given, causal: bool, tolerance: float, upper: Tensor | None, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, bias and products; `upper` [N, T, E] is that of out, `delta` [N, T] as in `keys_kernel`."""
    if upper is None:  # no value has a gradient, and scores have only that of lse
        given = given._replace(v=None)
    found = iter(_backward(*given, causal, tolerance, upper, delta, lse))
    d_q, d_k = next(found), next(found)
    d_v, d_bias, d_products = (None if one is None else next(found) for one in (given.v, given.bias, given.products))
    return d_q, d_k, d_v, d_bias, d_products
