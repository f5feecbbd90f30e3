"""Grouped matrix products: each expert's rows times its weights, and each expert's outer products.

Rows can lie in token order: then they are fetched through `order`, and no copy sorted by expert is made. Shapes: S rows
sorted by expert, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, dot, major_capability, power_of_2, precision, tile_of
from pointsman.kernels.triton.permute import Sorted
from pointsman.kernels.triton.tiles import OUTER, TIMES, tile_for


@triton.jit
def accumulated(acc, a_ptrs, w_ptrs, rows, columns, A, stride, PRECISION: tl.constexpr, BK: tl.constexpr):
    """acc + a w, over the inner dimension A, of which the pointers show the first BK.

    `rows` and `columns` say which of a's rows and w's columns are there; `stride` is that of w's rows.
    """
    inner = tl.arange(0, BK)
    for start in range(0, A, BK):
        a = tl.load(a_ptrs, mask=rows[:, None] & (inner[None, :] + start < A), other=0.0)
        w = tl.load(w_ptrs, mask=columns[None, :] & (inner[:, None] + start < A), other=0.0)
        acc = dot(a, w, acc, PRECISION)
        a_ptrs += BK
        w_ptrs += BK * stride
    return acc


@triton.jit
def rows_kernel(
    a_ptr, w_ptr, b_ptr, v_ptr, ends_ptr, out_ptr,
    A, N, stride_e, stride_n, stride_a, other_e, other_n, other_a, rows, columns,
    E: tl.constexpr, EP: tl.constexpr, SUM: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [S, N] = a [S, A] times w [E, A, N] of the row's expert; with SUM plus b [S, A] times v [E, A, N]."""
    expert, first, end, column = tile_of(ends_ptr, rows, columns, E, EP, BM)
    if expert >= E:
        return
    row = first + tl.arange(0, BM)
    inside = row < end
    n = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    at = row[:, None].to(tl.int64) * A + inner[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * stride_e + n[None, :].to(tl.int64) * stride_n
    w_ptrs += inner[:, None].to(tl.int64) * stride_a
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    acc = accumulated(acc, a_ptr + at, w_ptrs, inside, n < N, A, stride_a, PRECISION, BK)
    if SUM:
        v_ptrs = v_ptr + expert.to(tl.int64) * other_e + n[None, :].to(tl.int64) * other_n
        v_ptrs += inner[:, None].to(tl.int64) * other_a
        acc = accumulated(acc, b_ptr + at, v_ptrs, inside, n < N, A, other_a, PRECISION, BK)
    out = out_ptr + row[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n[None, :] < N))


@triton.jit
def outer_kernel(
    left_ptr, right_ptr, order_ptr, ends_ptr, out_ptr, sums_ptr, M, N, K,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [E, M, N] = each expert's left [rows, M]' right [rows, N], either in token order; zeros without rows.
    With SUMS also sums [E, M] of left's rows."""
    expert = tl.program_id(2)  # the slowest: all tiles of an expert, whose rows they share, follow each other
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        inside = row < end
        left_row, right_row = row, row
        if GATHER_LEFT or GATHER_RIGHT:
            token = tl.load(order_ptr + row, mask=inside, other=0) // K
            if GATHER_LEFT:
                left_row = token
            if GATHER_RIGHT:
                right_row = token
        left_mask, right_mask = inside[:, None] & (m[None, :] < M), inside[:, None] & (n[None, :] < N)
        left = tl.load(left_ptr + left_row[:, None].to(tl.int64) * M + m[None, :], mask=left_mask, other=0.0)
        right = tl.load(right_ptr + right_row[:, None].to(tl.int64) * N + n[None, :], mask=right_mask, other=0.0)
        acc = dot(tl.trans(left), right, acc, PRECISION)
        if SUMS:
            total += tl.sum(left.to(tl.float32), 0)
    if SUMS and tl.program_id(1) == 0:
        tl.store(sums_ptr + expert.to(tl.int64) * M + m, total.to(sums_ptr.dtype.element_ty), mask=m < M)
    out = out_ptr + expert.to(tl.int64) * M * N + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def times(left: Tensor, weight: Tensor, where: Sorted, second: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """left [S, A] times weight [E, A, N]: [S, N]. Rows of dropped assignments are undefined.

    `second`: another such pair, whose product is added.
    """
    slots, (experts, inner, width) = len(left), weight.shape
    output = left.new_empty(slots, width)
    other, more = second or (left, weight)
    t = tile_for(TIMES, left.dtype, slots // experts, major_capability(left.device))
    rows, columns = triton.cdiv(slots, t.rows) + experts, triton.cdiv(width, t.columns)
    rows_kernel[rows * columns,](
        left, weight, other, more, where.ends, output, inner, width,
        weight.stride(0), weight.stride(2), weight.stride(1), more.stride(0), more.stride(2), more.stride(1),
        rows, columns, experts, power_of_2(experts + 1), second is not None, precision(left), **t.options, **FUSED,
    )  # fmt: skip
    return output


def outer(
    left: Tensor, right: Tensor, where: Sorted, *, left_k: int = 0, right_k: int = 0, sums: bool = False
) -> list[Tensor]:
    """left [S, M] and right [S, N], either in token order (then with its k): [E, M, N]; with `sums` also the sums
    [E, M] of each expert's rows of left."""
    experts, m, n = len(where.ends), left.shape[1], right.shape[1]
    output = left.new_empty(experts, m, n)
    found = [output, left.new_empty(experts, m)] if sums else [output]
    t = tile_for(OUTER, left.dtype, where.order.numel() // experts, major_capability(left.device))
    outer_kernel[triton.cdiv(m, t.rows), triton.cdiv(n, t.columns), experts](
        left, right, where.order, where.ends, output, found[-1], m, n, max(left_k, right_k, 1),
        left_k > 0, right_k > 0, sums, precision(left), **t.options, **FUSED,
    )  # fmt: skip
    return found
