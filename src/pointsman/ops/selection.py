"""Choosing the k largest."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest of `values` [..., E], the largest first; of equal values the lowest index.

    (torch.topk leaves open which of equal values it takes.) NaN counts as the largest.
    """
    values = values.detach()
    if _maxima_are_faster(values, k):
        return _repeated_maxima(values, k)
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _maxima_are_faster(values: Tensor, k: int) -> bool:
    """Measured on a CPU: a sort costs a fixed number of calls, so that it wins on little data and on a GPU."""
    if torch.compiler.is_exporting():  # no rule that depends on the number of tokens
        return False
    return values.device.type == "cpu" and values.numel() > 4096 and k * k <= 4 * values.shape[-1]


def _repeated_maxima(values: Tensor, k: int) -> Tensor:
    chosen = [values.max(-1, keepdim=True).indices]
    if k > 1:
        left = values.clamp_min(torch.finfo(values.dtype).min)  # above what marks a chosen one
        while len(chosen) < k:
            left.scatter_(-1, chosen[-1], -torch.inf)
            chosen.append(left.max(-1, keepdim=True).indices)
    return torch.cat(chosen, -1)
