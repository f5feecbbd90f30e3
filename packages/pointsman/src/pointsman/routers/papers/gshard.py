"""GShard's gate: the second expert at random (Lepikhin et al. 2020, arXiv 2006.16668)."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pointsman.ops.drawing import own_rows, rand_like
from pointsman.ops.selection import members, top_k
from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import LossInput, Scores, Selection
from pointsman.routers.frame.stages import FLOOR, Selector, Stages, of_chosen
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext

THRESHOLD = 0.2  # of Mesh TensorFlow's rule
Second = Literal["random", "threshold", "sampled", "all"]


class FirstAndSecond(Selector):
    """The k best of p, w_j = p_j / sum of the k; the first is always kept, the others by a rule.

    "random" (the paper, k = 2: g_2 in proportion to its doubled weight): choice j is kept if k w_j > U(0, 1).
    "threshold" (Mesh TensorFlow): if w_j / 0.2 > U(0, 1). "sampled" (DeepSpeed): all are kept, but the others are drawn
    without replacement in proportion to p. "all": all are kept. Weights are not renormalised after a drop.
    """

    def __init__(self, renormalize: bool, second: Second, second_eval: Second) -> None:
        super().__init__(renormalize)
        self.second, self.second_eval = second, second_eval
        self.stochastic = second_eval != "all"
        self.training_stochastic = second != "all"
        self.ragged = second_eval in ("random", "threshold")

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs, choice = scores.probs.flatten(0, 1), scores.choice.flatten(0, 1).detach()
        rule = self.second if self.training else self.second_eval
        experts = top_k(choice, k)
        if rule == "sampled" and k > 1:
            gumbel = -own_rows(lambda shape: choice.new_empty(shape).exponential_(), choice.shape, self.ranks).log()
            # where p is 0 in floating point, still above the first, which is taken
            drawn = (probs.detach().log().clamp_min(-1e3) + gumbel).scatter(1, experts[:, :1], -torch.inf)
            experts = torch.cat([experts[:, :1], top_k(drawn, k - 1)], 1)
        weights = self.renormalized(probs.gather(-1, experts))
        if rule in ("random", "threshold") and k > 1:
            factor = k if rule == "random" else 1 / THRESHOLD
            others = weights[:, 1:].detach()
            lost = factor * others <= rand_like(others, self.ranks)
            lost = torch.cat([torch.zeros_like(lost[:, :1]), lost], 1)
            experts, weights = experts.masked_fill(lost, -1), weights.masked_fill(lost, 0)
        return experts, weights

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        """A choice that was dropped counts in the sum, as the best of the experts that are not given."""
        if not self.renormalize:
            return super().replay(scores, experts)
        probs, lost = scores.probs.flatten(0, 1), experts < 0
        others = probs.masked_fill(members(experts, probs.shape[1]), 0).sort(-1, descending=True).values
        dropped = torch.arange(probs.shape[1], device=probs.device) < lost.sum(-1, keepdim=True)
        weights = of_chosen(probs, experts)
        total = weights.sum(-1, keepdim=True) + (others * dropped).sum(-1, keepdim=True)
        return Selection(experts, weights / total.clamp_min(FLOOR))


def first_choices(given: LossInput) -> Tensor:
    """What the balance loss counts: each token's best expert [N, 1]."""
    return given.experts[:, :1]


@register_router(
    "gshard", paper="Lepikhin et al. 2020, arXiv 2006.16668", scores=linear_scores, defaults={"bias": False},
    balance=0.01,
)  # fmt: skip
def gshard(layer: LayerSpec, stages: Stages, *, second: Second = "random", second_eval: Second = "all") -> Stages:
    """GShard: softmax, top-2, the second expert kept at random in training; balance loss 0.01 over first choices.

    second: which choices after the first are kept in training: with probability min(1, k w) (random, the paper),
        min(1, w / 0.2) (threshold, Mesh TensorFlow), all of them, but drawn by p (sampled, DeepSpeed), or all.
    second_eval: the same in evaluation.
    """
    return replace(stages, select=FirstAndSecond(layer.renormalize, second, second_eval), counted=first_choices)
