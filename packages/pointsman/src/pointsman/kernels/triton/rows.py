"""Rows to experts and back: gather, combine.

Shapes: T tokens of k assignments each, S = T k rows, D wide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, power_of_2
from pointsman.kernels.triton.sort import Sorted


@triton.jit
def gather_kernel(x_ptr, order_ptr, ends_ptr, out_ptr, D, K, E: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """out [S, D]: the token of each row; rows of dropped assignments are not written."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = row < tl.load(ends_ptr + E - 1)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = tl.load(order_ptr + row, mask=inside, other=0) // K
    mask = inside[:, None] & (d[None, :] < D)
    value = tl.load(x_ptr + token[:, None].to(tl.int64) * D + d[None, :], mask=mask)
    tl.store(out_ptr + row[:, None].to(tl.int64) * D + d[None, :], value, mask=mask)


@triton.jit
def combine_kernel(
    rows_ptr, row_ptr, weight_ptr, out_ptr, T, D, stride,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out [T, D]: the (weighted) sum of each token's rows, those at -1 left out, added up in float32 in order of k."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    acc = tl.zeros((BT, BD), dtype=tl.float32)
    for j in range(K):
        row = tl.load(row_ptr + t * K + j, mask=t < T, other=-1)
        there = (row[:, None] >= 0) & (d[None, :] < D)
        value = tl.load(rows_ptr + row[:, None].to(tl.int64) * stride + d[None, :], mask=there, other=0.0)
        value = value.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weight_ptr + t * K + j, mask=(t < T) & (row >= 0), other=0.0)
            value = value * weight.to(tl.float32)[:, None]
        acc += value
    mask = (t[:, None] < T) & (d[None, :] < D)
    tl.store(out_ptr + t[:, None].to(tl.int64) * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def gather(hidden: Tensor, where: Sorted, k: int) -> Tensor:
    """hidden [T, D], contiguous: [S, D]."""
    rows, dim = where.order.numel(), hidden.shape[1]
    output = hidden.new_empty(rows, dim)
    wide = min(1024, power_of_2(dim, 16))
    tall = max(1, 4096 // wide)
    grid = triton.cdiv(rows, tall), triton.cdiv(dim, wide)
    gather_kernel[grid](hidden, where.order, where.ends, output, dim, k, len(where.ends), tall, wide, **FUSED)
    return output


def combine(rows: Tensor, where: Sorted, tokens: int, dim: int, weight: Tensor | None = None) -> Tensor:
    """rows [S, at least dim], weight [T, k], contiguous: [T, dim]; without `weight` the plain sum."""
    k = where.row.numel() // tokens
    output = rows.new_empty(tokens, dim)
    wide = min(1024, power_of_2(dim, 16))
    tall = max(1, 4096 // wide)
    given = output if weight is None else weight
    combine_kernel[triton.cdiv(tokens, tall), triton.cdiv(dim, wide)](
        rows, where.row, given, output, tokens, dim, rows.stride(0), k, weight is not None, tall, wide, **FUSED
    )
    return output
