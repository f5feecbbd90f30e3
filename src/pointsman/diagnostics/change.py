"""How far two routings of the same tokens differ: between checkpoints, between models, between values of k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pointsman.diagnostics.base import Diagnostic, chosen, first_choice, number
from pointsman.routing import Routing


class Fluctuation(Diagnostic):
    """Routing fluctuation: the share of tokens whose experts differ between two routings of the same inputs.

    `top1` = mean_t [first expert_a(t) != first expert_b(t)] (X-MoE's RF; both models in evaluation, nothing dropped).
    `sets` = mean_t [{experts_a(t)} != {experts_b(t)}], order left out: "one or both choices" switch (Mutual-Inform,
    k = 2); None where the two have different k. `overlap` = mean_t |A & B| / min(|A|, |B|), whatever the order.
    `by_expert`: of the tokens whose first expert in a was i, the share that left it. Tokens without an expert in
    either are left out. The first expert is that of the greatest combine weight.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # tokens, changed first, changed sets, overlap, of equal k
        self.stayed: Tensor | None = None  # [E, 2]: tokens whose first expert was i, and that left it

    def update(self, routing: Routing, other: Routing, mask: Tensor | None = None) -> None:
        """Takes in two routings of the same tokens; `mask` [tokens], True for a real token."""
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
        moved = (first != second) & real
        sets = (in_one != in_two).any(-1) & real
        tokens = real.sum().double()
        equal = tokens if one.shape[-1] == two.shape[-1] else torch.zeros_like(tokens)
        sums = torch.stack(
            [
                tokens,
                moved.sum().double(),
                sets.sum().double() if one.shape[-1] == two.shape[-1] else torch.zeros_like(tokens),
                torch.where(real, common / least, 0.0).sum(),
                equal,
            ]
        )
        place = torch.where(real, first + 1, 0)
        both = torch.stack([real, moved], -1).double()
        stayed = torch.zeros(routing.num_experts + 1, 2, dtype=torch.float64, device=place.device)
        stayed = stayed.index_add_(0, place, both)[1:]
        self.sums = sums if self.sums is None else self.sums + sums
        self.stayed = stayed if self.stayed is None else self.stayed + stayed

    def result(self) -> dict[str, Any]:
        if self.sums is None or self.stayed is None:
            return {"tokens": 0, "top1": None, "sets": None, "overlap": None, "by_expert": []}
        tokens, top1, sets, overlap, equal = self.sums.tolist()
        by_expert = [number(left / total) if total else None for total, left in self.stayed.tolist()]
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
