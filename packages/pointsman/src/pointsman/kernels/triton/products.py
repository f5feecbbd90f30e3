"""Assignments to experts and back, and the grouped products between: each expert's rows times its weights, its outer
products. The sort is a stable counting sort: two kernels and a prefix sum, nothing on the host.

Rows can lie in token order: then they are fetched through `order`, and no copy sorted by expert is made. Shapes: S =
T k assignments of T tokens, E experts, D wide; dropped assignments (an expert below 0, or E and more) come last.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, dot, major_capability, power_of_2, precision, tile_for, tile_of

BLOCK = 512  # assignments of one program


class Sorted(NamedTuple):
    """Where the row of each assignment lies, all int32: `order` [S] the assignment of each row, `row` [S] the row of
    each assignment (-1: dropped), `expert` [S] of each row (E: dropped), `ends` [E] where each expert's rows end."""

    order: Tensor
    row: Tensor
    expert: Tensor
    ends: Tensor


@triton.jit
def _key(expert_ptr, slot, S, E: tl.constexpr, EP: tl.constexpr):
    """The expert of each slot: E where it is dropped, EP - 1 beyond the last slot."""
    expert = tl.load(expert_ptr + slot, mask=slot < S, other=E).to(tl.int32)
    expert = tl.where((expert < 0) | (expert >= E), E, expert)
    return tl.where(slot < S, expert, EP - 1)


@triton.jit
def count_kernel(expert_ptr, count_ptr, S, blocks, E: tl.constexpr, EP: tl.constexpr, BS: tl.constexpr):
    """count [E + 1, blocks]: the assignments of each expert in each block."""
    block = tl.program_id(0)
    key = _key(expert_ptr, block * BS + tl.arange(0, BS), S, E, EP)
    e = tl.arange(0, EP)
    tl.store(count_ptr + e * blocks + block, tl.histogram(key, EP), mask=e <= E)


@triton.jit
def place_kernel(
    expert_ptr, count_ptr, upto_ptr, order_ptr, row_ptr, row_expert_ptr, ends_ptr, S, blocks,
    E: tl.constexpr, EP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """upto [E + 1, blocks]: the inclusive prefix sum of `count`, expert by expert."""
    block = tl.program_id(0)
    e = tl.arange(0, EP)
    if block == 0:
        tl.store(ends_ptr + e, tl.load(upto_ptr + e * blocks + blocks - 1, mask=e < E), mask=e < E)
    i = tl.arange(0, BS)
    packed = tl.sort(_key(expert_ptr, block * BS + i, S, E, EP) * BS + i)
    expert = packed // BS
    slot = block * BS + packed % BS
    here = tl.load(count_ptr + e * blocks + block, mask=e <= E, other=0)
    upto = tl.load(upto_ptr + e * blocks + block, mask=e <= E, other=0)
    shift = upto - here - (tl.cumsum(here, 0) - here)  # first row of the expert's share, less its first place here
    row = tl.gather(shift, expert, 0) + i
    tl.store(order_ptr + row, slot, mask=slot < S)
    tl.store(row_expert_ptr + row, expert, mask=slot < S)
    tl.store(row_ptr + slot, tl.where(expert < E, row, -1), mask=slot < S)


def sort(expert: Tensor, num_experts: int) -> Sorted:
    """expert [tokens, k], integers of any width, contiguous."""
    slots = expert.numel()
    padded = power_of_2(num_experts + 2)  # one for dropped assignments, one for what is beyond the last
    size = min(BLOCK, power_of_2(slots, 16))
    blocks = max(1, triton.cdiv(slots, size))  # one writes `ends`, also of no assignment
    count = expert.new_empty(num_experts + 1, blocks, dtype=torch.int32)
    count_kernel[blocks,](expert, count, slots, blocks, num_experts, padded, size, **FUSED)
    upto = count.view(-1).cumsum(0, dtype=torch.int32)
    order, row, of_rows = (expert.new_empty(slots, dtype=torch.int32) for _ in range(3))
    ends = expert.new_empty(num_experts, dtype=torch.int32)
    given = expert, count, upto, order, row, of_rows, ends, slots, blocks
    place_kernel[blocks,](*given, num_experts, padded, size, **FUSED)
    return Sorted(order, row, of_rows, ends)


@triton.jit
def combine_kernel(
    rows_ptr, row_ptr, weight_ptr, out_ptr, T, D, columns,
    K: tl.constexpr, WEIGHTED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out [T, D]: the (weighted) sum of each token's rows, those at -1 left out, added up in float32 in order of k."""
    t = tl.program_id(0) // columns * BT + tl.arange(0, BT)
    d = tl.program_id(0) % columns * BD + tl.arange(0, BD)
    acc = tl.zeros((BT, BD), dtype=tl.float32)
    for j in range(K):
        row = tl.load(row_ptr + t * K + j, mask=t < T, other=-1)
        there = (row[:, None] >= 0) & (d[None, :] < D)
        value = tl.load(rows_ptr + row[:, None].to(tl.int64) * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weight_ptr + t * K + j, mask=(t < T) & (row >= 0), other=0.0)
            value = value * weight.to(tl.float32)[:, None]
        acc += value
    mask = (t[:, None] < T) & (d[None, :] < D)
    tl.store(out_ptr + t[:, None].to(tl.int64) * D + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def combine(rows: Tensor, where: Sorted, k: int, weight: Tensor | None = None) -> Tensor:
    """rows [S, D], weight [T, k], contiguous: [T, D]; without `weight` the plain sum."""
    slots, dim = rows.shape
    output = rows.new_empty(slots // k, dim)
    wide = min(1024, power_of_2(dim, 16))
    tall, columns = max(1, 4096 // wide), triton.cdiv(dim, wide)
    combine_kernel[triton.cdiv(len(output), tall) * columns,](
        rows, where.row, output if weight is None else weight, output, len(output), dim, columns,
        k, weight is not None, tall, wide, **FUSED,
    )  # fmt: skip
    return output


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
    t = tile_for("times", left.dtype, slots // experts, major_capability(left.device))
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
    t = tile_for("outer", left.dtype, where.order.numel() // experts, major_capability(left.device))
    outer_kernel[triton.cdiv(m, t.rows), triton.cdiv(n, t.columns), experts](
        left, right, where.order, where.ends, output, found[-1], m, n, max(left_k, right_k, 1),
        left_k > 0, right_k > 0, sums, precision(left), **t.options, **FUSED,
    )  # fmt: skip
    return found
