"""Expert Threshold (Sun et al. 2026, arXiv 2603.11535): an expert takes every token above a threshold of its own.

The thresholds follow the scores of earlier steps so that k experts pass on average: Expert Choice that is causal.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import BelowOne, LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import FLOOR, Selector, Stages
from pointsman.routers.papers.loss_free import column_histogram
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class AboveThreshold(Selector):
    """Expert e takes token n if s_ne > c_e(k); weights are s. Before the first step: the k best of s.

    c_e(k) is where a share k / E of the expert's scores lies above, in a histogram over (0, 1) that is a running mean
    of the steps' histograms; inside one of its bins scores count as uniform. k = E takes all experts.

    Args:
        num_experts: E.
        bins: of the histogram.
        decay: of the running mean: H = decay H + (1 - decay) H_step; the first step's is taken as it is.
    """

    ragged = True
    overrides = frozenset({"capacity_order=rank"})  # an expert has a column of its own: tokens come in turn
    needs_step_end = True

    def __init__(self, num_experts: int, bins: int, decay: float, renormalize: bool) -> None:
        super().__init__()
        self.num_experts, self.bins, self.decay, self.renormalize = num_experts, bins, decay, renormalize
        self.histogram = nn.Buffer(torch.zeros(num_experts, bins))
        self.steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def thresholds(self, k: int) -> Tensor:
        """c(k) [E]."""
        share = k / self.num_experts
        above = self.histogram.flip(1).cumsum(1)
        last = (above <= share).sum(1, keepdim=True).clamp_max(self.bins - 1)  # the bin, from the top, with the border
        mass = self.histogram.flip(1).gather(1, last)
        part = (share - (above.gather(1, last) - mass)) / mass.clamp_min(FLOOR)
        return (1 - (last + part.clamp(0, 1)) / self.bins)[:, 0]

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs.flatten(0, 1)
        best = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, top_k(scores.choice.flatten(0, 1), k), True)
        member = torch.where(self.steps > 0, probs > self.thresholds(k).to(probs.dtype), best)
        if k == self.num_experts:
            member = torch.ones_like(member)
        every = torch.arange(self.num_experts, device=probs.device)
        weights = self.renormalized(torch.where(member, probs, 0))
        statistics = {}
        if self.training:
            mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
            low, high = probs.new_zeros(()), probs.new_ones(())
            statistics = {"histogram": column_histogram(probs.detach(), low, high, self.bins, mask)}
        return Selection(torch.where(member, every, -1), weights, statistics=statistics)

    def step_end(self) -> None:
        counts = self.sums.get("histogram")
        if counts is None:
            return
        tokens = counts[0].sum()
        shares = counts.to(self.histogram.dtype) / tokens.clamp_min(1)
        moved = torch.where(self.steps > 0, self.histogram.lerp(shares, 1 - self.decay), shares)
        self.histogram.copy_(torch.where(tokens > 0, moved, self.histogram))
        self.steps += tokens > 0


@register_router(
    "expert-threshold", paper="Sun et al. 2026, arXiv 2603.11535", scores=linear_scores,
    defaults={"bias": False, "gate": "sigmoid"}, needs="share", renormalize=False,
)  # fmt: skip
def expert_threshold(layer: LayerSpec, stages: Stages, *, decay: BelowOne = 0.99, bins: int = 1000) -> Stages:
    """s = sigmoid(W h): each expert takes the tokens above its threshold, k experts a token on average.

    decay: of the running histogram of scores that the thresholds come from.
    bins: of that histogram.
    """
    check_whole("expert-threshold: option bins", bins, least=2)
    return replace(stages, select=AboveThreshold(layer.num_experts, bins, decay, layer.renormalize))
