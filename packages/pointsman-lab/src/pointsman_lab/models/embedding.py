"""Token embeddings, and the softmax over a vocabulary that stores no logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman.ops.linear import linear, upcast


class TokenEmbedding(nn.Module):
    """scale E[token] going in, softmax(W h + b) coming out; W is E if tied, b is 0 without a bias."""

    role = "embedding"

    def __init__(self, vocab_size: int, dim: int, *, scale: float = 1.0, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.output = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    @property
    def output_weight(self) -> Tensor:
        """[V, dim]."""
        return self.weight if self.output is None else self.output

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, dim]."""
        embedded = F.embedding(tokens, self.weight)
        return embedded if self.scale == 1 else embedded * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> [..., V]."""
        return linear(hidden, self.output_weight, self.bias)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Nats for each token: hidden [tokens, dim], targets [tokens] -> [tokens]."""
        return linear_cross_entropy(hidden, self.output_weight, self.bias, targets)


FEW_LOGITS = 2**22
"""Up to so many logits are kept for backward; of more, a part of the tokens at a time is computed, twice."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """-log softmax(W h + b)[target] for each token.

    Args:
        hidden: [tokens, dim].
        weight, bias: [vocabulary, dim], [vocabulary] or None.
        targets: [tokens] int64, each in the vocabulary.

    Returns:
        [tokens], nats, at least float32. Under autocast the products run in autocast's dtype.
    """

    def nats(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(upcast(linear(hidden, weight, bias)), targets, reduction="none")

    count = -(-len(hidden) // max(1, FEW_LOGITS // len(weight)))
    if count <= 1:
        return nats(hidden, targets)
    parts = zip(hidden.chunk(count), targets.chunk(count), strict=True)
    return torch.cat([checkpoint(nats, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
