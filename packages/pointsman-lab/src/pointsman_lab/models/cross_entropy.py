"""Cross entropy of a linear output layer over a large vocabulary, in parts of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops.relative import alignment

ELEMENTS = 2**25  # logits in memory at once: 128 MB in float32


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(W h + b)[target] for each token, without keeping the logits.

    Args:
        hidden: [tokens, dim].
        weight, bias: [vocabulary, dim], [vocabulary].
        targets: [tokens] int64, each in the vocabulary.

    Returns:
        [tokens], nats, at least float32. Under autocast the products run in autocast's dtype.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    losses: Tensor = _LinearCrossEntropy.apply(hidden.to(dtype), weight, bias, targets)  # type: ignore[no-untyped-call]
    return losses


def _columns(tokens: int, vocabulary: int) -> list[slice]:
    """Parts of the vocabulary; the logits of one part are in memory at a time."""
    size = max(64, ELEMENTS // max(1, tokens))
    return [slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _aligned(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """On a GPU, a part of the vocabulary with more words, of probability 0: its rows are to be aligned."""
    more = -len(weight) % alignment(weight.device)
    return (F.pad(weight, (0, 0, 0, more)), F.pad(bias, (0, more), value=-torch.inf)) if more else (weight, bias)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.add_(bias.to(logits.dtype))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        normalizer = hidden.new_full((len(hidden),), -torch.inf, dtype=exact)
        chosen = torch.zeros_like(normalizer)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _columns(len(hidden), len(weight)):
                logits = _logits(hidden, *_aligned(weight[part].to(hidden.dtype), bias[part]))
                normalizer = torch.logaddexp(normalizer, torch.logsumexp(logits, -1))
                place, inside = _within(targets, part)
                chosen += logits.gather(1, place[:, None])[:, 0] * inside
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        return normalizer - chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden, dtype=normalizer.dtype)
        d_weight, d_bias = torch.empty_like(weight), torch.empty_like(bias)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _columns(len(hidden), len(weight)):
                cast, of_part = _aligned(weight[part].to(hidden.dtype), bias[part])
                size = part.stop - part.start
                d_logits = _logits(hidden, cast, of_part).sub_(normalizer[:, None]).exp_()
                place, inside = _within(targets, part)
                d_logits.scatter_add_(1, place[:, None], -inside[:, None].to(d_logits.dtype))
                d_logits.mul_(gradient[:, None])
                d_bias[part] = d_logits.sum(0)[:size]
                d_logits = d_logits.to(hidden.dtype)
                d_hidden += d_logits @ cast
                d_weight[part] = (d_logits.t() @ hidden)[:size]
        return d_hidden.to(hidden.dtype), d_weight, d_bias, None


def _within(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Each target's place in a part of the vocabulary, and whether it lies there (otherwise the place is undefined)."""
    place = targets - part.start
    inside = (place >= 0) & (place < part.stop - part.start)
    return place.clamp(0, part.stop - part.start - 1), inside
