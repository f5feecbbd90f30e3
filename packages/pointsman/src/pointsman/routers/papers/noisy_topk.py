"""Noise on the logits in training, with importance and load losses: Shazeer et al. 2017 (arXiv 1701.06538), and V-MoE
(Riquelme et al. 2021, arXiv 2106.05974), whose noise is not trained."""

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.drawing import randn_like
from pointsman.ops.linear import upcast
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, NotNegative, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored
from pointsman.routers.frame.stages import Scorer, Stages, extended, linear
from pointsman.routers.papers.topk import INIT_STD, LinearScorer, linear_scores
from pointsman.routing import RoutingContext

LEAST_STD = 1e-15  # its square still divides in float32


class Noisy(Scorer):
    """z of the scores; in training z + r e with r = softplus(W_n h) + epsilon and e ~ N(0, 1) (Eq. 4). W_n [E, dim].

    Extra: `clean` z and `std` r, [B, T, E].
    """

    accepts_half = True
    training_stochastic = True
    epsilon: float
    plain: bool  # whether the scores are a product with one weight
    noise_weight: nn.Parameter

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        scored = Scored(hidden)
        if self.plain and isinstance(self, LinearScorer):
            both = linear(hidden, torch.cat([self.weight, self.noise_weight]))  # one product reads the tokens once
            clean, noise = (part.contiguous() for part in both.chunk(2, -1))
        else:
            hidden = upcast(hidden)  # once, so that the two gradients are not added in half precision
            scored = Scored.of(super().forward(hidden, context))
            clean, noise = scored.logits, linear(hidden, self.noise_weight)
        std = F.softplus(noise) + self.epsilon
        logits = clean + std * randn_like(clean, self.ranks) if self.training else clean
        return replace(scored, logits=logits, extra={**scored.extra, "clean": clean, "std": std})

    def plain_linear(self) -> tuple[Tensor, Tensor | None] | None:
        return super().plain_linear()


def squared_variation(values: Tensor) -> Tensor:
    """CV^2 = variance / mean^2 of values [E], the variance with divisor E; 0 where all are 0."""
    return values.var(correction=0) / values.mean().square().clamp_min(torch.finfo(values.dtype).tiny)


def importance_loss(given: LossInput) -> Tensor:
    """CV^2 of each expert's sum of weights (Eq. 6, 7)."""
    chosen = given.experts.clamp_min(0).reshape(-1)  # where there is none the weight is 0
    sums = given.logits.new_zeros(given.logits.shape[-1])
    return squared_variation(given.ranks.whole(sums.index_add(0, chosen, given.weights.reshape(-1))))


def load_loss(given: LossInput) -> Tensor:
    """CV^2 of L_i = sum over tokens of Phi((z_i - theta_i) / r_i), a smooth count of tokens (Eq. 8 to 11).

    theta_i is the k-th largest of the other experts' noisy logits: what expert i must exceed when its noise is drawn
    again. Phi is the standard normal distribution function.
    """
    noisy, k = given.logits, given.experts.shape[-1]
    if k == noisy.shape[-1]:
        return noisy.new_zeros(())
    best = top_k(noisy, k + 1)
    inside = torch.zeros_like(noisy, dtype=torch.bool).scatter_(1, best[:, :k], True)
    last, other = noisy.gather(1, best[:, k - 1 :]).unbind(1)
    threshold = torch.where(inside, other[:, None], last[:, None])
    clean, std = given.extra["clean"].flatten(0, 1), given.extra["std"].flatten(0, 1)
    deviations = (clean - threshold) / std.clamp_min(LEAST_STD)
    chance = torch.special.ndtr(deviations.clamp(-40, 40))  # 0 and 1 there; beyond it gradients would be inf 0
    if given.mask is not None:
        chance = chance.masked_fill(~given.mask[:, None], 0)
    return squared_variation(given.ranks.whole(chance.sum(0)))


Init = Literal["zeros", "normal"]


