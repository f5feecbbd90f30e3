"""The tiles of grouped products."""

from __future__ import annotations

from typing import NamedTuple

import torch

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


def tile_for(product: str, dtype: torch.dtype, rows_each: int, capability: int) -> Tile:
    """The tile of a product for experts of about so many rows, on a device of this major compute capability (0: the
    interpreter). An estimate: nobody has measured."""
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
