"""Expert Choice (Zhou et al. 2022, arXiv 2202.09368): each expert takes its best tokens; all loads are equal."""

from __future__ import annotations

import math
from typing import Literal

import torch

from pointsman.routers.entries import LayerSpec, register_router
from pointsman.routers.stages import Scores, Selection, Selector, Sigmoid, Softmax, Stages
from pointsman.routers.topk import LinearScorer
from pointsman.routing import Pairs, RoutingContext


class ExpertsChoose(Selector):
    """Each expert takes its C = min(T, ceil(k T / E)) best real tokens of a group; weights are the probabilities.

    T counts the real tokens of the group, a sequence or the batch. Of equal probabilities the earlier token is taken.
    A token has from 0 to E experts, k on average.
    """

    causal = False

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.batch_invariant = group == "sequence"

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs, mask = scores.probs, context.padding_mask
        choice = probs  # tokens are compared: logits of different tokens cannot be
        if self.group == "batch":
            choice, mask = choice.flatten(0, 1)[None], None if mask is None else mask.reshape(1, -1)
        groups, tokens, num_experts = choice.shape
        capacity = min(tokens, -(-k * tokens // num_experts))
        ranked = choice if mask is None else choice.masked_fill(~mask[..., None], -math.inf)
        order = ranked.argsort(dim=1, descending=True, stable=True)[:, :capacity]  # [groups, C, E]
        first = torch.arange(groups, device=choice.device)[:, None, None] * tokens
        token = (order + first).permute(2, 0, 1).reshape(-1)  # sorted by expert
        every = torch.arange(num_experts, device=choice.device)
        expert = every.repeat_interleave(groups * capacity)
        if mask is not None:
            real = mask.sum(1)
            limit = torch.minimum(torch.ceil(k * real / num_experts), real)
            taken = torch.arange(capacity, device=choice.device) < limit[:, None]
            taken = taken.reshape(-1).repeat(num_experts)
            token, expert = token[taken], expert[taken]
        flat_probs = probs.flatten(0, 1)
        member = torch.zeros(flat_probs.shape, dtype=torch.bool, device=choice.device)
        member[token, expert] = True
        counts = member.sum(0)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        flat = Pairs(token, expert, flat_probs[token, expert], offsets)
        return Selection(torch.where(member, every, -1), torch.where(member, flat_probs, 0), flat)

    def extra_repr(self) -> str:
        return f"group={self.group}"


@register_router("expert-choice", paper="Zhou et al. 2022, arXiv 2202.09368", renormalize=False)
def expert_choice(
    layer: LayerSpec,
    *,
    group: Literal["sequence", "batch"] = "sequence",
    gate: Literal["softmax", "sigmoid"] = "softmax",
    noise: float = 0.0,
) -> Stages:
    """Each expert takes its ceil(k T / E) best tokens of a sequence; weights softmax(W h) as they are. Not causal.

    group: what an expert chooses from: a sequence, or the batch (then routing depends on other sequences).
    gate: softmax over the experts, or a sigmoid for each.
    noise: standard deviation of Gaussian noise on the logits in training (V-MoE uses 1/E).
    """
    scorer = LinearScorer(layer.dim, layer.num_experts, bias=False, noise=noise)
    return Stages(scorer, Sigmoid() if gate == "sigmoid" else Softmax(), select=ExpertsChoose(group))