def noiseless(layer: LayerSpec, *, init: Init = "zeros") -> Stages:
    """A trained linear map, from 0.

    init: both maps start at 0 (the paper), or N(0, 0.02^2).
    """
    scorer = LinearScorer(layer.dim, layer.columns, bias=False)
    if init == "zeros":
        scorer.weight.data.mul_(0)
    return Stages(scorer)


@register_router("noisy-topk", paper="Shazeer et al. 2017, arXiv 1701.06538", scores=noiseless)
def noisy_topk(
    layer: LayerSpec, stages: Stages, *, importance: NotNegative = 0.1, load: NotNegative = 0.1,
    epsilon: NotNegative = 0.0, init: Init = "zeros",
) -> Stages:  # fmt: skip
    """Noisy top-k gating: a linear router with trained noise in training; losses keep importance and load even.

    importance: weight of the squared coefficient of variation of the experts' sums of weights.
    load: weight of that of their expected numbers of tokens.
    epsilon: least standard deviation of the noise.
    init: both maps, or that of the noise alone, start at 0 (the paper), or N(0, 0.02^2).
    """
    score = stages.score
    plain = type(score) is LinearScorer and score.bias is score.residual is None and not (score.noise or score.jitter)
    noisy = extended(score, Noisy)
    noisy.epsilon, noisy.plain = epsilon, plain
    noise = torch.randn(layer.columns, layer.dim)
    noisy.noise_weight = nn.Parameter(noise * (INIT_STD if init == "normal" else 0.0))
    losses = {"importance": Loss(importance_loss, importance), "load": Loss(load_loss, load)}
    return replace(stages, score=noisy, losses=losses)


class Perturbed(Scorer):
    """z' = z + N(0, (noise / E)^2) in training, z in evaluation; keeps the clean z for the losses."""

    accepts_half = True
    deviation: float

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        scored = Scored.of(super().forward(hidden, context))
        clean, deviation = scored.logits, self.deviation
        noisy = clean + deviation * randn_like(clean, self.ranks) if self.training and deviation else clean
        return replace(scored, logits=noisy, extra={**scored.extra, "clean": clean})

    def importance(self, given: LossInput) -> Tensor:
        """(std / mean)^2 of the importance sum_t softmax(z)_t, over experts; 0 at balance. In training only."""
        clean = given.extra["clean"].flatten(0, 1)
        if not self.training:
            return clean.new_zeros(())
        return squared_variation(given.token_mean(torch.softmax(clean, -1)))

    def load(self, given: LossInput) -> Tensor:
        """(std / mean)^2 of the load mean_t P(e is chosen under a new draw of its noise); 0 at balance. Training only.

        P = 1 - Phi((threshold_t - z_te) / (noise / E)), the threshold being the k-th largest noisy logit.
        """
        clean = given.extra["clean"].flatten(0, 1)
        if not (self.training and self.deviation and len(clean)):
            return clean.new_zeros(())
        threshold = given.logits.topk(given.experts.shape[-1], dim=-1).values[:, -1:]
        chosen = 1 - torch.special.ndtr((threshold - clean) / self.deviation)
        return squared_variation(given.token_mean(chosen))


@register_router(
    "vmoe", paper="Riquelme et al. 2021, arXiv 2106.05974", scores=linear_scores, needs="softmax", renormalize=False,
    defaults={"bias": False, "noise": 0.0},
)  # fmt: skip
def vmoe(
    layer: LayerSpec, stages: Stages, *, noise: NotNegative = 1.0, importance: NotNegative = 0.005,
    load: NotNegative = 0.005,
) -> Stages:  # fmt: skip
    """p = softmax(W h + noise), top-k of p, weights not renormalised; importance and load losses.

    noise: times 1/E is the standard deviation of the noise on the logits in training.
    importance: weight of the squared coefficient of variation of the experts' summed probabilities.
    load: the same of the probability that an expert is chosen under a new draw of the noise.
    """
    scorer = extended(stages.score, Perturbed)
    scorer.deviation = noise / layer.num_experts
    scorer.training_stochastic = scorer.training_stochastic or noise > 0
    losses = {"importance": Loss(scorer.importance, importance), "load": Loss(scorer.load, load)}
    return replace(stages, score=scorer, losses=losses)
