"""Order statistics of columns, exactly and from a histogram whose counts add up over batches and processes."""

from __future__ import annotations

import torch
from torch import Tensor


def column_histogram(values: Tensor, low: Tensor, high: Tensor, bins: int, mask: Tensor | None = None) -> Tensor:
    """[E, bins] int64: how many of the values [N, E] of each column lie in each of `bins` equal parts of [low, high].

    Values outside count in the first or last part; rows where `mask` [N] is False count nowhere.
    """
    columns = values.shape[1]
    place = ((values - low) / (high - low) * bins).long().clamp(0, bins - 1)
    if mask is not None:
        place = place.masked_fill(~mask[:, None], bins)
    counts = torch.zeros(columns, bins + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(1, place.T, torch.ones_like(place.T))[:, :bins]


def largest_of_histogram(histogram: Tensor, rank: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[E]: the middle of the part that holds each column's value number `rank` from the top (0 is the largest).

    Args:
        histogram: [E, bins], of `column_histogram` with the same low and high.
        rank: scalar int64.
    """
    bins = histogram.shape[1]
    above = (histogram.flip(1).cumsum(1) <= rank).sum(1)
    return high - (above + 0.5) * ((high - low) / bins)
