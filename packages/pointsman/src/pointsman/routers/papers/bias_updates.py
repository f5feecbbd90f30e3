"""How the bias of `loss-free` moves after a step: by a sign, smoothly with momentum, or onto a quantile.
`share` (LongCat) holds how many real experts a token has.

n_i is how many real tokens chose expert i in the step, over all micro-batches and processes; nbar is their mean. A step
without real tokens moves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pointsman.routers.frame.stage_values import Tensors
from pointsman.routers.frame.stages import Stage

SHARPNESS, MOMENTUM = 2.0, 0.5  # of SMEBU
TINY = 1e-20


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

    Args:
        num_experts: E.
        rate: how far the bias moves in a step.
        centre: whether the change has mean 0.
        reach: an upper bound of the scores.
        bins: of `QuantileUpdate`.
        real, num_real: of `ShareUpdate`.
    """

    def __init__(
        self, num_experts: int, rate: float, centre: bool, reach: float, bins: int, real: float | None = None,
        num_real: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rate, self.centre, self.reach, self.bins = rate, centre, reach, bins
        self.real, self.num_real = real, num_real

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

    def __init__(self, num_experts: int, *args: Any) -> None:
        super().__init__(num_experts, *args)
        self.momentum: Tensor
        self.register_buffer("momentum", torch.zeros(num_experts))

    @torch.no_grad()
    def move(self, bias: Tensor, sums: Tensors) -> None:
        counts = sums["counts"].to(bias.dtype)
        mean = counts.mean()
        change = self.rate * torch.tanh(SHARPNESS * (mean - counts) / mean.clamp_min(TINY))
        moved = self.momentum.lerp(self.centred(change), 1 - MOMENTUM)
        self.momentum.copy_(torch.where(mean > 0, moved, self.momentum))
        bias.add_(torch.where(mean > 0, moved, 0))


class QuantileUpdate(SignUpdate):
    """b_i = -((q + 1)-th largest over the step's tokens of s_i - a), q = floor(sum n / E) (Su 2026; Kimi K3).

    a is the token's (k + 1)-th largest s + b. This is an exact step of coordinate descent on the dual of the balanced
    assignment. The margins s_i - a are counted in `bins` parts of their range, so that counts of micro-batches and
    processes add up; 0 keeps and sorts them, in one process only. Where k = E nothing moves.
    """

    def statistics(self, scores: Tensor, bias: Tensor, k: int, mask: Tensor | None) -> Tensors:
        if k == len(bias):
            return {}
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
            bias.copy_(self.centred(-sums["margins"].sort(0, descending=True).values[int(rank)]))
        elif "histogram" in sums:
            moved = self.centred(-largest_of_histogram(sums["histogram"], rank, *self._range(bias)))
            bias.copy_(torch.where(chosen > 0, moved, bias))


class ShareUpdate(SignUpdate):
    """b_i += rate (K / E - n_i / T) / k for the E real experts, T real tokens in the step (LongCat, arXiv 2509.01322).

    K, `real`, is the mean number of real experts that a token is to have; virtual experts keep their bias.
    """

    def statistics(self, scores: Tensor, bias: Tensor, k: int, mask: Tensor | None) -> Tensors:
        tokens = torch.full((), len(scores), device=scores.device) if mask is None else mask.sum()
        return {"tokens": tokens}

    @torch.no_grad()
    def move(self, bias: Tensor, sums: Tensors) -> None:
        counts, tokens = sums["counts"].to(bias.dtype), sums["tokens"].to(bias.dtype)
        assert self.real is not None
        change = self.real / self.num_real * tokens - counts[: self.num_real]
        bias[: self.num_real].add_(self.centred(self.rate * change / counts.sum().clamp_min(1)))


UPDATES = {"sign": SignUpdate, "smebu": SmebuUpdate, "quantile": QuantileUpdate, "share": ShareUpdate}
