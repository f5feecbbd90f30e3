"""SparseMixer (Liu et al. 2023, arXiv 2310.00811) and its second version (GRIN, Liu et al. 2024, arXiv 2409.12136).

Experts are drawn, and the router gets the gradient of the expected output, estimated with the midpoint method.
"""

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from pointsman.ops.drawing import rand_like
from pointsman.ops.linear import refuse_second_derivatives
from pointsman.routers.frame.entries import Allowed, LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class DrawnWeight(torch.autograd.Function):
    """Forward: w = b q_D. Backward, whatever b was: dw/dz_i = gain q_D ([i = D] - q_i), times `slope`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, q: Tensor, drawn: Tensor, factor: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(q, drawn)
        ctx.slope = slope
        return q.gather(-1, drawn) * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("sparsemixer", plain=False)
        q, drawn = ctx.saved_tensors
        chosen = q.gather(-1, drawn)
        direction = (-chosen * q).scatter_add(-1, drawn, chosen)
        return grads[0] * ctx.slope * direction, None, None, None, None


class Drawn(Selector):
    """k rounds over the logits that are not taken yet: m their maximum, q the softmax over those near it.

    Near: (m - z_i) / max(|z_i|, m) <= 2 r. Training draws D ~ q; evaluation takes the largest. Weight b q_D: in
    version 2 b = 1 if D is the largest or with probability 1/4, else 1/3; in version 1 b = 1/2 with probability 1/2
    where D is not the largest, and the gradient is doubled.
    """

    training_stochastic = True

    def __init__(self, reach: float, version: int, renormalize: bool) -> None:
        super().__init__(renormalize)
        self.reach, self.version = reach, version

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        choice = scores.choice
        # a mixer hands on probabilities: their logarithms are logits again
        logits = choice if choice is scores.logits else choice.clamp_min(torch.finfo(choice.dtype).tiny).log()
        left = logits.flatten(0, 1)
        experts, weights = [], []
        for _ in range(k):
            drawn, weight = self._round(left)
            experts.append(drawn)
            weights.append(weight)
            left = left.scatter(-1, drawn, -math.inf)
        return torch.cat(experts, -1), self.renormalized(torch.cat(weights, -1))

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        raise ValueError("sparsemixer: weights depend on what was drawn before, so that a routing cannot be replayed")

    def _round(self, left: Tensor) -> tuple[Tensor, Tensor]:
        values = left.detach()
        best, largest = values.max(-1, keepdim=True)
        scale = torch.maximum(values.abs(), best)
        distance = torch.where(scale == 0, 0, (best - values) / scale)
        far = (distance > 2 * self.reach) | values.isinf()
        far = far.scatter(-1, largest, False)
        if not self.training:
            return largest, torch.softmax(left.masked_fill(far, -math.inf), -1).gather(-1, largest)
        q = torch.softmax(values.masked_fill(far, -math.inf), -1)
        # how many partial sums of q lie below a uniform number: a draw from q; 1 - U is above 0, where a sum of 0 is
        place, luck = 1 - rand_like(best, self.ranks), rand_like(best, self.ranks)
        sums = q.cumsum(-1)
        drawn = (sums < place * sums[:, -1:]).sum(-1, keepdim=True)
        least, chance, slope = (1 / 3, 0.75, 1.0) if self.version == 2 else (0.5, 0.5, 2.0)
        factor = torch.where((drawn == largest) | (luck > chance), 1.0, least).to(q.dtype)
        return drawn, DrawnWeight.apply(left, q, drawn, factor, slope)  # type: ignore[no-untyped-call]


@register_router(
    "sparsemixer", paper="Liu et al. 2023, arXiv 2310.00811; 2024, arXiv 2409.12136", scores=linear_scores,
    defaults={"bias": False}, needs="softmax", renormalize=False,
)  # fmt: skip
def sparsemixer(
    layer: LayerSpec, stages: Stages, *,
    r: Annotated[float, Allowed("numbers from 0 to 1000", lambda value: 0 <= value <= 1e3)] = 0.1,
    version: Literal["1", "2"] = "2",
) -> Stages:  # fmt: skip
    """Experts are drawn from a softmax of the largest logits; the router gets a midpoint estimate of its gradient.

    r: experts further than 2 r below the largest logit (relative) are never drawn (version 1: 0.1; Phi-3.5-MoE: 0.01).
    version: of the estimate: 1 (one expert), 2 (GRIN).
    """
    return replace(stages, select=Drawn(r, int(version), layer.renormalize))
