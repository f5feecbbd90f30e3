"""Softmax of scores times values without scores in memory: the mixers, and attention with relative positions.

    s_ij = q_i . k_j + bias_j + P[i, T - 1 - i + j],   out_i = sum_j exp(s_ij - m_i) v_j / l_i,

m_i the largest score of row i and l_i the sum of exp(s_ij - m_i), over the keys j that are visible to i: those not
later (if causal), and of a mixer's those that are no padding and not less sure than i's own token; a token always sees
itself. Of an attention a padded key has the score -1e30, so that a row of padded keys alone gives its values' mean.

P are position products by falling distance, made by one product with aligned rows: row i starts T - 1 - i columns
later than the keys. Backward writes the scores' gradient into the same places of a tensor of zeros: each element once,
nothing is added atomically. Products of float32 are three TF32 products each.

Shapes: N sequences (of an attention heads times sequences, head by head), T queries, S keys (the last T are the
queries' own tokens), D score width, E values' width, W >= S distances.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pointsman.kernels.triton.language import dot

MASKED = tl.constexpr(-1e30)
MIXER, ATTENTION = tl.constexpr(1), tl.constexpr(2)  # what padding means; 0: there is none


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
    q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, B, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, ENTROPY: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """[BM, BN] float32, -inf where a key is not visible; where one is visible to a query that there is; and through
    which of these scores a gradient flows."""
    own = i + (S - T)
    visible = tl.broadcast_to(j[None, :] < S, (BM, BN))
    if CAUSAL:
        visible = visible & (j[None, :] <= own[:, None])
    scores = tl.zeros((BM, BN), dtype=tl.float32)
    if POSITIONS:
        at = i[:, None] * (W - 1) + (T - 1) + j[None, :]  # i W + (T - 1 - i) + j
        mask = visible & (i[:, None] < T)
        scores = tl.load(products_ptr + n.to(tl.int64) * T * W + at, mask=mask, other=0.0).to(tl.float32)
    scores = _inner(
        q_ptr + n.to(tl.int64) * T * D, k_ptr + n.to(tl.int64) * S * D, i, j, T, S, D, scores, DP, BD, PRECISION
    )
    keys = (n % B).to(tl.int64) * S
    if BIAS:
        scores += tl.load(bias_ptr + keys + j, mask=j < S, other=0.0)[None, :]
    flows = visible
    if PADDING == MIXER:
        real = tl.load(real_ptr + keys + j, mask=j < S, other=0) != 0
        own_real = tl.load(real_ptr + keys + own, mask=i < T, other=0) != 0
        visible = visible & real[None, :] & own_real[:, None]
    if PADDING == ATTENTION:
        real = tl.load(real_ptr + keys + j, mask=j < S, other=1) != 0
        flows = tl.broadcast_to(real[None, :], (BM, BN))
        scores = tl.where(flows, scores, MASKED)
    if ENTROPY:
        entropy = tl.load(entropy_ptr + keys + j, mask=j < S, other=0.0)
        own_entropy = tl.load(entropy_ptr + keys + own, mask=i < T, other=0.0)
        visible = visible & (entropy[None, :] <= own_entropy[:, None] + tolerance)
    visible = visible | (j[None, :] == own[:, None])
    here = visible & (i[:, None] < T)
    return tl.where(visible, scores, float("-inf")), here, here & flows


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, out_ptr, most_ptr, total_ptr,
    stride_h, stride_b, stride_t, blocks, T, S, W, D, E, B, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, ENTROPY: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BM
    i = first + tl.arange(0, BM)
    e = tl.arange(0, EP)
    most = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, EP), dtype=tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, S - T + first + BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        scores, _, _ = _scores(
            q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, B, tolerance, BIAS,
            POSITIONS, CAUSAL, PADDING, ENTROPY, PRECISION, BM, BN, DP, BD,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # no key so far
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(most - shift)
        total = total * shrink + tl.sum(weights, 1)
        if VALUES:
            at = n.to(tl.int64) * S + j
            v = tl.load(v_ptr + at[:, None] * E + e[None, :], mask=(j[:, None] < S) & (e[None, :] < E), other=0.0)
            acc = dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION)
        most = larger
    total = tl.where(i < T, total, 1.0)  # beyond the last query there may be no key
    place = n.to(tl.int64) * T + i
    tl.store(most_ptr + place, most, mask=i < T)
    tl.store(total_ptr + place, total, mask=i < T)
    if VALUES:
        out = out_ptr + (n // B).to(tl.int64) * stride_h + (n % B).to(tl.int64) * stride_b
        out += i[:, None].to(tl.int64) * stride_t + e[None, :]
        acc = acc / total[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(i[:, None] < T) & (e[None, :] < E))


@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, upper_ptr, delta_ptr, most_ptr, total_ptr,
    d_k_ptr, d_v_ptr, d_bias_ptr, d_products_ptr, blocks, T, S, W, D, E, B, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, ENTROPY: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys, of their values and biases, and of P. `upper` [N, T, E] is that of out, `delta`
    [N, T] upper . out, less the gradient of log l + m."""
    n = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * BN
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
        scores, here, flows = _scores(
            q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, B, tolerance, BIAS,
            POSITIONS, CAUSAL, PADDING, ENTROPY, PRECISION, BM, BN, DP, BD,
        )  # fmt: skip
        most = tl.load(most_ptr + place, mask=i < T, other=0.0)
        total = tl.load(total_ptr + place, mask=i < T, other=1.0)
        weights = tl.where(here, tl.exp(scores - most[:, None]) / total[:, None], 0.0)
        through = tl.zeros((BM, BN), dtype=tl.float32)
        if VALUES:
            through = _inner(
                upper_ptr + n.to(tl.int64) * T * E, v_ptr + n.to(tl.int64) * S * E, i, j, T, S, E, through, EP, BE,
                PRECISION,
            )  # fmt: skip
            mask = (i[:, None] < T) & (e[None, :] < E)
            upper = tl.load(upper_ptr + place[:, None] * E + e[None, :], mask=mask, other=0.0)
            d_v = dot(tl.trans(weights.to(upper.dtype)), upper, d_v, PRECISION)
        delta = tl.load(delta_ptr + place, mask=i < T, other=0.0)
        d_scores = tl.where(flows, weights * (through - delta[:, None]), 0.0)
        q = tl.load(q_ptr + place[:, None] * D + d[None, :], mask=(i[:, None] < T) & (d[None, :] < D), other=0.0)
        d_k = dot(tl.trans(d_scores.to(q.dtype)), q, d_k, PRECISION)
        d_bias += tl.sum(d_scores, 0)
        if POSITIONS:
            skewed = n.to(tl.int64) * T * W + i[:, None] * (W - 1) + (T - 1) + j[None, :]
            tl.store(d_products_ptr + skewed, d_scores.to(d_products_ptr.dtype.element_ty), mask=here)
    key_mask = j[:, None] < S
    tl.store(d_k_ptr + at[:, None] * D + d[None, :], d_k.to(d_k_ptr.dtype.element_ty), mask=key_mask & (d[None, :] < D))
    if BIAS:
        tl.store(d_bias_ptr + at, d_bias, mask=j < S)
    if VALUES:
        out = d_v_ptr + at[:, None] * E + e[None, :]
        tl.store(out, d_v.to(d_v_ptr.dtype.element_ty), mask=key_mask & (e[None, :] < E))


