"""Loss-free balancing (Wang et al. 2024, arXiv 2408.15664), the router of DeepSeek-V3 (arXiv 2412.19437).

A bias per expert, moved after each step by how many tokens the expert had, corrects what selection ranks by. Weights
and losses do not see it.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from pointsman.auxiliary import assignment_counts
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import Count, LayerSpec, NotNegative, Positive, Whole, register_router
from pointsman.routers.frame.stage_values import LossInput, Scores, Selection, Stage, Tensors
from pointsman.routers.frame.stages import FLOOR, Selector, Stages
from pointsman.routers.frame.steps import Kind
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext

SHARPNESS, MOMENTUM = 2.0, 0.5  # of SMEBU
RATES = {"sign": 1e-3, "smebu": 5e-4, "share": 1e-2}


def column_histogram(values: Tensor, low: Tensor, high: Tensor, bins: int, mask: Tensor | None = None) -> Tensor:
    """[E, bins] int64: how many of the values [N, E] of each column lie in each of `bins` equal parts of [low, high].

    Values outside count in the first or last part; rows where `mask` [N] is False count nowhere.
    """
    columns = values.shape[1]
    place = ((values - low) / (high - low) * bins).long().clamp(0, bins - 1)
    if mask is not None:
        place = place.masked_fill(~mask[:, None], bins)
    counts = torch.zeros(columns, bins + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(1, place.T, torch.ones_like(place.T))[:, :bins]


def largest_of_histogram(histogram: Tensor, rank: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[E]: the middle of the part that holds each column's value number `rank` from the top (0 is the largest).

    Args:
        histogram: [E, bins], of `column_histogram` with the same low and high.
        rank: scalar int64.
    """
    bins = histogram.shape[1]
    above = (histogram.flip(1).cumsum(1) <= rank).sum(1)
    return high - (above + 0.5) * ((high - low) / bins)


class SignUpdate(Stage):
    """b += D, D = rate sign(nbar - n) (Wang et al. 2024); with `centre` D - mean D.

    n_i is how many real tokens chose expert i in the step, over all micro-batches and processes; nbar is their mean. A
    step without real tokens moves nothing.
    """

    def __init__(self, rate: float, centre: bool) -> None:
        super().__init__()
        self.rate, self.centre = rate, centre

    def statistics(self, scores: Tensor, bias: Tensor, k: int, mask: Tensor | None) -> Tensors:
        """What the update needs of a micro-batch besides its counts: scores [N, E], mask [N]."""
        return {}

    @torch.no_grad()
    def move(self, bias: Tensor, sums: Tensors) -> None:
        """Moves the bias [E] in place; `sums` holds the step's counts [E], and what `statistics` gave."""
        counts = sums["counts"]
        below = torch.sign(counts.sum() - counts * len(counts))  # of nbar - n, in whole numbers
        bias.add_(self.centred(self.rate * below.to(bias.dtype)))

    def centred(self, change: Tensor) -> Tensor:
        return change - change.mean() if self.centre else change


class SmebuUpdate(SignUpdate):
    """m = (m + D) / 2, b += m, D = rate tanh(2 (nbar - n) / nbar) (SMEBU: Arcee Trinity, arXiv 2602.17004)."""

    def __init__(self, num_experts: int, rate: float, centre: bool) -> None:
        super().__init__(rate, centre)
        self.momentum = nn.Buffer(torch.zeros(num_experts))

    @torch.no_grad()
    def move(self, bias: Tensor, sums: Tensors) -> None:
        counts = sums["counts"].to(bias.dtype)
        mean = counts.mean()
        change = self.rate * torch.tanh(SHARPNESS * (mean - counts) / mean.clamp_min(FLOOR))
        moved = self.momentum.lerp(self.centred(change), 1 - MOMENTUM)
        self.momentum.copy_(torch.where(mean > 0, moved, self.momentum))
        bias.add_(torch.where(mean > 0, moved, 0))


