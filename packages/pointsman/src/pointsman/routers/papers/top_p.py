"""Top-p routing (Huang et al. 2024, arXiv 2403.07652; XMoE, Yang et al. 2024, arXiv 2403.18926)."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, NotNegative, Share, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scores
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.gshard import first_choices
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class TopP(Selector):
    """The smallest set of best experts whose probabilities reach tau: {(j): sum_{i<j} p_(i) < tau}, at most k of them.

    One expert is always among them.
    """

    ragged = True

    def __init__(self, tau: float, renormalize: bool) -> None:
        super().__init__(renormalize)
        self.tau = tau

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        experts = top_k(scores.choice.flatten(0, 1), k)
        weights = scores.probs.flatten(0, 1).gather(-1, experts)
        if self.tau < 1:
            beyond = weights.cumsum(-1) - weights >= self.tau
            beyond[:, :1].zero_()  # the best expert stays
            experts, weights = experts.masked_fill(beyond, -1), weights.masked_fill(beyond, 0)
        return experts, self.renormalized(weights)


def mean_entropy(given: LossInput) -> Tensor:
    """The mean over tokens of H(p_n), in nats: it keeps p sharp; without it the chosen sets grow."""
    p = given.unmixed
    entropy = -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1, keepdim=True)  # finite gradient at p = 0
    return given.token_mean(entropy).sum()


@register_router(
    "top-p", paper="Huang et al. 2024, arXiv 2403.07652", scores=linear_scores, defaults={"bias": False},
    needs="distribution", balance=0.01, renormalize=False, starts_at=lambda layer: layer.num_experts,
)  # fmt: skip
def top_p(
    layer: LayerSpec, stages: Stages, *, tau: Share = 0.4, dynamic: NotNegative = 0.0001,
    counted: Literal["all", "first"] = "all",
) -> Stages:  # fmt: skip
    """p = softmax(W h); the smallest set of best experts whose probabilities reach tau. k is a cap.

    tau: the probability that the chosen experts must reach together; 1 = all experts.
    dynamic: weight of the mean entropy of p.
    counted: what the balance loss counts: all chosen experts, or each token's best alone (XMoE).
    """
    select, losses = TopP(tau, layer.renormalize), {"dynamic": Loss(mean_entropy, dynamic)}
    return replace(stages, select=select, losses=losses, counted=first_choices if counted == "first" else None)
