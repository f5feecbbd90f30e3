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

    @property
    def options(self) -> dict[str, int]:
        """The arguments of a kernel's launch."""
        rows, columns, inner, warps, stages = self
        return {"BM": rows, "BN": columns, "BK": inner, "num_warps": warps, "num_stages": stages}


CANDIDATES = tuple(
    Tile(rows, columns, 64, 8 if rows * columns > 64 * 128 else 4, stages)
    for rows in (64, 128)
    for columns in (64, 128, 256)
    for stages in (3, 4)
)
"""What tuning tries."""


def estimate(product: str, rows_each: int, dtype: torch.dtype, capability: int) -> Tile:
    """The tile of a product that nobody has measured, for experts of about so many rows, on a device of this major
    compute capability (0: the interpreter)."""
    exact, hopper = dtype == torch.float32, capability >= 9
    if capability == 0:
        return Tile(16, 32, 16, 4, 1)
    if product == OUTER:
        if exact:
            return Tile(64, 64, 32, 4, 3)
        return Tile(128, 128, 64, 8, 3) if hopper else Tile(64, 128, 32, 4, 4)
    if rows_each <= 16:
        return Tile(16, 64, 32, 4, 3) if exact else Tile(16, 128, 64, 4, 4)
    if exact:
        return Tile(64, 64 if product == TIMES else 32, 32, 4, 3)
    large = hopper and rows_each > 64
    plain = Tile(128, 128, 64, 8, 4) if large else Tile(64, 128, 64 if hopper else 32, 4, 4)
    if product in (TIMES, UP):
        return plain
    if product == GATED_INNER:  # what follows the product wants registers of its own
        return plain._replace(rows=64, columns=64 if hopper else 32)
    return plain._replace(columns=64)


def near(size: int) -> int:
    """The nearest power of 2."""
    return int(2 ** round(math.log2(max(size, 1))))


def key(product: str, dtype: torch.dtype, rows_each: int, columns: int) -> str:
    """The name of a product in the table."""
    return f"{product} {str(dtype).removeprefix('torch.')} {near(rows_each)} x {near(columns)}"


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
    _chosen.cache_clear()


def chosen(product: str, dtype: torch.dtype, rows_each: int, columns: int, device: torch.device) -> Tile:
    """The tile of a product: measured, or estimated."""
    return _chosen(product, dtype, near(rows_each), near(columns), device)  # batches of all sizes, few classes


@cache
def _chosen(product: str, dtype: torch.dtype, rows_each: int, columns: int, device: torch.device) -> Tile:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    measured = table().get(name, {}).get(key(product, dtype, rows_each, columns))
    return measured or estimate(product, rows_each, dtype, major_capability(device))
