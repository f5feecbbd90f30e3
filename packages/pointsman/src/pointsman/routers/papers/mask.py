"""MaskMoE (Su et al. 2024, arXiv 2407.09816): each token id sees a fixed random set of experts, a rare one only one."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from pointsman.routers.frame.entries import LayerSpec, Whole, register_router
from pointsman.routers.frame.stage_values import Scored, Scores
from pointsman.routers.frame.stages import Scorer, Stages, TopK
from pointsman.routers.papers.hash import ByTokenIds
from pointsman.routers.papers.topk import linear_scores
from pointsman.routing import RoutingContext

VISIBLE = 8
NEXT_LAYER = 1_000_003  # from the seed of one layer's sets to that of the layer above


class MaskedScorer(ByTokenIds):
    """z of the scores, and -inf for the experts outside the token id's set.

    The set of an id are the first `width` of (e_0 + j stride) mod E, with e_0 and a stride coprime to E drawn from
    `seed`; `width` is `visible`, or 1 for the ids that `calibrate` found rare.
    """

    name = "mask"

    def __init__(self, gate: Scorer, num_experts: int, vocab_size: int, visible: int, rare: int, seed: int) -> None:
        super().__init__(gate, num_experts, vocab_size)
        self.visible, self.rare, self.counted = visible, rare, "rare" if rare else ""
        draw = torch.Generator().manual_seed(seed)
        self.first = nn.Buffer(torch.randint(num_experts, (vocab_size,), generator=draw))
        self.stride = nn.Buffer(self.strides(draw))
        self.width = nn.Buffer(torch.full((vocab_size,), visible))
        self.ready = nn.Buffer(torch.tensor(rare == 0))

    def fill(self, counts: Tensor) -> None:
        """One visible expert for every id with fewer than `rare` occurrences."""
        self.width.copy_(torch.where(counts < self.rare, 1, self.visible))

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        ids = self.ids(context)
        places = torch.arange(self.num_experts, device=hidden.device)
        order = (self.first[ids][..., None] + places * self.stride[ids][..., None]) % self.num_experts
        seen = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, places < self.width[ids][..., None])
        scored = self.inside(hidden, context, seen=seen)
        return replace(scored, logits=scored.logits.masked_fill(~seen, -torch.inf))


class VisibleTopK(TopK):
    """The k best visible experts; -1 where there are fewer."""

    ragged = True

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        seen = scores.extra["seen"]
        if scores.choice is not scores.logits:  # a mixer's probabilities
            probs, choice = scores.probs.masked_fill(~seen, 0), scores.choice.masked_fill(~seen, -torch.inf)
            scores = Scores(scores.logits, probs, choice)
        experts, weights = super().forward(scores, k, context)
        none = ~seen.flatten(0, 1).gather(-1, experts)
        return experts.masked_fill(none, -1), weights.masked_fill(none, 0)


@register_router(
    "mask", paper="Su et al. 2024, arXiv 2407.09816", scores=linear_scores, defaults={"bias": False},
    renormalize=lambda layer: layer.top_k > 1,
)  # fmt: skip
def mask(layer: LayerSpec, stages: Stages, *, visible: int | None = None, rare: Whole = 0, seed: int = 0) -> Stages:
    """p = softmax(W h) over the experts that the token id may see; top-k of p.

    visible: how many experts an id sees (none = 8, or all where there are fewer).
    rare: ids with fewer occurrences see one; needs `router.score.calibrate(counts)` (0 = no id is rare).
    seed: of the sets, which differ between the layers of a model.
    """
    visible = min(VISIBLE, layer.num_experts) if visible is None else visible
    if not 1 <= visible <= layer.num_experts:
        raise ValueError(f"mask: option visible={visible}: allowed are whole numbers from 1 to {layer.num_experts}")
    vocabulary = layer.need_vocab_size("mask")
    scorer = MaskedScorer(stages.score, layer.num_experts, vocabulary, visible, rare, seed + NEXT_LAYER * layer.place)
    select = VisibleTopK(layer.renormalize)
    select.most = visible
    return replace(stages, score=scorer, select=select)
