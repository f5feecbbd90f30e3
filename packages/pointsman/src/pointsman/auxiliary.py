"""Auxiliary losses: pure functions, masked for padding. Perfect balance is 1.0 in every balance loss.

Shapes: N tokens, B sequences, T tokens a sequence, E experts, k chosen experts.
Where `ranks` share a batch, means and counts are those of the whole batch; gradients are those of the own tokens.
"""

from typing import Any

import torch
from torch import Tensor

from pointsman.ranks import ALONE, Ranks


def token_mean(values: Tensor, mask: Tensor | None, ranks: Ranks = ALONE) -> Tensor:
    """Mean over tokens of `values` [N, ...]; `mask` [N] leaves padding out. Zero where no token is real."""
    if mask is None and ranks.count == 1:
        return values.mean(0) if len(values) else values.sum(0)
    count = torch.full((), len(values), device=values.device) if mask is None else mask.sum()
    if mask is not None:
        values = values.masked_fill(~mask.reshape(-1, *(1,) * (values.dim() - 1)), 0)  # also where padding is NaN
    return ranks.whole(values.sum(0)) / ranks.total(count)[0].clamp_min(1)


def assignment_counts(experts: Tensor, num_experts: int) -> Tensor:
    """[..., E] int64: how often each expert is in `experts` [..., N, k]; -1 is not counted."""
    chosen = experts.flatten(-2)
    place = torch.where(chosen < 0, num_experts, chosen)
    counts = torch.zeros(*place.shape[:-1], num_experts + 1, dtype=torch.int64, device=place.device)
    return counts.scatter_add_(-1, place, torch.ones_like(place))[..., :num_experts]


def balance(
    probs: Tensor, experts: Tensor, mask: Tensor | None = None, *, earlier_counts: Tensor | None = None,
    ranks: Ranks = ALONE,
) -> Tensor:  # fmt: skip
    """L = E sum_i f_i P_i: f_i the share of the assignments, P_i the mean probability (Switch Transformer, Eq. 4).

    1.0 where both are uniform; the gradient goes through P only.

    Args:
        probs: [N, E], the full distribution.
        experts: [N, k], the chosen experts.
        mask: [N] bool, True for a real token.
        earlier_counts: [E], assignments of earlier micro-batches that f counts, too. Backward takes f as it was here,
            also where activation checkpointing does the forward again after these have changed.
        ranks: who shares the batch.
    """
    counts = assignment_counts(experts, probs.shape[-1])
    if earlier_counts is not None:
        counts = counts + earlier_counts
    (counts,) = ranks.total(counts)
    shares, means = counts.to(probs.dtype) / counts.sum().clamp_min(1), token_mean(probs, mask, ranks)
    if earlier_counts is None:
        return probs.shape[-1] * (shares * means).sum()
    total: Tensor = SumOfFirstForward.apply(shares, means)  # type: ignore[no-untyped-call]
    return probs.shape[-1] * total


class SumOfFirstForward(torch.autograd.Function):
    """sum_i f_i P_i. f is no saved tensor: activation checkpointing takes those from a second forward."""

    @staticmethod
    def forward(shares: Tensor, means: Tensor) -> Tensor:
        return (shares * means).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.shares = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0] * ctx.shares


def sequence_balance(probs: Tensor, experts: Tensor, mask: Tensor | None = None, *, ranks: Ranks = ALONE) -> Tensor:
    """The balance loss of each sequence, and their mean (DeepSeek-V3, Eq. 17-20, divided by its factor).

    Args:
        probs: [B, T, E].
        experts: [B, T, k].
        mask: [B, T] bool; sequences of padding alone count nothing.
    """
    counts = assignment_counts(experts, probs.shape[-1])
    shares = counts.to(probs.dtype) / counts.sum(-1, keepdim=True).clamp_min(1)
    if mask is None:
        means = probs.sum(1) / max(probs.shape[1], 1)
        return token_mean(probs.shape[-1] * (shares * means).sum(-1), None, ranks)
    means = probs.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp_min(1)
    return token_mean(probs.shape[-1] * (shares * means).sum(-1), mask.any(1), ranks)


def z_loss(logits: Tensor, mask: Tensor | None = None, ranks: Ranks = ALONE) -> Tensor:
    """Mean over tokens of (log sum_i exp z_i)^2 (ST-MoE): keeps the logits [N, E] small."""
    return token_mean(torch.logsumexp(logits, -1).square(), mask, ranks)
