"""How far a mixer mixes: the weight that a token keeps for itself, and how many tokens inform it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pointsman.diagnostics.base import Diagnostic, Moments


class Mixing(Diagnostic):
    """S[i, i] and exp(H(S[i, :])) of the mixing matrix S, p_i = sum_j S[i, j] e_j (Mutual-Inform), over tokens.

    `own_mean`: 1 means that no other token informs token i, and the mixer does nothing (so it is for similarity with
    tau 1 on layer-normed inputs). `effective_mean`: the effective number of tokens that inform it, itself included,
    from 1 up; what was carried over from earlier segments counts. Population standard deviations over tokens.
    """

    def __init__(self) -> None:
        self.own, self.effective = Moments(), Moments()

    def update(self, own: Tensor, effective: Tensor, mask: Tensor | None = None) -> None:
        """Takes in one forward: S[i, i] and the effective number, both [B, T]; `mask` [B, T], True for a real token."""
        mask = None if mask is None else mask.reshape(-1)
        self.own.add(own.reshape(-1), mask)
        self.effective.add(effective.reshape(-1), mask)

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.own.count,
            "own_mean": self.own.mean,
            "own_std": self.own.std,
            "effective_mean": self.effective.mean,
            "effective_std": self.effective.std,
        }
