"""THOR (Zuo et al. 2022): experts at random, trained so that two random choices agree."""

from dataclasses import replace

import torch
from torch import Tensor

from pointsman.routers.frame.entries import LayerSpec, NotNegative, register_router
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import Scorer, Selector, Stages
from pointsman.routing import RoutingContext


def equal_weights(scores: Scores, experts: Tensor) -> Selection:
    """The given experts [N, width], each with weight 1 / their number at the token."""
    chosen = experts >= 0
    weights = chosen.to(scores.probs.dtype)
    return Selection(experts, weights / weights.sum(-1, keepdim=True).clamp_min(1))


class NoScorer(Scorer):
    """z = 0: every expert alike."""

    tells_apart = False

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return torch.zeros(*hidden.shape[:-1], self.num_experts, dtype=hidden.dtype, device=hidden.device)


class RandomExperts(Selector):
    """Experts drawn uniformly, each with weight 1/k (THOR, Zuo et al. 2022).

    Training: one set of k experts for the whole forward. Evaluation: one for each token.
    """

    stochastic = True
    overrides = frozenset({"balance", "z_loss", "mixer"})  # of scores that are all 0

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        tokens, num_experts = probs.shape
        draws = torch.rand(1 if self.training else tokens, num_experts, device=probs.device)
        experts = draws.topk(k, dim=-1).indices.expand(tokens, k)
        return experts, torch.full((tokens, k), 1 / k, dtype=probs.dtype, device=probs.device)

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        return equal_weights(scores, experts)


def no_scores(layer: LayerSpec) -> Stages:
    """None: every expert alike."""
    return Stages(NoScorer(layer.columns))


@register_router("thor", paper="Zuo et al. 2022, arXiv 2110.04260", scores=no_scores, needs="nothing")
def thor(layer: LayerSpec, stages: Stages, *, alpha: NotNegative = 1.0) -> Stages:
    """THOR: experts drawn uniformly, weights 1/k; one set of k for the whole forward in training, per token afterwards.

    alpha: weight of the consistency term. The trainer runs two passes and minimises (L1 + L2 + alpha * C) / 2 with
    C = 1/2 mean over tokens of sum_v (p - q)(log p - log q), the symmetric KL divergence of the two predictions.
    """
    return replace(stages, select=RandomExperts(), objective="consistency", objective_weight=alpha)
