"""Rotary positions (Su et al. 2021): frequencies and the rotation.

Shapes: B sequences, S positions, H heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float) -> Tensor:
    """theta^(-2 i / D): [D / 2] float32, in radians a position."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float32)
    return 1.0 / theta ** (even / head_dim)


def angles(head_dim: int, theta: float, positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, each [positions, D], in the dtype of `like`.

    sin is negative for the first D / 2, where a rotation subtracts.
    """
    exact = torch.float64 if like.dtype == torch.float64 else torch.float32
    places = torch.arange(positions, dtype=exact, device=like.device)
    turned = places[:, None] * frequencies(head_dim, theta).to(places)
    cos, sin = (one.to(like.dtype) for one in (turned.cos(), turned.sin()))
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class Rotation(NamedTuple):
    """Rotates the pairs (i, i + D / 2) of heads by the angles of their positions.

    Attributes:
        cos, sin: [positions, D], from `angles`.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, heads: Tensor, first: int) -> Tensor:
        """heads [B, S, H, D], whose first stands at position `first`."""
        cos, sin = (table[first : first + heads.shape[1], None] for table in self)
        return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin
