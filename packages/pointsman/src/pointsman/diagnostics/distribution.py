"""Statistics of the router's distribution: entropy before and after mixing, and the margin of the choice."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from pointsman.diagnostics.base import Given, Moments, RoutingDiagnostic, chosen, ratio, unmixed
from pointsman.routing import Routing


def entropies(probs: Tensor) -> Tensor:
    """H = -sum_i p_i ln p_i of each row [tokens, E], in nats and float64; rows are first normalised to sum 1."""
    probs = probs.detach().double()
    total = probs.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(probs / torch.where(total > 0, total, 1.0)).sum(-1)
    return entropy


class Entropy(RoutingDiagnostic):
    """Entropy of the router's full distribution over all E experts, before top-k, averaged over tokens.

    H_t = -sum_i p_ti ln p_ti in nats (HyperRouter, Tables 4 and A5); `uniform`: ln E, virtual experts included. `mean`
    and `std` (population, over tokens) are of the distribution before mixing: the softmax of all logits, or sigmoids
    normalised to sum 1; `mixed_mean` and `mixed_std` of the distribution after mixing; `ratio` = mixed_mean / mean
    (Mutual-Inform's ratio is to another model: see `diagnose`, `against`). `chosen_mean`: of the normalised combine
    weights of the k chosen.
    """

    def __init__(self) -> None:
        self.before, self.after, self.weights = Moments(), Moments(), Moments()
        self.columns = 0

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        self.columns = routing.probs.shape[-1]
        before = unmixed(routing)
        of_before = entropies(before)
        self.before.add(of_before, mask)
        self.after.add(of_before if before is routing.probs else entropies(routing.probs), mask)
        experts = chosen(routing, mask)
        self.weights.add(entropies(routing.weights.masked_fill(experts < 0, 0)), (experts >= 0).any(-1))

    def merge(self, other: Self) -> Self:
        self.columns = self.columns or other.columns
        return super().merge(other)

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.before.count,
            "mean": self.before.mean,
            "std": self.before.std,
            "mixed_mean": self.after.mean,
            "mixed_std": self.after.std,
            "ratio": ratio(self.after.mean, self.before.mean),
            "chosen_mean": self.weights.mean,
            "uniform": math.log(self.columns) if self.columns else None,
        }


class Margin(RoutingDiagnostic):
    """The margin of the choice, m_t = p_(k) - p_(k+1): the sorted probabilities after mixing.

    `mean`, `std` (population, over tokens); `first_mean` of p_(1) - p_(2). None for k = E and for expert choice. A
    selection bias is not part of the probabilities.
    """

    def __init__(self) -> None:
        self.margin, self.first = Moments(), Moments()

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        k, columns = routing.experts.shape[-1], routing.probs.shape[-1]
        if columns < 2 or routing.by_experts:
            return
        best = routing.probs.detach().topk(min(k + 1, columns), dim=-1).values.double()
        if k < columns:
            self.margin.add(best[:, k - 1] - best[:, k], mask)
        self.first.add(best[:, 0] - best[:, 1], mask)

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.margin.count,
            "mean": self.margin.mean,
            "std": self.margin.std,
            "first_mean": self.first.mean,
        }
