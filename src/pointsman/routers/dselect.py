"""DSelect-k (Hazimeh et al. 2021, arXiv 2106.03760): k differentiable selectors over binary codes of the experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.ops.scoring import linear
from pointsman.ops.selection import top_k
from pointsman.routers.entries import LayerSpec, register_router
from pointsman.routers.select import TINY
from pointsman.routers.stages import Loss, LossInput, Normalizer, Scored, Scorer, Scores, Selector, Stages
from pointsman.routers.topk import INIT_STD
from pointsman.routing import RoutingContext

NONE = 1e-30  # a weight that counts as 0, whose logarithm is finite
EPS = 1e-6  # the released layer's


def smooth_step(t: Tensor, gamma: float) -> Tensor:
    """0 below -gamma / 2, 1 above gamma / 2, and between -2 t^3 / gamma^3 + 3 t / (2 gamma) + 1/2."""
    t = t.clamp(-gamma / 2, gamma / 2)
    return -2 / gamma**3 * t**3 + 3 / (2 * gamma) * t + 0.5


class SelectorScorer(Scorer):
    """r_j(e) = product over the bits of e of S(b) or 1 - S(b), b = W_j h; weight_e = sum_j softmax(G h)_j r_j(e).

    The logits are the weights' logarithms; `extra["selectors"]` is r [B, T, selectors, E]. Bit 0 is the lowest.
    """

    accepts_half = True

    def __init__(self, dim: int, num_experts: int, selectors: int, gamma: float) -> None:
        super().__init__()
        self.num_experts, self.selectors, self.gamma = num_experts, selectors, gamma
        self.bits = max(1, math.ceil(math.log2(num_experts)))
        start = gamma / 100  # all experts are mixed at first
        self.codes = nn.Parameter(torch.empty(selectors * self.bits, dim).uniform_(-start, start))
        self.gate = nn.Parameter(torch.randn(selectors, dim) * INIT_STD)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        both = linear(hidden, torch.cat([self.codes, self.gate]))
        codes, gate = both[..., : -self.selectors], both[..., -self.selectors :]
        ones = smooth_step(codes.view(*codes.shape[:-1], self.selectors, self.bits), self.gamma)
        chosen = torch.stack([1 - ones[..., 0], ones[..., 0]], -1)
        for bit in range(1, self.bits):
            one = ones[..., bit, None]
            chosen = torch.cat([chosen * (1 - one), chosen * one], -1)
        chosen = chosen[..., : self.num_experts]
        weights = (torch.softmax(gate, -1)[..., None] * chosen).sum(-2)
        return Scored(weights.clamp_min(NONE).log(), {"selectors": chosen})

    def extra_repr(self) -> str:
        return f"selectors={self.selectors}, gamma={self.gamma}"


class Exponential(Normalizer):
    """p = exp(z): the weights themselves, which sum to 1 where the number of experts is a power of two."""

    increasing = True

    def forward(self, logits: Tensor) -> Tensor:
        return torch.exp(logits)


class AboveZero(Selector):
    """The experts with a weight above 0, at most k of them, the largest first."""

    ragged = True

    def __init__(self, renormalize: bool) -> None:
        super().__init__()
        self.renormalize = renormalize

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        experts = top_k(scores.choice.flatten(0, 1), k)
        weights = scores.probs.flatten(0, 1).gather(-1, experts)
        without = weights <= 2 * NONE
        experts, weights = experts.masked_fill(without, -1), weights.masked_fill(without, 0)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(TINY)
        return experts, weights


def code_entropy(given: LossInput) -> Tensor:
    """The mean over tokens of sum_j -sum_e r_j(e) ln(r_j(e) + 1e-6): makes each selector choose one expert."""
    chosen = given.extra["selectors"].flatten(0, 1)
    return given.token_mean(-(chosen * torch.log(chosen + EPS)).sum((-1, -2)))


def unused_codes(given: LossInput) -> Tensor:
    """The mean over tokens of sum_j 1 / sum_e r_j(e), each at most 1e6: keeps selectors off codes without an expert.

    The number of selectors at best.
    """
    chosen = given.extra["selectors"].flatten(0, 1)
    return given.token_mean((1 / chosen.sum(-1).clamp_min(EPS)).sum(-1))


@register_router(
    "dselect",
    paper="Hazimeh et al. 2021, arXiv 2106.03760",
    renormalize=False,
    starts_at=lambda layer: layer.num_experts,
)
def dselect(
    layer: LayerSpec,
    *,
    selectors: int | None = None,
    gamma: float = 1.0,
    entropy: float = 1e-6,
    codes: float = 1.0,
) -> Stages:
    """DSelect-k: selectors that each choose one expert by its binary code, dense at first and sparse later. k is a cap.

    selectors: how many (none = the layer's top_k).
    gamma: width of the smooth step from 0 to 1.
    entropy: weight of the selectors' entropy.
    codes: weight of the penalty on codes without an expert, where the number of experts is no power of two.
    """
    selectors = layer.top_k if selectors is None else selectors
    check_whole("dselect: option selectors", selectors)
    if not gamma > 0:
        raise ValueError(f"dselect: option gamma={gamma}: allowed are numbers above 0")
    for name, weight in (("entropy", entropy), ("codes", codes)):
        if weight < 0:
            raise ValueError(f"dselect: option {name}={weight}: allowed are numbers from 0")
    scorer = SelectorScorer(layer.dim, layer.num_experts, selectors, gamma)
    losses = {"entropy": Loss(code_entropy, entropy)}
    if layer.num_experts != 2**scorer.bits:
        losses["codes"] = Loss(unused_codes, codes)
    return Stages(scorer, Exponential(), select=AboveZero(layer.renormalize), losses=losses)
