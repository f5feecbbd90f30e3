"""Soft MoE (Puigcerver et al. 2023, arXiv 2308.00951): experts see weighted means of all tokens, none is dropped."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.experts.combine import Slots
from pointsman.routers.frame.entries import Count, LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scored, Scores, Selection
from pointsman.routers.frame.stages import Scorer, Selector, Stages, linear
from pointsman.routing import RoutingContext

NORM_FLOOR = 1e-6


class SlotScorer(Scorer):
    """L_tep = g (x_t / |x_t|) . (Phi_ep / |Phi_ep|): how well token t fits slot p of expert e.

    The logits [B, T, E] are the log-sum-exp over an expert's slots, so that their softmax is the share of the expert in
    a token's output. Phi [E, P, dim] starts as LeCun normal, N(0, 1 / dim), g as 1.
    """

    def __init__(self, dim: int, num_experts: int, slots: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(num_experts, slots, dim) * dim**-0.5)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        phi = F.normalize(self.phi.to(hidden.dtype), dim=-1, eps=NORM_FLOOR)
        norms = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).clamp_min(NORM_FLOOR)
        fit = linear(hidden, phi.flatten(0, 1)) * (self.gain.to(hidden.dtype) / norms)
        fit = fit.unflatten(-1, phi.shape[:2])
        return Scored(torch.logsumexp(fit, -1), {"fit": fit})


class SoftSlots(Selector):
    """D = softmax of L over the tokens of a sequence, C = softmax of L over all slots; y = C E(D^T x).

    Every token has all experts, with the sums of C over their slots as weights. Scores without slots have one slot an
    expert, L = z.
    """

    causal = False
    needs_moe = True
    overrides = frozenset({"capacity", "eval_capacity", "scale", "weigh", "balance", "mixer"})

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots  # of all experts together

    def cost(self, batch: int, tokens: int, k: int, dim: int) -> tuple[float, int]:
        return batch * self.slots, 2 * tokens * self.slots * dim  # to dispatch and to combine

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        fit, mask = scores.extra.get("fit", scores.logits[..., None]), context.padding_mask
        combine = torch.softmax(fit.flatten(2), -1).view_as(fit)
        if mask is not None:
            fit = fit.masked_fill(~mask[..., None, None], -torch.inf)
            combine = combine * mask[..., None, None]
        dispatch = torch.softmax(fit, 1)
        if mask is not None:  # a sequence of padding alone
            dispatch = dispatch.masked_fill(~mask[..., None, None], 0)
        weights = combine.sum(-1).flatten(0, 1)
        experts = torch.arange(weights.shape[-1], device=weights.device).expand(weights.shape)
        return Selection(experts, weights, Slots(dispatch=dispatch, combine=combine))

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        raise ValueError("soft: there is no choice of experts to replay")


def slot_scores(layer: LayerSpec, *, slots: Count = 1) -> Stages:
    """Scaled cosines with the experts' slots, of several the log-sum-exp.

    slots: of each expert (the paper's cost of one expert a token: tokens of a sequence / experts).
    """
    return Stages(SlotScorer(layer.dim, layer.columns, slots))


@register_router(
    "soft", paper="Puigcerver et al. 2023, arXiv 2308.00951", scores=slot_scores, needs="softmax", renormalize=False,
    fixed_k=True,
)  # fmt: skip
def soft(layer: LayerSpec, stages: Stages) -> Stages:
    """Soft MoE: each expert works on weighted means of a sequence's tokens (slots). Every token uses all experts."""
    each = stages.score.phi.shape[1] if isinstance(stages.score, SlotScorer) else 1
    return replace(stages, select=SoftSlots(each * layer.num_experts))
