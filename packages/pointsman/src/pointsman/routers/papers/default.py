"""Default MoE (Panda et al. 2025, arXiv 2504.12463): means of earlier outputs stand for the experts not chosen."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pointsman.experts.combine import PerPair
from pointsman.ops.selection import members, top_k
from pointsman.routers.frame.entries import BelowOne, LayerSpec, register_router
from pointsman.routers.frame.stage_values import LossInput, Scores, Selection
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class WithMeans(Selector):
    """A = top-k of p; y = sum_(e in A) p_e E_e(h) + sum_(e not in A) p_e m_e. The layer computes the second sum.

    After each step m_e = decay m_e + (1 - decay) mean of E_e's outputs over the tokens that it served in the step; an
    expert that served none keeps its mean. m starts at 0.
    """

    needs_moe = True
    needs_step_end = True
    renormalize = False
    overrides = frozenset({"capacity_total", "weigh"})  # means stand for what is dropped, and are of outputs

    def __init__(self, dim: int, num_experts: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.means = nn.Buffer(torch.zeros(num_experts, dim))

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        experts = top_k(scores.choice.flatten(0, 1), k)
        return Selection(experts, scores.probs.flatten(0, 1).gather(-1, experts), self._combine(scores))

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        return replace(super().replay(scores, experts), how=self._combine(scores))

    def _combine(self, scores: Scores) -> PerPair:
        # a copy: `step_end` changes the buffer between forward and backward of a graph that is kept
        return PerPair(means=self.means.clone(), others=scores.probs.flatten(0, 1))

    def step_end(self) -> None:
        if "served" not in self.sums:
            return
        served = self.sums["served"][:, None]
        mean = (self.sums["outputs"] / served.clamp_min(1)).to(self.means)
        moves = (served > 0) & mean.isfinite()  # a step that a loss scaler skipped may have overflowed
        self.means.copy_(torch.where(moves, torch.lerp(mean, self.means, self.decay), self.means))


def means_of_others(selection: Selection, given: LossInput) -> Selection:
    """Means only for experts that a token did not choose, or that dropped it, and none for padding."""
    others = selection.combine.weights()["means"]
    gone = members(selection.experts, given.num_experts)
    gone = gone if given.mask is None else gone | ~given.mask[:, None]
    return replace(selection, how=selection.combine.weighted({"means": others.masked_fill(gone, 0)}))


@register_router(
    "default", paper="Panda et al. 2025, arXiv 2504.12463", scores=linear_scores, defaults={"bias": False},
    needs="distribution", renormalize=False,
)  # fmt: skip
def default(layer: LayerSpec, stages: Stages, *, decay: BelowOne = 0.9) -> Stages:
    """p = softmax(W h), top-k; an expert that is not chosen gives p times the running mean of its outputs.

    decay: of the running means, from step to step.
    """
    return replace(stages, select=WithMeans(layer.dim, layer.num_experts, decay), steps=(means_of_others,))
