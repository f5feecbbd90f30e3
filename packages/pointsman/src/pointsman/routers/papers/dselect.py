"""DSelect-k (Hazimeh et al. 2021, arXiv 2106.03760): k differentiable selectors over binary codes of the experts."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import Count, LayerSpec, NotNegative, Positive, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores
from pointsman.routers.frame.stages import Normalizer, Scorer, Selector, Stages, linear
from pointsman.routers.papers.topk import INIT_STD
from pointsman.routing import RoutingContext

NONE = 1e-30  # a weight that counts as 0, whose logarithm is finite
EPS = 1e-6  # the released layer's


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    """0 below -gamma / 2, 1 above gamma / 2, and between -2 t^3 / gamma^3 + 3 t / (2 gamma) + 1/2."""
    u = (t / gamma + 0.5).clamp(0, 1)
    return u * u * (3 - 2 * u)  # the same polynomial


class SelectorScorer(Scorer):
    """r_j(e) = product over the bits of e of S(b) or 1 - S(b), b = W_j h; weight_e = sum_j softmax(G h)_j r_j(e).

    The logits are the weights' logarithms. Bit 0 is the lowest. `extra`: 1 - S and S of the bits, [2, selectors, bits,
    N], and the products over the lower and the upper half of them, [codes, selectors, N], whose outer product is r.
    """

    accepts_half = True

    def __init__(self, dim: int, num_experts: int, selectors: int, gamma: float) -> None:
        super().__init__()
        self.num_experts, self.selectors, self.gamma = num_experts, selectors, gamma
        self.bits = max(1, math.ceil(math.log2(num_experts)))
        start = gamma / 100  # all experts are mixed at first
        self.codes = nn.Parameter(torch.empty(selectors * self.bits, dim).uniform_(-start, start))
        gate = torch.randn(selectors, dim) * INIT_STD
        # one selector has the weight 1 whatever its gate is: nothing to train
        self.gate: Tensor = nn.Parameter(gate) if selectors > 1 else nn.Buffer(gate)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        rows = linear(hidden, torch.cat([self.codes, self.gate])).flatten(0, 1).T.contiguous()  # tokens last: long rows
        count = self.selectors
        ones = smooth_step(rows[:-count].view(count, self.bits, -1), self.gamma)
        bits = torch.stack([1 - ones, ones])
        low, high = (self._codes(part) for part in (bits[:, :, : self.bits // 2], bits[:, :, self.bits // 2 :]))
        gated = torch.softmax(rows[-count:], 0) * low
        weights = (high[:, None] * gated).sum(2).flatten(0, 1)[: self.num_experts].T.contiguous()
        logits = weights.clamp_min(NONE).log().view(*hidden.shape[:2], self.num_experts)
        return Scored(logits, {"bits": bits, "low": low, "high": high})

    @staticmethod
    def _codes(bits: Tensor) -> Tensor:
        """Of [2, selectors, b, N], for each bit at 0 and at 1, the products for all codes, [2^b, selectors, N]."""
        codes = bits[:, :, 0] if bits.shape[2] else bits.new_ones(1, bits.shape[1], bits.shape[3])
        for bit in range(1, bits.shape[2]):
            codes = (bits[:, None, :, bit] * codes).flatten(0, 1)
        return codes


class Exponential(Normalizer):
    """p = exp(z): the weights themselves, which sum to 1 where the number of experts is a power of two."""

    increasing = True
    gives = frozenset({"positive", "share", "zeros"})
    words = "sums of selectors, of which most become 0"

    def forward(self, logits: Tensor) -> Tensor:
        return torch.exp(logits)


class AboveZero(Selector):
    """The experts with a weight above 0, at most k of them, the largest first."""

    ragged = True

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        experts = top_k(scores.choice.flatten(0, 1), k)
        weights = scores.probs.flatten(0, 1).gather(-1, experts)
        without = weights <= 2 * NONE
        experts, weights = experts.masked_fill(without, -1), weights.masked_fill(without, 0)
        return experts, self.renormalized(weights)


def selectors(given: LossInput) -> Tensor:
    """r [E, selectors, N]."""
    low, high = given.extra["low"], given.extra["high"]
    return (high[:, None] * low).flatten(0, 1)[: given.logits.shape[-1]]


def bit_entropy(given: LossInput) -> Tensor:
    """The mean over tokens of sum_j H(r_j), which makes each selector choose one expert.

    Where every code is an expert, H(r_j) is the sum of the entropies of its bits. Logarithms are of values + 1e-6.
    """
    bits = given.extra["bits"]
    return given.token_mean(-(bits * torch.log(bits + EPS)).sum((0, 1, 2)))


def code_entropy(given: LossInput) -> Tensor:
    """The same where some codes are no expert: sum_j -sum_e r_j(e) ln(r_j(e) + 1e-6)."""
    chosen = selectors(given)
    return given.token_mean(-(chosen * torch.log(chosen + EPS)).sum((0, 1)))


def unused_codes(given: LossInput) -> Tensor:
    """The mean over tokens of sum_j 1 / sum_e r_j(e), each at most 1e6: keeps selectors off codes without an expert.

    The number of selectors at best.
    """
    return given.token_mean((1 / selectors(given).sum(0).clamp_min(EPS)).sum(0))


def codes_of_selectors(
    layer: LayerSpec, *, selectors: Count | None = None, gamma: Positive = 1.0, entropy: NotNegative = 1e-6,
    codes: NotNegative = 1.0,
) -> Stages:  # fmt: skip
    """Selectors that each choose one expert by its binary code, dense at first and sparse later.

    selectors: how many (none = the layer's top_k).
    gamma: width of the smooth step from 0 to 1.
    entropy: weight of the selectors' entropy.
    codes: weight of the penalty on codes without an expert, where the number of experts is no power of two.
    """
    selectors = layer.top_k if selectors is None else selectors
    scorer = SelectorScorer(layer.dim, layer.columns, selectors, gamma)
    losses = {"entropy": Loss(bit_entropy, entropy)}
    if layer.columns != 2**scorer.bits:
        losses = {"entropy": Loss(code_entropy, entropy), "codes": Loss(unused_codes, codes)}
    return Stages(scorer, Exponential(), losses=losses)


@register_router(
    "dselect", paper="Hazimeh et al. 2021, arXiv 2106.03760", scores=codes_of_selectors, needs="zeros",
    renormalize=False, starts_at=lambda layer: layer.num_experts,
)  # fmt: skip
def dselect(layer: LayerSpec, stages: Stages) -> Stages:
    """DSelect-k: all experts with a weight above 0, of selectors that each choose one by its code. k is a cap."""
    return replace(stages, select=AboveZero(layer.renormalize))
