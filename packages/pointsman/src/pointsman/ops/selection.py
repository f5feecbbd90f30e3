"""Choosing the k largest, and which were chosen."""

import torch
from torch import Tensor

from pointsman.ops.kernels import exporting


def top_k(values: Tensor, k: int) -> Tensor:
    """Indices [..., k] of the k largest of `values` [..., E], the largest first; of equal values the lowest index.

    (torch.topk leaves open which of equal values it takes.) NaN counts as the largest.
    """
    values = values.detach()
    if _maxima_are_faster(values, k):
        return _repeated_maxima(values, k)
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def members(experts: Tensor, num_experts: int) -> Tensor:
    """[tokens, E] bool: whether a token chose an expert, of `experts` [tokens, k] with -1 = none."""
    hot = torch.zeros(experts.shape[0], num_experts + 1, dtype=torch.bool, device=experts.device)
    return hot.scatter_(1, experts + 1, True)[:, 1:]


def _maxima_are_faster(values: Tensor, k: int) -> bool:
    """Measured: a sort costs a fixed number of calls, so that it wins on little data, and on a GPU (tried: to 128)."""
    few = k * k <= 4 * values.shape[-1] and values.device.type == "cpu"
    return few and not exporting() and values.numel() > 4096  # an export has no rule for a number of tokens


def _repeated_maxima(values: Tensor, k: int) -> Tensor:
    chosen = [values.max(-1, keepdim=True).indices]
    if k > 1:
        left = values.clamp_min(torch.finfo(values.dtype).min)  # above what marks a chosen one
        while len(chosen) < k:
            left.scatter_(-1, chosen[-1], -torch.inf)
            chosen.append(left.max(-1, keepdim=True).indices)
    return torch.cat(chosen, -1)
