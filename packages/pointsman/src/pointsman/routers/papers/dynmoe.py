"""DynMoE (Guo et al. 2024, arXiv 2405.14297): each expert has a threshold, and every expert above it is active."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.linear import orthogonal_, upcast
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, NotNegative, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection
from pointsman.routers.frame.stages import Scorer, Selector, Sigmoid, Stages, extended, linear
from pointsman.routing import RoutingContext

NORM_FLOOR = 1e-4
FIRST_TEMPERATURE = math.log(10.0)
LARGEST_TEMPERATURE = math.log(100.0)


class SharpCosines(Scorer):
    """z_e = tau cos(h, w_e), tau = exp(min(t, ln 100)); W starts with orthogonal rows, t as ln 10."""

    accepts_half = True

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(orthogonal_(torch.empty(num_experts, dim)))
        self.threshold: nn.Parameter | None
        self.register_parameter("threshold", None)  # of `Thresholds`: saved before the temperature
        self.temperature = nn.Parameter(torch.tensor(FIRST_TEMPERATURE))

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        tokens = upcast(hidden)
        tau = self.temperature.to(tokens.dtype).clamp_max(LARGEST_TEMPERATURE).exp()
        directions = F.normalize(self.weight.to(tokens.dtype), dim=-1, eps=NORM_FLOOR)
        norms = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True).clamp_min(NORM_FLOOR)
        return Scored(linear(tokens, directions) * (tau / norms), {"tau": tau})

    def regularity(self, given: LossInput) -> Tensor:
        """|W W^T - I| (Frobenius) + the mean of |w_e|: experts apart from each other, and short."""
        weight = self.weight.to(given.logits.dtype)
        apart = weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        return given.ranks.once(torch.linalg.vector_norm(weight, dim=-1).mean() + torch.linalg.vector_norm(apart))


class Thresholds(Scorer):
    """`extra["threshold"]` = sg(tau G_e) [E], G from 0; tau is that of `SharpCosines`, and 1 for other scores."""

    accepts_half = True
    threshold: nn.Parameter

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        scored = Scored.of(super().forward(hidden, context))
        threshold = scored.extra.get("tau", 1.0) * self.threshold.to(scored.logits.dtype)
        return replace(scored, extra={**scored.extra, "threshold": torch.sigmoid(threshold)})


class Active(Selector):
    """The experts with s_e > threshold_e, at most k, the largest s_e - threshold_e first; each with weight 1 / count.

    Backward: the step passes gradients straight through, dw / d(s_e - threshold_e) = 1 / count for active experts.
    Evaluation: without an active one the expert with the largest s_e. Training: none.
    """

    ragged = True

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        margin = self._margin(scores)
        ranked = top_k(scores.choice.flatten(0, 1), margin.shape[-1])  # also where probabilities are rounded to 1
        experts = ranked.gather(-1, top_k(margin.gather(-1, ranked), k))
        above = margin.gather(-1, experts)
        active = above > 0
        if not self.training:
            lonely = ~active[:, :1]
            experts = torch.cat([torch.where(lonely, ranked[:, :1], experts[:, :1]), experts[:, 1:]], -1)
            active = torch.cat([torch.ones_like(lonely), active[:, 1:]], -1)
        return experts.masked_fill(~active, -1), self._weights(above, active)

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        above = self._margin(scores).gather(-1, experts.clamp_min(0))
        return Selection(experts, self._weights(above, experts >= 0))

    def _margin(self, scores: Scores) -> Tensor:
        return scores.probs.flatten(0, 1) - scores.extra["threshold"]

    def _weights(self, above: Tensor, active: Tensor) -> Tensor:
        weights = (1 + (above - above.detach())) / active.sum(-1, keepdim=True).clamp_min(1)
        return weights.masked_fill(~active, 0)


def sharp_cosines(layer: LayerSpec, *, auxiliary: NotNegative = 0.01) -> Stages:
    """Sigmoids of cosines, with a trained temperature.

    auxiliary: weight of |W W^T - I| + mean |w_e|.
    """
    scorer = SharpCosines(layer.dim, layer.columns)
    return Stages(scorer, Sigmoid(), losses={"auxiliary": Loss(scorer.regularity, auxiliary)})


@register_router(
    "dynmoe", paper="Guo et al. 2024, arXiv 2405.14297", scores=sharp_cosines, needs="sigmoid", renormalize=False,
    starts_at=lambda layer: layer.num_experts,
)  # fmt: skip
def dynmoe(layer: LayerSpec, stages: Stages) -> Stages:
    """DynMoE: all experts whose cosine with the token is above their own threshold, with equal weights. k is a cap."""
    scorer = extended(stages.score, Thresholds)
    scorer.threshold = nn.Parameter(torch.zeros(layer.num_experts))
    return replace(stages, score=scorer, select=Active())
