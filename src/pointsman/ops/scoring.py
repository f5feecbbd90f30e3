"""Router scores: a tall, narrow matrix product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., dim] times weight [E, dim] transposed, plus bias [E]: [..., E]."""
    return F.linear(hidden, weight, bias)
