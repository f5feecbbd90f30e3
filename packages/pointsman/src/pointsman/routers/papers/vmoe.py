"""V-MoE (Riquelme et al. 2021, arXiv 2106.05974): noisy softmax over all experts, importance and load losses."""

from __future__ import annotations

import torch
from torch import Tensor

from pointsman.ops.drawing import randn_like
from pointsman.routers.frame.entries import LayerSpec, NotNegative, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored
from pointsman.routers.frame.stages import Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext


class NoisyScorer(LinearScorer):
    """z' = W h + N(0, (noise / E)^2) in training, z = W h in evaluation; keeps the clean z for the losses."""

    accepts_half = True

    def __init__(self, dim: int, num_experts: int, noise: float) -> None:
        super().__init__(dim, num_experts, bias=False, noise=noise / num_experts)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:  # type: ignore[override]
        deviation, self.noise = self.noise, 0.0
        try:
            clean = super().forward(hidden, context)
        finally:
            self.noise = deviation
        noisy = clean + deviation * randn_like(clean, self.ranks) if self.training and deviation else clean
        return Scored(noisy, {"clean": clean})

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
        if not (self.training and self.noise and len(clean)):
            return clean.new_zeros(())
        threshold = given.logits.topk(given.experts.shape[-1], dim=-1).values[:, -1:]
        chosen = 1 - torch.special.ndtr((threshold - clean) / self.noise)
        return _variation(given.token_mean(chosen))


def _variation(loads: Tensor) -> Tensor:
    """Variance over squared mean, of the population."""
    return loads.var(correction=0) / loads.mean().square().clamp_min(torch.finfo(loads.dtype).tiny)


@register_router("vmoe", paper="Riquelme et al. 2021, arXiv 2106.05974", renormalize=False)
def vmoe(
    layer: LayerSpec, *, noise: NotNegative = 1.0, importance: NotNegative = 0.005, load: NotNegative = 0.005
) -> Stages:
    """p = softmax(W h + noise), top-k of p, weights not renormalised; importance and load losses.

    noise: times 1/E is the standard deviation of the noise on the logits in training.
    importance: weight of the squared coefficient of variation of the experts' summed probabilities.
    load: the same of the probability that an expert is chosen under a new draw of the noise.
    """
    scorer = NoisyScorer(layer.dim, layer.num_experts, noise)
    losses = {"importance": Loss(scorer.importance, importance), "load": Loss(scorer.load, load)}
    return Stages(scorer, losses=losses)
