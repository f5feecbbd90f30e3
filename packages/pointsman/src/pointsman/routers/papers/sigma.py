"""sigma-MoE (Csordas et al. 2023, arXiv 2310.10837): sigmoid gates, experts dropped from the choice in training."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from pointsman.ops.drawing import rand_like
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import BelowOne, LayerSpec, NotNegative, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scores
from pointsman.routers.frame.stages import Selector, Sigmoid, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext


class DroppedTopK(Selector):
    """Top-k of the experts that a mask leaves: m_ne ~ Bernoulli(1 - dropout) in training, all of them in evaluation.

    Weights are the probabilities, not scaled up afterwards. A masked expert is never chosen: where fewer than k are
    left, the rest is -1. (One published code masks with -inf and lets it into the weights.)
    """

    def __init__(self, dropout: float, renormalize: bool) -> None:
        super().__init__(renormalize)
        self.dropout = dropout
        self.training_stochastic = dropout > 0

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        choice, probs = scores.choice.flatten(0, 1), scores.probs.flatten(0, 1)
        if self.training and self.dropout:
            choice = choice.masked_fill(rand_like(choice.float(), self.ranks) < self.dropout, -math.inf)
        experts = top_k(choice, k)
        none = choice.gather(-1, experts).isneginf()
        return experts.masked_fill(none, -1), self.renormalized(probs.gather(-1, experts).masked_fill(none, 0))


def negative_entropy(given: LossInput) -> Tensor:
    """sum_e q_e ln q_e + ln E, q the mean of softmax(z) over the batch's real tokens; 0 where q is uniform."""
    q = given.token_mean(torch.softmax(given.logits, -1))
    negative = (q * q.clamp_min(torch.finfo(q.dtype).tiny).log()).sum()  # finite gradient at q = 0
    return negative + math.log(q.shape[-1]) * q.detach().sum()  # 1; without tokens 0


def unit_rows(layer: LayerSpec) -> Stages:
    """Sigmoids of a trained linear map whose rows start with norm 1."""
    scorer = LinearScorer(layer.dim, layer.columns, bias=False)
    with torch.no_grad():  # a standard deviation of d^-1/2
        scorer.weight.div_(scorer.weight.norm(dim=-1, keepdim=True))
    return Stages(scorer, Sigmoid())


@register_router("sigma", paper="Csordas et al. 2023, arXiv 2310.10837", scores=unit_rows, renormalize=False)
def sigma(layer: LayerSpec, stages: Stages, *, dropout: BelowOne = 0.05, entropy: NotNegative = 0.001) -> Stages:
    """s = sigmoid(W h); top-k of the experts that are not dropped; weights s as they are.

    dropout: probability with which an expert is left out of a token's choice in training.
    entropy: weight of the loss sum_e q_e ln q_e + ln E, q the mean of softmax(W h) over the batch.
    """
    losses = {"entropy": Loss(negative_entropy, entropy)}
    return replace(stages, select=DroppedTopK(dropout, layer.renormalize), losses=losses)
