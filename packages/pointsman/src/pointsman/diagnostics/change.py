"""Routing fluctuation: the difference between two routings of the same tokens (checkpoints, models, values of k)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pointsman.diagnostics.base import Diagnostic, chosen, counts, first_choice, ratio
from pointsman.ops.selection import members
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
        num_experts = routing.num_experts
        first, second = first_choice(routing, mask), first_choice(other, mask)
        real = (first >= 0) & (second >= 0)
        changed = (first != second) & real
        in_one, in_two = (members(chosen(each, mask), num_experts) for each in (routing, other))
        common = (in_one & in_two).sum(-1).double()
        least = torch.minimum(in_one.sum(-1), in_two.sum(-1)).double().clamp_min(1)
        overlap = torch.where(real, common / least, 0.0).sum()
        tokens = real.sum().double()
        same_k = float(routing.experts.shape[-1] == other.experts.shape[-1])
        sets = ((in_one != in_two).any(-1) & real).sum() * same_k
        self._add(
            sums=torch.stack([tokens, changed.sum().double(), sets.double(), overlap, tokens * same_k]),
            by_first=torch.stack([counts(first.where(of, -1), num_experts) for of in (real, changed)], -1),
        )

    def result(self) -> dict[str, Any]:
        tokens, top1, sets, overlap, equal = [0.0] * 5 if self.sums is None else self.sums.tolist()
        by_first = [] if self.by_first is None else self.by_first.tolist()
        return {
            "tokens": int(tokens),
            "top1": ratio(top1, tokens),
            "sets": ratio(sets, equal),
            "overlap": ratio(overlap, tokens),
            "by_expert": [ratio(changed, total) for total, changed in by_first],
        }
