"""The position term of relative attention, also for single heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def alignment(device: torch.device) -> int:
    """Of the rows of matrix products, in entries. On a GPU cuBLAS is slow where rows are not of whole 16 bytes (pytorch
    issue 146817)."""
    return 1 if device.type == "cpu" else 8


def distances(seen: int, device: torch.device) -> int:
    """How many distances a block's position term has, of which the first `seen` are seen - 1 .. 0: at least one more,
    and so many that rows are aligned."""
    step = alignment(device)
    return (seen // step + 1) * step


def by_key(products: Tensor) -> Tensor:
    """[N, R, W] by falling distance, W > seen -> a view [N, R, W - 1], by key in its first `seen` columns.

    Row a moves left by R - 1 - a: in rows of W entries, a start at R - 1 and a step of W - 1 from row to row. Keys
    after the query show entries of other rows: the caller masks them.
    """
    count, rows, width = products.shape
    flat = products.reshape(count, rows * width)
    return flat[:, rows - 1 : rows - 1 + rows * (width - 1)].view(count, rows, width - 1)


@dataclass(frozen=True)
class RelativeBias:
    """What Transformer-XL's attention adds to scale * q_i . k_j: scale * (u . k_j + (q_i + w) . r_(i + M - j)).

    A function of a block of rows, the form that `AttentionTrace.bias` has. For causal attention: values for keys after
    the query are undefined.

    Attributes:
        query, key: [B, H, T, D], [B, H, S, D] with S = M + T.
        positions: r, [H, S, D], by falling distance: row c belongs to the distance S - 1 - c.
        content_bias, position_bias: u and w, [H, D].
    """

    query: Tensor
    key: Tensor
    positions: Tensor
    content_bias: Tensor
    position_bias: Tensor
    scale: float

    def __call__(self, start: int, stop: int) -> Tensor:
        """[B, H, stop - start, S]."""
        content = self.scale * (self.key @ self.content_bias[:, :, None].to(self.key.dtype)).transpose(2, 3)
        return self.position(start, stop) + content

    def position(self, start: int, stop: int) -> Tensor:
        """The position term alone, [B, H, stop - start, S]."""
        batch, heads, length, _ = self.query.shape
        keys, count = self.positions.shape[1], stop - start
        seen = keys - length + stop
        rows = (self.query[:, :, start:stop] + self.position_bias[:, None]) * self.scale
        # heads first: one matrix product a head, over the rows of all sequences
        rows, positions = rows.transpose(0, 1).flatten(1, 2), self.positions[:, keys - seen :].to(rows.dtype)
        width = distances(seen, rows.device)
        if rows.shape[1] < self.positions.shape[2]:  # negative distances on the side where padding copies less
            products = F.pad(rows @ positions.transpose(1, 2), (0, width - seen))
        else:
            products = rows @ F.pad(positions, (0, 0, 0, width - seen)).transpose(1, 2)
        by_keys = by_key(products.view(heads * batch, count, width))[..., :seen].view(heads, batch, count, seen)
        return F.pad(by_keys.transpose(0, 1), (0, keys - seen))