class QuantileUpdate(SignUpdate):
    """b_i = -((q + 1)-th largest over the step's tokens of s_i - a), q = floor(sum n / E) (Su 2026; Kimi K3).

    a is the token's (k + 1)-th largest s + b. This is an exact step of coordinate descent on the dual of the balanced
    assignment. The margins s_i - a are counted in `bins` parts of their range, so that counts of micro-batches and
    processes add up; 0 keeps and sorts them, in one process only. Where k = E nothing moves. `reach` is an upper bound
    of the scores.
    """

    def __init__(self, reach: float, bins: int, centre: bool) -> None:
        super().__init__(0.0, centre)
        self.reach, self.bins = reach, bins

    def statistics(self, scores: Tensor, bias: Tensor, k: int, mask: Tensor | None) -> Tensors:
        if k == len(bias):
            return {"counts": torch.zeros_like(bias, dtype=torch.int64)}  # of tokens without margins
        margins = scores - (scores + bias).topk(k + 1, dim=-1).values[:, -1:]
        if self.bins:
            return {"histogram": column_histogram(margins, *self._range(bias), self.bins, mask)}
        return {"margins": margins if mask is None else margins[mask]}

    def _range(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds of s_i - s_j - b_j: the same for all micro-batches and processes of a step."""
        return -self.reach - bias.max(), self.reach - bias.min()

    @torch.no_grad()
    def move(self, bias: Tensor, sums: Tensors) -> None:
        chosen = sums["counts"].sum()
        rank = chosen // len(bias)
        if len(sums.get("margins", ())):
            moved = self.centred(-sums["margins"].sort(0, descending=True).values[int(rank)])
            bias.copy_(torch.where(moved.isfinite(), moved, bias))  # a skipped step's may be NaN
        elif "histogram" in sums:
            moved = self.centred(-largest_of_histogram(sums["histogram"], rank, *self._range(bias)))
            bias.copy_(torch.where(chosen > 0, moved, bias))


class ShareUpdate(SignUpdate):
    """b_i += rate (K / E - n_i / T) / k for the E real experts, T real tokens in the step (LongCat, arXiv 2509.01322).

    K, `real`, is the mean number of real experts that a token is to have; virtual experts keep their bias.
    """

    def __init__(self, real: float, num_real: int, rate: float, centre: bool) -> None:
        super().__init__(rate, centre)
        self.real, self.num_real = real, num_real

    def statistics(self, scores: Tensor, bias: Tensor, k: int, mask: Tensor | None) -> Tensors:
        return {"tokens": torch.full((), len(scores), device=scores.device) if mask is None else mask.sum()}

    @torch.no_grad()
    def move(self, bias: Tensor, sums: Tensors) -> None:
        counts, tokens = sums["counts"].to(bias.dtype), sums["tokens"].to(bias.dtype)
        change = self.real / self.num_real * tokens - counts[: self.num_real]
        bias[: self.num_real].add_(self.centred(self.rate * change / counts.sum().clamp_min(1)))


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
        bias: b at the start.
        on_logits: A = top-k of z + b.
        groups, kept, group_score: as of `keep_groups`.
    """

    def __init__(
        self, bias: Tensor, update: SignUpdate | None, renormalize: bool, groups: int, kept: int, group_score: str,
        on_logits: bool,
    ) -> None:  # fmt: skip
        super().__init__(renormalize)
        self.update, self.on_logits = update, on_logits
        self.groups, self.kept, self.group_score = groups, kept, group_score
        self.overrides = frozenset({"mixer"}) if on_logits else frozenset()  # mixers hand on probabilities only
        if getattr(update, "bins", None) == 0:
            self.adds_up, self.one_process = False, "bins=0 sorts in one process only; use bins=1000"
        self.needs_step_end = update is not None
        self.bias = nn.Buffer(bias)

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs.flatten(0, 1)
        bias = self.bias.to(probs.dtype)
        ranked = scores.choice.flatten(0, 1) if self.on_logits else probs
        choice = keep_groups(ranked.detach() + bias, self.groups, self.kept, k, self.group_score)
        experts = top_k(choice, k)
        weights = self.renormalized(probs.gather(-1, experts))
        if not self.training or self.update is None:
            return Selection(experts, weights)
        mask = None if context.padding_mask is None else context.padding_mask.reshape(-1)
        chosen = experts if mask is None else experts.masked_fill(~mask[:, None], -1)
        statistics = {"counts": assignment_counts(chosen, len(bias))}
        statistics |= self.update.statistics(probs.detach(), bias, k, mask)
        return Selection(experts, weights, statistics=statistics)

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
    "loss-free", paper="Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437", scores=linear_scores,
    defaults={"bias": False, "gate": "sigmoid"},
)  # fmt: skip
def loss_free(
    layer: LayerSpec, stages: Stages, *, biased: Literal["scores", "logits"] = "scores",
    update: Literal["sign", "smebu", "quantile", "share", "none"] = "sign", rate: NotNegative | None = None,
    centre: bool | None = None, groups: Count = 1, kept: int = 1, group_score: Literal["top2", "max"] = "top2",
    bins: Whole = 1000, nulls: Whole = 0, kind: Kind = "zero", null_bias: float = 0.0, real: Positive | None = None,
) -> Stages:  # fmt: skip
    """Loss-free balancing: top-k of score + bias, the bias moved after each step; weights are the scores alone.

    biased: what the bias is added to: the scores, or the logits (Kolibri 1).
    update: how the bias moves: by a fixed amount towards balance (sign), smoothly with momentum (smebu), onto the
        step's quantile (quantile), in proportion to what is missing of the share that `real` gives each real expert
        (share: LongCat), or not (none).
    rate: how far it moves in a step (none = 0.001 for sign, 0.0005 for smebu, 0.01 for share; quantile has none).
    centre: whether the change has mean 0 (none = for smebu and quantile, not for sign and share).
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
    if (real is None) == (update == "share"):
        raise ValueError("loss-free: update=share needs real, the mean number of real experts, and real needs it")
    if not nulls and (null_bias or real is not None):
        raise ValueError("loss-free: null_bias and real need nulls, the number of virtual experts")
    if real is not None and real > layer.top_k:
        raise ValueError(f"loss-free: option real={real}: allowed are numbers up to {layer.top_k} (top_k)")
    if (rate is not None and update not in RATES) or (centre is not None and update == "none"):
        raise ValueError(f"loss-free: update={update} has no {'centre' if rate is None else 'rate'}; leave it out")
    if (bins != 1000 and update != "quantile") or (group_score != "top2" and groups == 1):
        raise ValueError("loss-free: bins needs update=quantile, group_score needs groups above 1")
    rate = RATES.get(update, 0.0) if rate is None else rate
    centre = update not in ("sign", "share") if centre is None else centre
    moving: SignUpdate | None = None
    if update == "sign":
        moving = SignUpdate(rate, centre)
    elif update == "smebu":
        moving = SmebuUpdate(layer.columns, rate, centre)
    elif update == "quantile":
        moving = QuantileUpdate(stages.normalize.reach, bins, centre)
    elif real is not None:
        moving = ShareUpdate(real, layer.num_experts, rate, centre)
    bias = torch.zeros(layer.columns)
    bias[layer.num_experts :] = null_bias
    select = BiasedTopK(bias, moving, layer.renormalize, groups, kept, group_score, biased == "logits")
    return replace(stages, select=select, counted=counted)
