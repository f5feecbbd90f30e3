"""Expert Choice (Zhou et al. 2022, arXiv 2202.09368): each expert takes its best tokens; all loads are equal."""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.frame.steps import ROUNDING
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import Combine, Pairs, RoutingContext


def best_tokens(choice: Tensor, mask: Tensor | None, each: float) -> tuple[Tensor, Tensor, Tensor]:
    """Each expert's C = min(T, ceil(each T)) best real tokens of each group; of equal ones the earlier.

    Args:
        choice: [G, T, E], what tokens are compared by.
        mask: [G, T] bool, True for a real token; T counts these.
        each: the share of the tokens that one expert takes.

    Returns:
        Rows [P] of the flattened tokens and their experts [P], sorted by expert; and [G T, E] bool, who was taken.
    """
    groups, tokens, num_experts = choice.shape
    capacity = min(tokens, math.ceil(each * tokens - ROUNDING))
    ranked = choice.detach() if mask is None else choice.detach().masked_fill(~mask[..., None], -math.inf)
    order = ranked.argsort(dim=1, descending=True, stable=True)[:, :capacity]  # [groups, C, E]
    first = torch.arange(groups, device=choice.device)[:, None, None] * tokens
    token = (order + first).permute(2, 0, 1).reshape(-1)  # sorted by expert
    expert = torch.arange(num_experts, device=choice.device).repeat_interleave(groups * capacity)
    if mask is not None:
        exact = torch.float32 if mask.device.type == "mps" else torch.float64  # which has nothing better
        real = mask.sum(1, dtype=exact)
        limit = torch.minimum(torch.ceil(each * real - ROUNDING), real)
        taken = (torch.arange(capacity, device=choice.device) < limit[:, None]).reshape(-1).repeat(num_experts)
        token, expert = token[taken], expert[taken]
    member = torch.zeros(groups * tokens, num_experts, dtype=torch.bool, device=choice.device)
    member[token, expert] = True
    return token, expert, member


def as_selection(token: Tensor, expert: Tensor, member: Tensor, values: Tensor) -> Selection:
    """The selection of the pairs that `best_tokens` found, with weights `values` [N, E]."""
    counts = member.sum(0)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    flat = Pairs(token, expert, values[token, expert], offsets)
    every = torch.arange(member.shape[1], device=member.device)
    return Selection(torch.where(member, every, -1), torch.where(member, values, 0), Combine(flat))


class ExpertsChoose(Selector):
    """Each expert takes its C = min(T, ceil(k T / E)) best real tokens of a group; weights are the probabilities.

    T counts the real tokens of the group, a sequence or the batch. Of equal probabilities the earlier token is taken.
    A token has from 0 to E experts, k on average.
    """

    causal = False
    overrides = frozenset({"capacity", "eval_capacity", "balance"})  # loads are equal: the balance loss is 1

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.batch_invariant = group == "sequence"

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs  # tokens are compared: logits of different tokens cannot be
        choice, mask, own = self.grouped(probs, context.padding_mask, self.group)
        token, expert, member = best_tokens(choice, mask, k / probs.shape[-1])
        if self.ranks.count > 1 and self.group == "batch":  # this rank's tokens among all
            here = (token >= own.start) & (token < own.stop)
            token, expert, member = token[here] - own.start, expert[here], member[own]
        return as_selection(token, expert, member, probs.flatten(0, 1))


@register_router(
    "expert-choice", paper="Zhou et al. 2022, arXiv 2202.09368", scores=linear_scores, defaults={"bias": False},
    renormalize=False,
)  # fmt: skip
def expert_choice(layer: LayerSpec, stages: Stages, *, group: Literal["sequence", "batch"] = "sequence") -> Stages:
    """Each expert takes its ceil(k T / E) best tokens of a sequence; weights softmax(W h) as they are. Not causal.

    group: what an expert chooses from: a sequence, or the batch (then routing depends on other sequences).
    """
    return replace(stages, select=ExpertsChoose(group))
