"""Selection: scores and k -> experts and weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pointsman.ops.selection import top_k
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import Selector, equal_weights
from pointsman.routing import RoutingContext

ROUNDING = 1e-9  # 1.1 * 100 * 2 / 4 is 55, and a little more in floating point


class TopK(Selector):
    """The k experts of the highest choice; weights are their probabilities, renormalised over the k or as they are.

    For a softmax, renormalised top-k equals a softmax over the top-k logits (the released code,
    HyperRouter's Appendix B, Mutual-Inform's Eq. 11); not renormalised it is TopK(softmax(z), k) (HyperRouter's Eq. 1).
    """

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        experts = top_k(scores.choice.flatten(0, 1), k)
        return experts, self.renormalized(probs.gather(-1, experts))


class RandomExperts(Selector):
    """Experts drawn uniformly, each with weight 1/k (THOR, Zuo et al. 2022).

    Training: one set of k experts for the whole forward. Evaluation: one for each token.
    """

    stochastic = True

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        probs = scores.probs.flatten(0, 1)
        tokens, num_experts = probs.shape
        draws = torch.rand(1 if self.training else tokens, num_experts, device=probs.device)
        experts = draws.topk(k, dim=-1).indices.expand(tokens, k)
        return experts, torch.full((tokens, k), 1 / k, dtype=probs.dtype, device=probs.device)

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        return equal_weights(scores, experts)


def keep_groups(choice: Tensor, groups: int, kept: int, k: int, group_score: str = "top2") -> Tensor:
    """`choice` [N, E] with -inf outside each token's best groups (DeepSeek-V2, V3: node-limited routing).

    Args:
        groups: the experts are in so many equal runs.
        kept: how many of them a token keeps; more where k experts need more.
        group_score: a group's score is the sum of its two largest choices ("top2") or the largest ("max").
    """
    width = choice.shape[1] // groups
    kept = max(kept, math.ceil(k / width))
    if kept >= groups:
        return choice
    best = choice.view(-1, groups, width).topk(1 if group_score == "max" else min(2, width)).values
    lost = torch.ones(choice.shape[0], groups, dtype=torch.bool, device=choice.device)
    lost.scatter_(1, top_k(best.sum(-1), kept), False)
    return choice.masked_fill(lost.repeat_interleave(width, 1), -torch.inf)
