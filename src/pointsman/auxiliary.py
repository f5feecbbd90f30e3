"""Auxiliary losses: pure functions, masked for padding. Perfect balance is 1.0 in every balance loss."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over tokens of `values` [tokens, ...]; `mask` [tokens] leaves padding out. Zero where no token is real."""
    if mask is None:
        return values.mean(0) if len(values) else values.sum(0)
    real = values.masked_fill(~mask.reshape(-1, *(1,) * (values.dim() - 1)), 0)  # also where padding is NaN
    return real.sum(0) / mask.sum().clamp_min(1)


def assignment_shares(experts: Tensor, num_experts: int) -> Tensor:
    """f_i [E]: the share of all assignments that expert i received; -1 in `experts` [tokens, k] is not counted."""
    chosen = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.float32, device=chosen.device)
    counts = counts.index_add(
        0, torch.where(chosen < 0, num_experts, chosen), torch.ones_like(chosen, dtype=torch.float32)
    )
    counts = counts[:num_experts]
    return counts / counts.sum().clamp_min(1)


def balance(probs: Tensor, experts: Tensor, mask: Tensor | None = None) -> Tensor:
    """L = E sum_i f_i P_i: f_i the share of the assignments, P_i the mean probability (Switch Transformer, Eq. 4).

    1.0 where both are uniform; the gradient goes through P only.

    Args:
        probs: [tokens, E], the full distribution.
        experts: [tokens, k], the chosen experts.
        mask: [tokens] bool, True for a real token.
    """
    shares = assignment_shares(experts, probs.shape[-1]).to(probs.dtype)
    return probs.shape[-1] * (shares * token_mean(probs, mask)).sum()


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over tokens of (log sum_i exp z_i)^2 (ST-MoE): keeps the logits [tokens, E] small."""
    return token_mean(torch.logsumexp(logits, -1).square(), mask)
