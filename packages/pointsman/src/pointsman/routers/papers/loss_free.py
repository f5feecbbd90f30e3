"""Loss-free balancing (Wang et al. 2024, arXiv 2408.15664), the router of DeepSeek-V3 (arXiv 2412.19437).

A bias per expert, moved after each step by how many tokens the expert had, corrects what selection ranks by. Weights
and losses do not see it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pointsman.auxiliary import assignment_counts
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import Count, LayerSpec, NotNegative, Positive, Whole, register_router
from pointsman.routers.frame.stage_values import LossInput, Scores, Selection, Tensors
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.frame.steps import Kind
from pointsman.routers.papers.bias_updates import UPDATES, SignUpdate
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext

RATES = {"sign": 1e-3, "smebu": 5e-4, "share": 1e-2}


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


class BiasedTopK(Selector):
    """A = top-k of s + b in the kept groups, w = s_A / max(sum s_A, 1e-20); `update` moves b in `step_end`.

    Args:
        on_logits: A = top-k of z + b.
        null_bias: where b starts for the experts from `num_real` on, the virtual ones.
    """

    def __init__(
        self,
        num_experts: int,
        update: SignUpdate | None,
        renormalize: bool,
        groups: int,
        kept: int,
        group_score: str,
        on_logits: bool = False,
        null_bias: float = 0.0,
        num_real: int = 0,
    ) -> None:
        super().__init__()
        self.update, self.on_logits = update, on_logits
        self.renormalize, self.groups, self.kept, self.group_score = renormalize, groups, kept, group_score
        self.needs_step_end = update is not None
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts))
        if null_bias:
            self.bias[num_real:] = null_bias

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs.flatten(0, 1)
        bias = self.bias.to(probs.dtype)
        ranked = scores.choice.flatten(0, 1) if self.on_logits else probs  # a mixer hands on probabilities only
        choice = keep_groups(ranked.detach() + bias, self.groups, self.kept, k, self.group_score)
        experts = top_k(choice, k)
        weights = self.renormalized(probs.gather(-1, experts))
        if not self.training or self.update is None:
            return Selection(experts, weights)
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        chosen = experts if mask is None else experts.masked_fill(~mask[:, None], -1)
        statistics = {"counts": assignment_counts(chosen, len(bias))}
        return Selection(
            experts, weights, statistics={**statistics, **self.update.statistics(probs.detach(), bias, k, mask)}
        )

    def gather(self, statistics: Tensors) -> None:
        margins = {name: value for name, value in statistics.items() if name == "margins"}
        super().gather({name: value for name, value in statistics.items() if name not in margins})
        for name, value in margins.items():
            self.sums[name] = torch.cat([self.sums[name], value]) if name in self.sums else value.clone()

    def step_end(self) -> None:
        if self.update is not None and self.sums:
            self.update.move(self.bias, self.sums)


def counted(given: LossInput) -> Tensor:
    """What the balance loss counts: the top-k of the scores alone, without bias and groups (DeepSeek-V3, Eq. 18)."""
    return top_k(given.unmixed, given.experts.shape[-1])


@register_router(
    "loss-free",
    paper="Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437",
    scores=linear_scores,
    defaults={"bias": False, "gate": "sigmoid"},
)
def loss_free(
    layer: LayerSpec,
    stages: Stages,
    *,
    biased: Literal["scores", "logits"] = "scores",
    update: Literal["sign", "smebu", "quantile", "share", "none"] = "sign",
    rate: NotNegative | None = None,
    centre: bool | None = None,
    groups: Count = 1,
    kept: int = 1,
    group_score: Literal["top2", "max"] = "top2",
    bins: Whole = 1000,
    nulls: Whole = 0,
    kind: Kind = "zero",
    null_bias: float = 0.0,
    real: Positive | None = None,
) -> Stages:
    """Loss-free balancing: top-k of score + bias, the bias moved after each step; weights are the scores alone.

    biased: what the bias is added to: the scores, or the logits (Kolibri 1).
    update: how the bias moves: by a fixed amount towards balance (sign), smoothly with momentum (smebu), onto the
        step's quantile (quantile), in proportion to what is missing of the share that `real` gives each real expert
        (share: LongCat), or not (none).
    rate: how far it moves in a step (none = 0.001 for sign, 0.0005 for smebu, 0.01 for share; quantile has none).
    centre: whether the change has mean 0 (none = for smebu and quantile, not for sign).
    groups: the experts in so many equal runs, of which only the best may be chosen from.
    kept: how many groups, at least as many as k experts need.
    group_score: a group's score is the sum of its two largest (top2, DeepSeek-V3) or the largest (max, DeepSeek-V2).
    bins: parts of the histogram that quantile counts in (0 = sorts, in one process only).
    nulls: virtual experts that may be chosen besides the E experts; they have a bias like these.
    kind: what they give: nothing (zero), the input (copy: LongCat), a trained mix (constant), or one of each (mixed).
    null_bias: where the bias of virtual experts starts (ZAYA1: -1).
    real: how many real experts a token is to have on average (update=share); at most k.
    """
    if nulls and groups > 1:
        raise ValueError(f"loss-free: option groups={groups}: nulls={nulls} allows 1")
    if layer.num_experts % groups:
        raise ValueError(f"loss-free: option groups={groups}: allowed are divisors of {layer.num_experts} (experts)")
    if not 1 <= kept <= groups:
        raise ValueError(f"loss-free: option kept={kept}: allowed are whole numbers from 1 to {groups} (groups)")
    if update == "quantile" and groups > 1:
        raise ValueError(f"loss-free: option groups={groups}: update=quantile allows 1")
    if update == "quantile" and biased == "logits":
        raise ValueError("loss-free: option biased=logits: update=quantile allows scores")
    if not nulls and kind != "zero":
        raise ValueError(f"loss-free: option kind={kind}: nulls=0 allows zero")
    if (real is None) == (update == "share"):
        raise ValueError("loss-free: update=share needs real, the mean number of real experts, and real needs it")
    if not nulls and (null_bias or real is not None):
        raise ValueError("loss-free: null_bias and real need nulls, the number of virtual experts")
    if real is not None and real > layer.top_k:
        raise ValueError(f"loss-free: option real={real}: allowed are numbers up to {layer.top_k} (top_k)")
    rate = RATES.get(update, 0.0) if rate is None else rate
    centre = update not in ("sign", "share") if centre is None else centre
    sizes = layer.columns, rate, centre, stages.normalize.reach, bins, real, layer.num_experts
    moving = None if update == "none" else UPDATES[update](*sizes)
    on_logits = biased == "logits"
    select = BiasedTopK(
        layer.columns, moving, layer.renormalize, groups, kept, group_score, on_logits, null_bias, layer.num_experts
    )
    return replace(stages, select=select, counted=counted)
