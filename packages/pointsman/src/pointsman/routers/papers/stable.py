"""StableMoE (Dai et al. 2022, arXiv 2204.08396): routing is learned, distilled into one of token ids, and frozen."""

from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pointsman._alive import Alive
from pointsman.auxiliary import assignment_counts
from pointsman.ops.linear import orthogonal_
from pointsman.ops.selection import top_k
from pointsman.ranks import ALONE, every_rank
from pointsman.routers.frame.entries import LayerSpec, NotNegative, Whole, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores
from pointsman.routers.frame.stages import Scorer, Selector, Sigmoid, Stages, of_chosen
from pointsman.routers.papers.hash import ByTokenIds
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext

GAIN = 0.1
WIDTH = 50


class TwoStageScorer(ByTokenIds):
    """z = C h, and the light router's scores u . K_e, which stage two and evaluation choose by.

    u_t = D[id_t] ("token"), or the mean of D[id_t] and D[id_(t-1)] ("bigram"; the first token alone). C [E, dim] and
    K [E, 50] start orthogonal with gain 0.1, D [V, 50] ~ N(0, 1). `steps` counts the steps; after `stage_one` of them D
    and K never train again, and the losses are 0.
    """

    name = "stable"
    needs_step_end = True
    no_decay = ("token",)

    def __init__(
        self, gate: Scorer, num_experts: int, vocab_size: int, stage_one: int, kind: str = "token", own: bool = True
    ) -> None:
        super().__init__(gate, num_experts, vocab_size)
        self.stage_one, self.kind = stage_one, kind
        self.token = nn.Parameter(torch.randn(vocab_size, WIDTH))
        self.light = nn.Parameter(torch.empty(num_experts, WIDTH))
        for weight in (*(gate.parameters() if own else ()), self.light):
            orthogonal_(weight, GAIN)
        self.steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self._has_frozen = False
        self._freeze_light()

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        ids = self.ids(context)
        seen, carry = self._seen(ids, context)
        light = self._features(seen, ids.shape[1]).to(hidden.dtype) @ self.light.to(hidden.dtype).T
        second = self.steps >= self.stage_one
        scored = self.inside(hidden, context, light=torch.where(second, light.detach(), light), second=second)
        return replace(scored, carry={**scored.carry, **carry})

    def _seen(self, ids: Tensor, context: RoutingContext) -> tuple[Tensor, dict[str, Tensor]]:
        """The ids [B, 1 + T] that a bigram's light router reads, -1 for padding and for none; and those to carry on."""
        if self.kind == "token":
            return ids, {}
        if context.padding_mask is not None:
            ids = ids.masked_fill(~context.padding_mask, -1)
        before = (context.past or {}).get("ids", ids[:, :0])[:, -1:]
        seen = F.pad(torch.cat([before, ids], 1), (1 - before.shape[1], 0), value=-1)
        return seen, {"ids": seen[:, -1:]}

    def _features(self, seen: Tensor, length: int) -> Tensor:
        """u [B, T, 50] of the ids `seen` [B, (1 +) T]."""
        rows = F.embedding(seen.clamp_min(0), self.token)
        own = rows[:, -length:] if length else rows[:, :0]
        if self.kind == "token":
            return own
        there = (seen[:, :length] >= 0)[..., None]
        return (own + torch.where(there, rows[:, :length], own)) / 2

    def load(self, given: LossInput) -> Tensor:
        """(1/N) sum_e (n_e - nbar) / nbar sum_{n: e in A_n} sigmoid(z_ne), of the choice by z; 0 at balance."""
        experts, gates = self._chosen(given)
        (counts,) = given.ranks.total(assignment_counts(experts, given.logits.shape[-1]).to(gates.dtype))
        excess = counts / counts.mean().clamp_min(1e-9) - 1
        return self._first_stage(given.token_mean(gates * excess[experts.clamp_min(0)]).sum())

    def distill(self, given: LossInput) -> Tensor:
        """The light router's mean cross entropy with the choice by z; of several experts their mean."""
        experts, _ = self._chosen(given)
        total = of_chosen(torch.log_softmax(given.extra["light"].flatten(0, 1), -1), experts).sum(-1, keepdim=True)
        return self._first_stage(-given.token_mean(total / (experts >= 0).sum(-1, keepdim=True).clamp_min(1)).sum())

    def _chosen(self, given: LossInput) -> tuple[Tensor, Tensor]:
        # in stage one of training these are the chosen ones; in stage two no loss is left
        experts = given.experts if self.training else top_k(given.choice, given.experts.shape[-1])
        gates = of_chosen(given.unmixed, experts)
        return experts if given.mask is None else experts.masked_fill(~given.mask[:, None], -1), gates

    def _first_stage(self, loss: Tensor) -> Tensor:
        return torch.where(self.steps >= self.stage_one, 0.0, loss)

    def step_end(self) -> None:
        super().step_end()
        self.steps += 1
        self._freeze_light()

    def _freeze_light(self) -> None:
        """Freezes the light router in stage two. A loaded state of stage one undoes that, unless `freeze` holds all."""
        if self.steps.is_meta:
            return
        parts, own = (self.token, self.light), list(cast(Scorer, self.gate).parameters())
        _in_stage_two.discard(self)
        if int(self.steps) >= self.stage_one:
            _in_stage_two.add(self)
            for parameter in parts:
                parameter.grad = None
                if not self.stage_one or every_rank() is ALONE:  # DDP waits for what trained when it was made: zeros
                    self._has_frozen |= parameter.requires_grad
                    parameter.requires_grad_(False)
        elif self._has_frozen and (any(one.requires_grad for one in own) or not (own or self.frozen)):
            self._has_frozen = False
            for parameter in parts:
                parameter.requires_grad_(True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._freeze_light()  # of a copy

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._freeze_light()


_in_stage_two: Alive[TwoStageScorer] = Alive()


def _hold(*_: Any) -> None:
    for one in _in_stage_two:  # momentum and weight decay would move them
        one.token.grad = one.light.grad = None


register_optimizer_step_pre_hook(_hold)


class TwoStages(Selector):
    """The k best by z in stage one of training, by the light router afterwards; weights are sigmoid(z)."""

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        choice = scores.extra["light"]
        if self.training:
            choice = torch.where(scores.extra["second"], choice, scores.choice)
        experts = top_k(choice.flatten(0, 1), k)
        return experts, self.renormalized(scores.probs.flatten(0, 1).gather(-1, experts))


def stage_scores(layer: LayerSpec) -> Stages:
    """Sigmoids of products with trained centroids, which start orthogonal."""
    scorer = LinearScorer(layer.dim, layer.columns, bias=False)
    if layer.choice != layer.scores:  # whose scorer does that itself
        orthogonal_(scorer.weight, GAIN)
    return Stages(scorer, Sigmoid())


@register_router("stable", paper="Dai et al. 2022, ACL, arXiv 2204.08396", scores=stage_scores, renormalize=False)
def stable(
    layer: LayerSpec, stages: Stages, *, stage_one: Whole = 6000, load: NotNegative = 0.3, distill: NotNegative = 0.3,
    light: Literal["token", "bigram"] = "token",
) -> Stages:  # fmt: skip
    """Two stages: a balanced router is learned and distilled into one of token ids alone, which is then frozen.

    stage_one: optimizer steps of stage one (the released code: 6,000 of 60,000).
    load: weight of its balance loss.
    distill: weight of the distillation.
    light: what the distilled router sees: the token's id, or also the one before it (bigram).
    """
    own = layer.choice == layer.scores
    score = TwoStageScorer(stages.score, layer.num_experts, layer.need_vocab_size("stable"), stage_one, light, own)
    losses = {"load": Loss(score.load, load), "distill": Loss(score.distill, distill)}
    return replace(stages, score=score, select=TwoStages(layer.renormalize), losses=losses)
