"""Choosing the k largest, and which were chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from pointsman.ops.kernels import exporting

MANY = 64  # values from which a full stable sort of each row is expected to cost more on a GPU than distinct keys


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest of `values` [..., E], the largest first; of equal values the lowest index.

    (torch.topk leaves open which of equal values it takes.) NaN counts as the largest.
    """
    values = values.detach()
    if _maxima_are_faster(values, k):
        return _repeated_maxima(values, k)
    if values.device.type == "cuda" and values.shape[-1] >= MANY and values.dtype != torch.float64:
        return keys(values).topk(k, dim=-1).indices
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def members(experts: Tensor, num_experts: int) -> Tensor:
    """[tokens, E] bool: whether a token chose an expert, of `experts` [tokens, k] with -1 = none."""
    hot = torch.zeros(experts.shape[0], num_experts + 1, dtype=torch.bool, device=experts.device)
    return hot.scatter_(1, experts + 1, True)[:, 1:]


def keys(values: Tensor) -> Tensor:
    """Distinct int64 numbers [..., E] in the order that `top_k` wants: by value (of at most 32 bits), then by place."""
    bits = (values.float() + 0.0).view(torch.int32)  # -0 becomes 0
    bits = bits.masked_fill(values.isnan(), torch.iinfo(torch.int32).max)
    ordered = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits).long()
    return ordered * 2**32 + torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)


def _maxima_are_faster(values: Tensor, k: int) -> bool:
    """Measured on a CPU: a sort costs a fixed number of calls, so that it wins on little data and on a GPU."""
    if exporting():  # no rule that depends on the number of tokens
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
