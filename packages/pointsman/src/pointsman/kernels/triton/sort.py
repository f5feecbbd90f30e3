"""A stable counting sort of the assignments by expert: two kernels and a prefix sum, nothing on the host.

Shapes: S = tokens * k assignments, E experts; dropped assignments (an expert below 0, or from E on) come last.
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
    blocks = triton.cdiv(slots, size)
    count = expert.new_empty(num_experts + 1, blocks, dtype=torch.int32)
    count_kernel[blocks,](expert, count, slots, blocks, num_experts, padded, size, **FUSED)
    upto = count.view(-1).cumsum(0, dtype=torch.int32)
    order, row, of_rows = (expert.new_empty(slots, dtype=torch.int32) for _ in range(3))
    ends = expert.new_empty(num_experts, dtype=torch.int32)
    given = expert, count, upto, order, row, of_rows, ends, slots, blocks
    place_kernel[blocks,](*given, num_experts, padded, size, **FUSED)
    return Sorted(order, row, of_rows, ends)
