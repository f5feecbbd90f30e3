"""Mixture of Depths on the feed-forward part (Raposo et al. 2024, arXiv 2404.02258): few tokens are processed."""

from dataclasses import replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.selection import members, top_k
from pointsman.routers.frame.entries import LayerSpec, NotNegative, Share, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scores, Selection
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.expert_choice import as_selection, best_tokens
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext


class SomeTokens(Selector):
    """Training: each expert takes its ceil(share k T / E) best tokens of a sequence. Evaluation: all with sg(r) > 1/2.

    Evaluation takes at most k experts a token, those of the largest r. Weights are r, or sg(r).
    """

    training_causal = False
    ragged = True
    overrides = frozenset({"balance"})  # in training loads are equal: the balance loss is 1

    def __init__(self, share: float, gate: str) -> None:
        super().__init__()
        self.share, self.gate = share, gate
        if gate == "linear":  # weights of both signs have no sum to divide by
            self.overrides = self.overrides | {"capacity_total"}

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        values = self._values(scores).flatten(0, 1)
        if self.training:
            each = self.share * k / values.shape[-1]
            return as_selection(*best_tokens(scores.choice, context.padding_mask, each), values)
        experts = top_k(scores.choice.flatten(0, 1), k)
        own = scores.probs if scores.unmixed is None else scores.unmixed  # what the auxiliary loss teaches
        passed = own.flatten(0, 1).gather(-1, experts) <= 0.5
        return Selection(experts.masked_fill(passed, -1), values.gather(-1, experts).masked_fill(passed, 0))

    def cost(self, batch: int, tokens: int, k: int, dim: int) -> tuple[float, int]:
        return tokens * self.share * k, 0

    def _values(self, scores: Scores) -> Tensor:
        return scores.logits if self.gate == "linear" else scores.probs

    def replay(self, scores: Scores, experts: Tensor) -> Selection:
        return super().replay(replace(scores, probs=self._values(scores)), experts)


def will_be_taken(given: LossInput) -> Tensor:
    """Binary cross-entropy of sg(r) with "this expert took the token", the mean over tokens and experts."""
    experts, logits = given.experts, given.logits
    taken = members(experts, logits.shape[-1]).to(logits.dtype)
    return given.token_mean(F.binary_cross_entropy_with_logits(logits, taken, reduction="none")).mean()


@register_router(
    "depths", paper="Raposo et al. 2024, arXiv 2404.02258", scores=linear_scores,
    defaults={"bias": False, "gate": "sigmoid"}, needs="sigmoid", renormalize=False,
)  # fmt: skip
def depths(
    layer: LayerSpec, stages: Stages, *, share: Share = 0.125, auxiliary: NotNegative = 0.01,
    gate: Literal["linear", "sigmoid"] = "linear",
) -> Stages:  # fmt: skip
    """Mixture of Depths: experts take few tokens of a sequence, the others pass. Training looks ahead.

    share: of the tokens of a sequence that is processed, times k / E for each expert.
    auxiliary: weight of the cross-entropy that teaches sg(r) > 1/2 to mean "taken", which evaluation goes by.
    gate: what multiplies an expert's output: r = W h itself (the paper's), or its sigmoid.
    """
    return replace(stages, select=SomeTokens(share, gate), losses={"auxiliary": Loss(will_be_taken, auxiliary)})
