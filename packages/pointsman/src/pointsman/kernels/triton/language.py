"""What several kernels share: products, the order of tiles, and sizes known on the host, among them those of tiles."""

import os
from typing import Literal, NamedTuple

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


Product = Literal["times", "outer", "up", "gated up", "inner", "gated inner"]  # of `products.py` and `fused.py`


class Tile(NamedTuple):
    """BM x BN results of one program, BK of the inner dimension at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The arguments of a kernel's launch."""
        rows, columns, inner, warps, stages = self
        return {"BM": rows, "BN": columns, "BK": inner, "num_warps": warps, "num_stages": stages}


def tile_for(product: Product, dtype: torch.dtype, rows_each: int, capability: int) -> Tile:
    """For experts of about so many rows; 0: the interpreter. Estimated: other tiles have not been measured."""
    exact, hopper = dtype == torch.float32, capability >= 9
    if capability == 0:
        return Tile(16, 32, 16, 4, 1)
    if product == "outer":
        if exact:
            return Tile(64, 64, 32, 4, 3)
        return Tile(128, 128, 64, 8, 3) if hopper else Tile(64, 128, 32, 4, 4)
    if rows_each <= 16:
        return Tile(16, 64, 32, 4, 3) if exact else Tile(16, 128, 64, 4, 4)
    if exact:
        return Tile(64, 64 if product == "times" else 32, 32, 4, 3)
    large = hopper and rows_each > 64
    plain = Tile(128, 128, 64, 8, 4) if large else Tile(64, 128, 64 if hopper else 32, 4, 4)
    if product in ("times", "up"):
        return plain
    if product == "gated inner":  # what follows the product wants registers of its own
        return plain._replace(rows=64, columns=64 if hopper else 32)
    return plain._replace(columns=64)
