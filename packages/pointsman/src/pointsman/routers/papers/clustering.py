"""k-means clustering (Lloyd 1982), started by k-means++ (Arthur and Vassilvitskii 2007)."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 100


def kmeans(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The cluster, 0 to `count` - 1, of each row [n, d]: [n] int64; at most `ROUNDS` rounds, in float64 on the CPU.

    A cluster without rows keeps its centre. The same generator gives the same clusters.
    """
    rows = rows.detach().cpu().double()
    near = torch.full((len(rows),), torch.inf, dtype=torch.float64)
    chosen: list[int] = []
    for _ in range(count):
        odds = near if chosen and bool(near.any()) else torch.ones_like(near)
        chosen.append(int(torch.multinomial(odds, 1, generator=generator)))
        near = torch.minimum(near, (rows - rows[chosen[-1]]).square().sum(1))
    centres, labels = rows[chosen], torch.full((len(rows),), -1)
    for _ in range(ROUNDS):
        before, labels = labels, torch.cdist(rows, centres).argmin(1)
        if torch.equal(before, labels):
            break
        sizes = labels.bincount(minlength=count)[:, None]
        means = torch.zeros_like(centres).index_add_(0, labels, rows) / sizes.clamp_min(1)
        centres = torch.where(sizes > 0, means, centres)
    return labels
