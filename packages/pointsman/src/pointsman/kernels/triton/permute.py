"""Assignments to experts and back: a stable counting sort (two kernels and a prefix sum, nothing on the host), combine.

Shapes: S = T k assignments of T tokens, E experts, D wide; dropped assignments (an expert below 0, or from E on) come
last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.kernels.triton.language import FUSED, power_of_2

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
