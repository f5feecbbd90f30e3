"""What several kernels share: products, the order of tiles, and sizes known on the host."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSED = {"enable_fp_fusion": True}
"""Option of every launch: a product and a sum as one operation. Triton 3.9 warns where it is left open."""

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True"))
GROUP = tl.constexpr(8)
"""Tiles of rows that go through all columns together: what they read stays in the second-level cache."""


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b; the interpreter knows no products of bfloat16."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def in_groups(program, rows, columns):
    """The tile (row, column) of a program, of `rows` times `columns` tiles.

    Programs that follow each other share a column's weights, `GROUP` of them, and then the rows of their group with the
    next column. Row by row, weights that do not fit into the cache would be read for every row; column by column,
    the rows for every column.
    """
    group = program // (GROUP * columns)
    here = tl.minimum(rows - group * GROUP, GROUP)
    inside = program % (GROUP * columns)
    return group * GROUP + inside % here, inside // here


@triton.jit
def tile_of(ends_ptr, rows, columns, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """The expert of this program's tile (E: none), its first row, where that expert's rows end, and its column.

    Every expert has as many tiles of BM rows as its rows need; `rows`, the number of these tiles, is at most
    ceil(S / BM) + E, which the host knows. So there are no tables, and nobody waits.
    """
    tile, column = in_groups(tl.program_id(0), rows, columns)
    e = tl.arange(0, EP)
    ends = tl.load(ends_ptr + e, mask=e < E, other=0)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (ends - starts + BM - 1) // BM, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.minimum(tl.sum((upto <= tile).to(tl.int32), 0), E)
    mine = e == expert
    before = tl.sum(tl.where(mine, upto - tiles, 0), 0)
    start = tl.sum(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return expert, start + (tile - before) * BM, end, column


def power_of_2(number: int, least: int = 1) -> int:
    """The smallest power of 2 from `number` and `least` on."""
    return max(least, 1 << max(0, number - 1).bit_length())


def precision(tensor: Tensor) -> str:
    """Of products: float32 on a device as three TF32 products each, in the interpreter exact ones."""
    return "tf32x3" if tensor.is_cuda and tensor.dtype == torch.float32 else "ieee"


def major_capability(device: torch.device) -> int:
    """The major compute capability of a CUDA device; 0: the interpreter, on a CPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
