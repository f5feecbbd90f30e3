"""Rotary positions (Su et al. 2021): frequencies and the rotation.

Shapes: H heads, S positions, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops.linear import transformed
from pointsman_lab.models.memory import appended


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


class Turns:
    """Turns the pairs (i, i + D / 2) of heads by the angles of their positions, in one forward of a model.

    Args:
        cos, sin: [positions, D], from `angles`.
        turned: the remembered keys [B, M, G, D] of each layer, turned already; () = they are not.

    Attributes:
        keys_turned: without gradients the keys [B, M + T, G, D] of each layer, as they are called for.
    """

    def __init__(self, cos: Tensor, sin: Tensor, turned: Sequence[Tensor] = ()) -> None:
        self.tables, self.turned = (cos, sin), turned
        self.keys_turned: list[Tensor] = []

    def keys(self, keys: Tensor) -> Tensor:
        """All keys [B, S, G, D] of the next layer, from position 0 on."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self(keys, 0)
        if self.turned:
            before = self.turned[len(self.keys_turned)]
            length = before.shape[1]
            keys = appended(before, self(keys[:, length:], length))
        else:
            keys = self(keys, 0)
        self.keys_turned.append(keys)
        return keys

    def __call__(self, heads: Tensor, first: int) -> Tensor:
        """heads [B, S, H, D], whose first stands at position `first`."""
        cos, sin = (table[first : first + heads.shape[1], None] for table in self.tables)
        if torch.compiler.is_compiling() or transformed():
            return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin
        if not (torch.is_grad_enabled() and heads.requires_grad):
            return _turned(heads, cos, sin, 1)
        output: Tensor = _Turn.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
        return output


SMALL = 1 << 19
"""Elements up to which a copy of the heads is worth its making."""


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = heads.shape[-1] // 2
    output = heads * cos
    if heads.numel() <= SMALL:
        return output.addcmul_(heads.roll(half, -1), sin, value=sign)
    output[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=sign)
    output[..., half:].addcmul_(heads[..., :half], sin[..., half:], value=sign)
    return output


class _Turn(torch.autograd.Function):
    """Backward turns the gradient the other way: a rotation's transpose."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return _turned(heads, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.angles
        return _turned(gradient, cos, sin, -1), None, None
