"""THOR (Zuo et al. 2022): experts at random, trained so that two random choices agree."""

from __future__ import annotations

import torch
from torch import Tensor

from pointsman.routers.frame.entries import LayerSpec, NotNegative, register_router
from pointsman.routers.frame.select import RandomExperts
from pointsman.routers.frame.stages import Scorer, Stages
from pointsman.routing import RoutingContext


class NoScorer(Scorer):
    """z = 0: every expert alike."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return torch.zeros(*hidden.shape[:-1], self.num_experts, dtype=hidden.dtype, device=hidden.device)


@register_router("thor", paper="Zuo et al. 2022, arXiv 2110.04260")
def thor(layer: LayerSpec, *, alpha: NotNegative = 1.0) -> Stages:
    """THOR: experts drawn uniformly, weights 1/k; one set of k for the whole forward in training, per token afterwards.

    alpha: weight of the consistency term. The trainer runs two passes and minimises L1 + L2 + alpha * C with
    C = 1/2 mean over tokens of sum_v (p - q)(log p - log q), the symmetric KL divergence of the two predictions.
    """
    return Stages(NoScorer(layer.num_experts), select=RandomExperts(), objective="consistency", objective_weight=alpha)
