"""Choosing the k largest."""

from __future__ import annotations

from torch import Tensor


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest of `values` [..., E], the largest first."""
    return values.topk(k, dim=-1).indices
