"""Forced balance, for speed tests: experts in turn, whatever the scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class InTurn(Selector):
    """Token n of the batch takes the experts (n k + j) mod E, j < k; weights are their probabilities."""

    batch_invariant = False  # the place in the batch decides

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        tokens, num_experts = probs.shape
        experts = torch.arange(tokens * k, device=probs.device).remainder(num_experts).view(tokens, k)
        return experts, self.renormalized(probs.gather(-1, experts))


@register_router("forced", paper="for speed tests", scores=linear_scores, defaults={"bias": False})
def forced(layer: LayerSpec, stages: Stages) -> Stages:
    """Forced balance, for speed tests: token n takes the experts (n k + j) mod E, with weights softmax(W h)."""
    return replace(stages, select=InTurn(layer.renormalize))
