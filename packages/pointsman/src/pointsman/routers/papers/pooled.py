"""Routing of whole sequences and of tasks (Kudugunta et al. 2021, arXiv 2110.03742).

All tokens of a sequence go to the same experts, so that a server loads few of them.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scored
from pointsman.routers.frame.stages import Scorer, Stages, TopK, extended
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class Pooled(Scorer):
    """Each token gets the mean of the logits of its sequence's real tokens, or those of the first real token."""

    accepts_half = True
    first = False

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        scored = Scored.of(super().forward(hidden, context))
        z, mask = scored.logits, context.padding_mask
        real = torch.ones_like(z[..., :1]) if mask is None else mask[..., None].to(z.dtype)
        if not self.first:
            kept = z if mask is None else z.masked_fill(~mask[..., None], 0)
            pooled = kept.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
            return replace(scored, logits=pooled.expand_as(z))
        # [B, S, E + 1], the same for all S tokens so far: the logits, and whether there was a real token
        past = (context.past or {}).get("task", z.new_zeros(z.shape[0], 0, z.shape[2] + 1))
        if len(past) != len(z):
            raise ValueError(f"RoutingContext.past is of {len(past)} sequences, the input of {len(z)}")
        known = past[:, :1] if past.shape[1] else z.new_zeros(z.shape[0], 1, z.shape[2] + 1)
        if z.shape[1]:
            first = real.argmax(1, keepdim=True)
            here = torch.cat([z, real], -1).gather(1, first.expand(-1, -1, z.shape[2] + 1))
            known = torch.where(known[..., -1:] > 0, known.to(z.dtype), here)
        seen = known.expand(-1, past.shape[1] + z.shape[1], -1)
        return replace(scored, logits=known[..., :-1].expand_as(z), carry={**scored.carry, "task": seen.detach()})


class SequenceTopK(TopK):
    """`TopK` of scores that are the same for all tokens of a sequence: mixing and ranking these changes nothing."""

    overrides = frozenset({"mixer", *(f"capacity_order={order}" for order in ("rank", "priority", "probs"))})


@register_router(
    "pooled", paper="Kudugunta et al. 2021, arXiv 2110.03742", scores=linear_scores, renormalize=True, balance=0.01
)
def pooled(layer: LayerSpec, stages: Stages, *, over: Literal["sequence", "task"] = "sequence") -> Stages:
    """All tokens of a sequence go to the same k experts, by the mean of their logits or by its first token's.

    over: the mean over the real tokens (sequence), or the first token, which says the task, as a language's tag (task).
    """
    score = extended(stages.score, Pooled)
    score.first = over == "task"
    if not score.first:
        score.causal = score.training_causal = False
    return replace(stages, score=score, select=SequenceTopK(layer.renormalize))
