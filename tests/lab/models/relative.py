"""Attention with relative positions in float64, position by position."""

import math

import torch
from torch import Tensor

MASKED = -1e30


def reference(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, content_bias: Tensor, position_bias: Tensor,
    scale: float, key_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a_ij = scale ((q_i + u) k_j + (q_i + w) r_(i + M - j)) by an explicit table of distances."""
    length, keys = query.shape[2], key.shape[2]
    memory = keys - length
    distance = torch.arange(length)[:, None] + memory - torch.arange(keys)[None]
    by_distance = positions.flip(1)  # row d belongs to distance d
    table = by_distance[:, distance.clamp_min(0)]  # [H, T, S, D]
    content = torch.einsum("hbtd,hbsd->hbts", query + content_bias[:, None, None], key)
    position = torch.einsum("hbtd,htsd->hbts", query + position_bias[:, None, None], table)
    scores = scale * (content + position)
    if key_mask is not None:
        scores = torch.where(key_mask[None, :, None], scores, torch.full_like(scores, MASKED))
    scores = torch.where(distance >= 0, scores, torch.full_like(scores, -math.inf))
    return torch.softmax(scores, -1) @ value


def draw(
    heads: int = 3, batch: int = 2, length: int = 7, memory: int = 4, width: int = 5,
    dtype: torch.dtype = torch.float64, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    keys = length + memory
    shapes = [
        (heads, batch, length, width),
        (heads, batch, keys, width),
        (heads, batch, keys, width),
        (heads, keys, width),
        (heads, width),
        (heads, width),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def padding(batch: int, keys: int, side: str) -> Tensor:
    mask = torch.ones(batch, keys, dtype=torch.bool)
    if side == "left":
        mask[0, :4] = False
    else:
        mask[0, -3:] = False
    return mask