@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, upper_ptr, delta_ptr, most_ptr, total_ptr,
    d_products_ptr, d_q_ptr, blocks, T, S, W, D, E, B, tolerance,
    BIAS: tl.constexpr, POSITIONS: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, ENTROPY: tl.constexpr,
    VALUES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DP: tl.constexpr,
    EP: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """d_q [N, T, D]; the scores' gradient is read where `keys_kernel` has written it, and else computed again."""
    n = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BM
    i = first + tl.arange(0, BM)
    d = tl.arange(0, DP)
    place = n.to(tl.int64) * T + i
    most = tl.load(most_ptr + place, mask=i < T, other=0.0)
    total = tl.load(total_ptr + place, mask=i < T, other=1.0)
    delta = tl.load(delta_ptr + place, mask=i < T, other=0.0)
    d_q = tl.zeros((BM, DP), dtype=tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, S - T + first + BM)
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        if POSITIONS:
            seen = (j[None, :] <= i[:, None] + (S - T)) & (j[None, :] < S) & (i[:, None] < T)
            skewed = n.to(tl.int64) * T * W + i[:, None] * (W - 1) + (T - 1) + j[None, :]
            d_scores = tl.load(d_products_ptr + skewed, mask=seen, other=0.0).to(tl.float32)
        else:
            scores, _, flows = _scores(
                q_ptr, k_ptr, bias_ptr, products_ptr, real_ptr, entropy_ptr, n, i, j, T, S, W, D, B, tolerance, BIAS,
                POSITIONS, CAUSAL, PADDING, ENTROPY, PRECISION, BM, BN, DP, BD,
            )  # fmt: skip
            through = tl.zeros((BM, BN), dtype=tl.float32)
            if VALUES:
                through = _inner(
                    upper_ptr + n.to(tl.int64) * T * E, v_ptr + n.to(tl.int64) * S * E, i, j, T, S, E, through, EP,
                    BE, PRECISION,
                )  # fmt: skip
            weights = tl.where(flows, tl.exp(scores - most[:, None]) / total[:, None], 0.0)
            d_scores = weights * (through - delta[:, None])
        at = n.to(tl.int64) * S + j
        k = tl.load(k_ptr + at[:, None] * D + d[None, :], mask=(j[:, None] < S) & (d[None, :] < D), other=0.0)
        d_q = dot(d_scores.to(k.dtype), k, d_q, PRECISION)
    out = d_q_ptr + place[:, None] * D + d[None, :]
    tl.store(out, d_q.to(d_q_ptr.dtype.element_ty), mask=(i[:, None] < T) & (d[None, :] < D))
