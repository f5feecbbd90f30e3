"""Routing fluctuation: the difference between two routings of the same tokens (checkpoints, models, values of k)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pointsman.diagnostics.base import Diagnostic, chosen, first_choice, number
from pointsman.routing import Routing


class Fluctuation(Diagnostic):
    """Routing fluctuation: the share of tokens whose experts differ between two routings of the same inputs.

    `top1` = mean_t [first expert_a(t) != first expert_b(t)] (X-MoE's RF; both models in evaluation, nothing dropped).
    `sets` = mean_t [{experts_a(t)} != {experts_b(t)}], regardless of order: "one or both choices" switch
    (Mutual-Inform, k = 2); None if the two have different k. `overlap` = mean_t |A & B| / min(|A|, |B|).
    `by_expert`: for each expert i, the share of the tokens with first expert i in a that have another one in b.
    Tokens without an expert in a or b are not counted. The first expert is the one with the largest combine weight.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # tokens, changed first expert, changed sets, overlap, tokens of equal k
        self.by_first: Tensor | None = None  # [E, 2]: tokens with first expert i in a, and those that changed

    def update(self, routing: Routing, other: Routing, mask: Tensor | None = None) -> None:
        """Adds two routings of the same tokens; `mask` [tokens], True for a real token."""
        if routing.experts.shape[0] != other.experts.shape[0] or routing.num_experts != other.num_experts:
            raise ValueError(
                f"Fluctuation: routings of {routing.experts.shape[0]} tokens over {routing.num_experts} experts and of "
                f"{other.experts.shape[0]} over {other.num_experts}; both must be of the same tokens and experts"
            )
        one, two = chosen(routing, mask), chosen(other, mask)
        first, second = first_choice(routing, mask), first_choice(other, mask)
        real = (first >= 0) & (second >= 0)
        in_one, in_two = _members(one, routing.num_experts), _members(two, other.num_experts)
        common = (in_one & in_two).sum(-1).double()
        least = torch.minimum(in_one.sum(-1), in_two.sum(-1)).double().clamp_min(1)
        changed = (first != second) & real
        tokens = real.sum().double()
        same_k = float(one.shape[-1] == two.shape[-1])
        sets = ((in_one != in_two).any(-1) & real).sum() * same_k
        overlap = torch.where(real, common / least, 0.0).sum()
        sums = torch.stack([tokens, changed.sum().double(), sets.double(), overlap, tokens * same_k])
        index = torch.where(real, first + 1, 0)
        both = torch.stack([real, changed], -1).double()
        by_first = torch.zeros(routing.num_experts + 1, 2, dtype=torch.float64, device=index.device)
        by_first = by_first.index_add_(0, index, both)[1:]
        self.sums = sums if self.sums is None else self.sums + sums
        self.by_first = by_first if self.by_first is None else self.by_first + by_first

    def result(self) -> dict[str, Any]:
        if self.sums is None or self.by_first is None:
            return {"tokens": 0, "top1": None, "sets": None, "overlap": None, "by_expert": []}
        tokens, top1, sets, overlap, equal = self.sums.tolist()
        by_expert = [number(changed / total) if total else None for total, changed in self.by_first.tolist()]
        return {
            "tokens": int(tokens),
            "top1": top1 / tokens if tokens else None,
            "sets": sets / equal if equal else None,
            "overlap": overlap / tokens if tokens else None,
            "by_expert": by_expert,
        }


def _members(experts: Tensor, num_experts: int) -> Tensor:
    """[tokens, E] bool: whether a token chose an expert."""
    hot = torch.zeros(experts.shape[0], num_experts + 1, dtype=torch.bool, device=experts.device)
    return hot.scatter_(1, experts + 1, True)[:, 1:]
