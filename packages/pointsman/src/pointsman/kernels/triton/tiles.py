"""The tiles of grouped products: those that `python benchmarks/gpu tune` measured on a device of this name, else
estimates.

The table `tiles.json` maps a device's name, then a product (one of the names below, dtype, rows an expert, columns, the
last two as the nearest powers of 2), to a tile. It is empty until somebody has tuned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from pointsman.kernels.triton.language import major_capability

FILE = Path(__file__).with_name("tiles.json")
TIMES, OUTER = "times", "outer"
UP, GATED_UP, INNER, GATED_INNER = "up", "gated up", "inner", "gated inner"  # of `fused.py`


class Tile(NamedTuple):
    """BM x BN results of one program, BK of the inner dimension at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


CANDIDATES = tuple(
    Tile(rows, columns, 64, 8 if rows * columns > 64 * 128 else 4, stages)
    for rows in (64, 128)
    for columns in (64, 128, 256)
    for stages in (3, 4)
)
"""What tuning tries."""


def tile(rows_each: int, dtype: torch.dtype, capability: int) -> Tile:
    """The tile for experts of about so many rows, on a device of this major compute capability (0: the interpreter)."""
    if capability == 0:
        return Tile(16, 32, 16, 4, 1)
    if dtype == torch.float32:
        return Tile(16 if rows_each <= 16 else 64, 64, 32, 4, 3)
    if rows_each <= 16:
        return Tile(16, 128, 64, 4, 4)
    if rows_each <= 64 or capability < 9:
        return Tile(64, 128, 64 if capability >= 9 else 32, 4, 4)
    return Tile(128, 128, 64, 8, 4)


def outer_tile(dtype: torch.dtype, capability: int) -> Tile:
    """The tile of outer products; its `inner` are rows."""
    if capability == 0:
        return Tile(16, 32, 16, 4, 1)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    return Tile(128, 128, 64, 8, 3) if capability >= 9 else Tile(64, 128, 32, 4, 4)


def fused_tile(product: str, rows_each: int, dtype: torch.dtype, capability: int) -> Tile:
    """The tile of a product with the units' work at its end, which wants registers of its own."""
    plain = tile(rows_each, dtype, capability)
    if capability == 0 or plain.rows <= 16:
        return plain
    if dtype == torch.float32:
        return plain._replace(columns=32)
    if product == GATED_INNER:
        return plain._replace(rows=64, columns=64 if capability >= 9 else 32)
    return plain._replace(columns=plain.columns if product == UP else 64)


def estimate(product: str, rows_each: int, dtype: torch.dtype, capability: int) -> Tile:
    """The tile of a product that nobody has measured."""
    if product == OUTER:
        return outer_tile(dtype, capability)
    return tile(rows_each, dtype, capability) if product == TIMES else fused_tile(product, rows_each, dtype, capability)


def key(product: str, dtype: torch.dtype, rows_each: int, columns: int) -> str:
    """The name of a product in the table."""
    rows, wide = (2 ** round(math.log2(max(size, 1))) for size in (rows_each, columns))
    return f"{product} {str(dtype).removeprefix('torch.')} {rows} x {wide}"


@cache
def table() -> dict[str, dict[str, Tile]]:
    """Device name -> `key` -> tile."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {device: {name: Tile(*sizes) for name, sizes in tiles.items()} for device, tiles in found.items()}


def write(file: Path, device: str, tiles: Mapping[str, Tile]) -> None:
    """Puts measured tiles into a table; those of other devices and products stay."""
    whole = json.loads(file.read_text()) if file.exists() else {}
    whole[device] = dict(sorted({**whole.get(device, {}), **tiles}.items()))
    file.write_text(json.dumps(whole, indent=1) + "\n")
    table.cache_clear()


@cache
def chosen(product: str, dtype: torch.dtype, rows_each: int, columns: int, device: torch.device) -> Tile:
    """The tile of a product: measured, or estimated."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    measured = table().get(name, {}).get(key(product, dtype, rows_each, columns))
    return measured or estimate(product, rows_each, dtype, major_capability(device))
