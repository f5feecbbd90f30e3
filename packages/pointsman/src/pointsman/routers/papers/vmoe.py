"""V-MoE (Riquelme et al. 2021, arXiv 2106.05974): noisy softmax over all experts, importance and load losses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pointsman.ops.drawing import randn_like
from pointsman.routers.frame.entries import LayerSpec, NotNegative, register_router
from pointsman.routers.frame.scoring import extended
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored
from pointsman.routers.frame.stages import Scorer, Stages
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class Perturbed(Scorer):
    """z' = z + N(0, (noise / E)^2) in training, z in evaluation; keeps the clean z for the losses."""

    accepts_half = True
    deviation: float

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        scored = Scored.of(super().forward(hidden, context))
        clean, deviation = scored.logits, self.deviation
        noisy = clean + deviation * randn_like(clean, self.ranks) if self.training and deviation else clean
        return replace(scored, logits=noisy, extra={**scored.extra, "clean": clean})

    def importance(self, given: LossInput) -> Tensor:
        """(std / mean)^2 of the importance sum_t softmax(z)_t, over experts; 0 at balance. In training only."""
        clean = given.extra["clean"].flatten(0, 1)
        if not self.training:
            return clean.new_zeros(())
        return _variation(given.token_mean(torch.softmax(clean, -1)))

    def load(self, given: LossInput) -> Tensor:
        """(std / mean)^2 of the load mean_t P(e is chosen under a new draw of its noise); 0 at balance. Training only.

        P = 1 - Phi((threshold_t - z_te) / (noise / E)), the threshold being the k-th largest noisy logit.
        """
        clean = given.extra["clean"].flatten(0, 1)
        if not (self.training and self.deviation and len(clean)):
            return clean.new_zeros(())
        threshold = given.logits.topk(given.experts.shape[-1], dim=-1).values[:, -1:]
        chosen = 1 - torch.special.ndtr((threshold - clean) / self.deviation)
        return _variation(given.token_mean(chosen))


def _variation(loads: Tensor) -> Tensor:
    """Variance over squared mean, of the population."""
    return loads.var(correction=0) / loads.mean().square().clamp_min(torch.finfo(loads.dtype).tiny)


@register_router(
    "vmoe",
    paper="Riquelme et al. 2021, arXiv 2106.05974",
    scores=linear_scores,
    defaults={"bias": False, "noise": 0.0},
    needs="softmax",
    renormalize=False,
)
def vmoe(
    layer: LayerSpec,
    stages: Stages,
    *,
    noise: NotNegative = 1.0,
    importance: NotNegative = 0.005,
    load: NotNegative = 0.005,
) -> Stages:
    """p = softmax(W h + noise), top-k of p, weights not renormalised; importance and load losses.

    noise: times 1/E is the standard deviation of the noise on the logits in training.
    importance: weight of the squared coefficient of variation of the experts' summed probabilities.
    load: the same of the probability that an expert is chosen under a new draw of the noise.
    """
    scorer = extended(stages.score, Perturbed)
    scorer.deviation = noise / layer.num_experts
    scorer.training_stochastic = scorer.training_stochastic or noise > 0
    losses = {"importance": Loss(scorer.importance, importance), "load": Loss(scorer.load, load)}
    return replace(stages, score=scorer, losses=losses)
