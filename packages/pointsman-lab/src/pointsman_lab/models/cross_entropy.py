"""Cross entropy of a linear output layer over a large vocabulary, in parts of the tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pointsman.ops.linear import linear, upcast

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
