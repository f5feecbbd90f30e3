"""BASE layers (Lewis et al. 2021, arXiv 2103.16716): training assigns tokens to experts in balance, at best score."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.frame.stages import Selector, Sigmoid, Stages
from pointsman.routers.papers.assignment import balanced_assignment
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext

GAIN = 0.1


class Assigned(Selector):
    """Training: the balanced assignment of the group's tokens with the largest sum of scores. Evaluation: the k best.

    Weights are the probabilities of the chosen experts; no gradient goes through the choice.
    """

    training_causal = False

    def __init__(self, group: str, renormalize: bool) -> None:
        super().__init__(renormalize)
        self.group = group
        self.training_batch_invariant = group == "sequence"

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        choice = scores.choice.detach()
        if self.training:
            mask, own = context.padding_mask, slice(None)
            if self.group == "batch":
                choice, mask, own = self.whole_batch(choice, mask)
            experts = balanced_assignment(choice, mask, k).flatten(0, 1)[own]
        else:
            experts = top_k(choice.flatten(0, 1), k)
        return experts, self.renormalized(scores.probs.flatten(0, 1).gather(-1, experts.clamp_min(0)))


def centroids(layer: LayerSpec) -> Stages:
    """Sigmoids of products with trained centroids, which start orthogonal."""
    scorer = LinearScorer(layer.dim, layer.columns, bias=False)
    nn.init.orthogonal_(scorer.weight, gain=GAIN)
    return Stages(scorer, Sigmoid())


@register_router("base", paper="Lewis et al. 2021, arXiv 2103.16716", scores=centroids, renormalize=False)
def base(layer: LayerSpec, stages: Stages, *, group: Literal["batch", "sequence"] = "batch") -> Stages:
    """z = C h, weights sigmoid(z). Training: equal loads at the largest sum of scores; evaluation: the k best.

    group: whose tokens are assigned together: the batch's, or each sequence's.
    """
    return replace(stages, select=Assigned(group, layer.renormalize))
