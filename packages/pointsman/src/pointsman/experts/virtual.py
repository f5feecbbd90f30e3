"""What virtual experts add to a layer's output (AdaMoE, MoE++: `pointsman.routers.frame.steps`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pointsman.ops.linear import linear


class VirtualExperts(nn.Module):
    """sum_v w_v E_v(x): zero experts give 0, copies x, constants a_1 x + a_2 v with [a_1, a_2] = softmax(W x).

    Args:
        dim: width of input and output.
        kinds: "zero", "copy" or "constant" for each of the V virtual experts.

    Shapes of the parameters of C constants: `weight` [C, 2, dim] (their W), `value` [C, dim] (their v, from N(0, 1) /
    sqrt(dim)).
    """

    role = "virtual-experts"
    no_decay = ("value",)

    def __init__(self, dim: int, kinds: Sequence[str]) -> None:
        super().__init__()
        self.dim, self.kinds = dim, tuple(kinds)
        self.copies, self.constants = (
            slice(self.kinds.index(kind), self.kinds.index(kind) + self.kinds.count(kind)) if kind in kinds else None
            for kind in ("copy", "constant")
        )
        count = self.kinds.count("constant")
        self.weight = nn.Parameter(torch.empty(count, 2, dim)) if count else None
        self.value = nn.Parameter(torch.empty(count, dim)) if count else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W as nn.Linear starts: U(-1/sqrt(dim), 1/sqrt(dim)); v ~ N(0, 1/dim)."""
        if self.weight is not None and self.value is not None:
            nn.init.uniform_(self.weight, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))
            nn.init.normal_(self.value, std=1 / math.sqrt(self.dim))

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """hidden [tokens, dim], weights [tokens, V] -> [tokens, dim]."""
        own = weights.new_zeros(weights.shape[0], 1) if self.copies is None else weights[:, self.copies].sum(-1, True)
        if self.constants is None or self.weight is None or self.value is None:
            return own.to(hidden.dtype) * hidden
        scores = linear(hidden, self.weight.flatten(0, 1)).view(hidden.shape[0], len(self.weight), 2)
        shares = torch.softmax(scores.to(weights.dtype), -1) * weights[:, self.constants, None]
        own = (own + shares[..., 0].sum(-1, True)).to(hidden.dtype)
        return own * hidden + shares[..., 1].to(hidden.dtype) @ self.value.to(hidden.dtype)

    def extra_repr(self) -> str:
        return ", ".join(f"{self.kinds.count(kind)} {kind}" for kind in dict.fromkeys(self.kinds))
