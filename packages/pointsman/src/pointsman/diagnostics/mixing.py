"""Mixing: the weight of a token on itself, and the effective number of tokens that it is mixed with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pointsman.diagnostics.base import Diagnostic, Moments, chosen, unmixed
from pointsman.ops.selection import members
from pointsman.routing import Routing


class Mixing(Diagnostic):
    """S[i, i] and exp(H(S[i, :])) of the mixing matrix S in p_i = sum_j S[i, j] e_j (Mutual-Inform), over tokens.

    `own_mean`: the mean of S[i, i]; at 1 the mixer has no effect (as similarity with tau 1 on layer-normed inputs).
    `effective_mean`: the mean of exp(H(S[i, :])), the effective number of tokens that token i is mixed with, from 1;
    tokens of earlier segments count. Standard deviations are population ones, over tokens. `changed`: the share of
    tokens whose set of experts is not that of the k largest scores before mixing, of those with k experts.
    """

    def __init__(self) -> None:
        self.own, self.effective, self.changed = Moments(), Moments(), Moments()

    def update(self, own: Tensor, effective: Tensor, mask: Tensor | None = None) -> None:
        """Adds one forward: S[i, i] and the effective number, both [B, T]; `mask` [B, T], True for a real token."""
        mask = None if mask is None else mask.reshape(-1)
        self.own.add(own.reshape(-1), mask)
        self.effective.add(effective.reshape(-1), mask)

    def update_choice(self, routing: Routing, mask: Tensor | None = None) -> None:
        """Adds whether mixing changed the experts of each token; `mask` [tokens], True for a real token."""
        experts, before = chosen(routing, mask, virtual=True), unmixed(routing)
        alone = before.topk(experts.shape[-1], dim=-1).indices
        one, two = (members(each, before.shape[-1]) for each in (experts, alone))
        self.changed.add((one != two).any(-1), (experts >= 0).all(-1))

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.own.count,
            "own_mean": self.own.mean,
            "own_std": self.own.std,
            "effective_mean": self.effective.mean,
            "effective_std": self.effective.std,
            "changed": self.changed.mean,
        }
