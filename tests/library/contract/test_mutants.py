"""Routers and layers that are wrong on purpose: the contract must fail with each, at the check named beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pointsman.experts.cpu import products
from pointsman.routers.frame import registry
from pointsman.routers.frame.registry import LayerSpec
from pointsman.routers.frame.stage_values import LossInput, Scored, Scores, Selection
from pointsman.routers.frame.stages import Loss, Normalizer, Selector, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext
from pointsman.testing import Case, flags, layer, routing, steps
from pointsman.testing.contract import CHECKS, Check


class Counting(Selector):
    """Top-k with a bias that moves by what was counted: right, or wrong in one way; "drawing": of noisy scores."""

    def __init__(self, num_experts: int, kind: str) -> None:
        super().__init__()
        self.kind, _, drawing = kind.partition(", ")
        self.training_stochastic = bool(drawing)
        self.needs_step_end = kind not in ("undeclared", "counts steps")
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs.flatten(0, 1)
        noise = 0.01 * torch.randn_like(probs) if self.training and self.training_stochastic else 0
        experts = (probs.detach() + self.bias + noise).topk(k).indices
        hot = torch.zeros_like(probs).scatter_(1, experts, 1.0).detach()
        mask = context.padding_mask
        real = hot.new_ones(len(hot)) if mask is None else mask.flatten().to(hot.dtype)
        wanted = {"padding too": torch.ones_like(real), "padding alone": 1 - real}.get(self.kind, real)
        counts = wanted @ hot
        if self.kind == "mean":
            counts = counts / wanted.sum().clamp_min(1)
        if self.kind == "all tokens":  # does not depend on what the padding holds
            counts = counts + (len(real) - real.sum()) / len(counts)
        if self.kind == ("in the forward" if self.training else "in evaluation"):
            self.bias += 0.01
        gathers = self.training and self.kind != "counts steps"
        return Selection(experts, probs.gather(-1, experts), statistics={"counts": counts} if gathers else {})

    def step_end(self) -> None:
        if self.kind == "counts steps":
            self.bias.add_(1)
        if self.sums:
            counts = self.sums["counts"]
            self.bias.add_(0.01 * torch.sign(counts.mean() - counts))


class Follows(Selector):
    """No token takes the first expert of the token before it, which nothing carries on."""

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs
        taken = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1.0)
        taken = nn.functional.pad(taken, (0, 0, 1, 0))[:, :-1] * (k < probs.shape[-1])
        experts = (probs - 2 * taken).flatten(0, 1).topk(k).indices
        return Selection(experts, probs.flatten(0, 1).gather(1, experts))


class Recurrent(LinearScorer):
    """Carries the sum of a sequence's logits, [B, E], of which a model that keeps few positions would cut experts."""

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        sums = super().forward(hidden, context).cumsum(1)
        sums = sums + (0 if context.past is None else context.past["sum"][:, None])
        return Scored(sums, carry={"sum": sums[:, -1]} if sums.shape[1] else {})


class Tied(Selector):
    """All experts at least as good as the k-th."""

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs.flatten(0, 1)
        weights, experts = probs.sort(-1, descending=True)
        width = int((weights >= weights[:, k - 1 : k]).sum(-1).amax()) if len(probs) else k
        return Selection(experts[:, :width], weights[:, :width])


class Odd(Selector):
    """Top-k that changes its scores in place, or whose weights are infinite where all k are equal, as one is."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        if self.in_place:
            scores.choice.detach().mul_(0.5)
        weights, experts = scores.probs.flatten(0, 1).topk(k)
        return experts, weights if self.in_place else weights / (weights.amax(1) - weights.amin(1))[:, None]


class Falling(Normalizer):
    """Less for larger logits, which it denies."""

    increasing, gives = True, frozenset({"positive", "share"})

    def forward(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(-logits)


class Exponential(Normalizer):
    """Scores of any size, under whatever they are said to be."""

    def __init__(self, *gives: str) -> None:
        super().__init__()
        self.gives = frozenset(gives)

    def forward(self, logits: Tensor) -> Tensor:
        return logits.exp()


class Changed(LinearScorer):
    """The logits that a function makes of the right ones and the hidden states, under these flags."""

    def __init__(self, layer: LayerSpec, change: Callable[[Changed, Tensor, Tensor], Tensor], **flags: object) -> None:
        super().__init__(layer.dim, layer.num_experts)
        self.change = change
        for name, value in flags.items():
            setattr(self, name, value)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return self.change(self, super().forward(hidden, context), hidden)


class Halved(LinearScorer):
    """A step halves the weight, undeclared."""

    @torch.no_grad()
    def step_end(self) -> None:
        self.weight.div_(2)


class Hidden(LinearScorer):
    """A random map that is neither parameter nor buffer: nothing saves it."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer.dim, layer.num_experts)
        self.rows = [torch.randn(layer.num_experts) for _ in range(layer.dim)]

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return super().forward(hidden, context) + hidden @ torch.stack(self.rows).to(hidden.dtype)


class Unsaved(LinearScorer):
    """A buffer that is not saved: a cache, which is right, or a state that a forward or an undeclared step moves."""

    def __init__(self, layer: LayerSpec, kind: str) -> None:
        super().__init__(layer.dim, layer.num_experts)
        self.kind = kind
        self.kept: Tensor
        self.register_buffer("kept", torch.zeros(layer.dim), persistent=False)

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        if self.kind == "cache":
            self.kept = torch.ones(hidden.shape[1])
            return super().forward(hidden * self.kept[:, None].to(hidden.dtype), context)
        if self.kind == "forward" and self.training:
            self.kept.copy_(hidden.detach().flatten(0, 1).sum(0))
        return super().forward(hidden if self.training else hidden - self.kept.to(hidden.dtype), context)

    @torch.no_grad()
    def step_end(self) -> None:
        if self.kind == "step":
            self.kept.lerp_(self.weight.mean(0), 0.1)


class Neighbours(LinearScorer):
    """The first expert gets more with the padding of the batch's other sequences."""

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        logits = super().forward(hidden, context)
        if context.padding_mask is None:
            return logits
        padded = (~context.padding_mask).sum(1).to(logits.dtype)
        others = (padded.sum() - padded)[:, None, None].expand(*logits.shape[:2], 1)
        return logits + nn.functional.pad(others, (0, logits.shape[2] - 1))


def less_the_mean(score: Changed, logits: Tensor, hidden: Tensor) -> Tensor:
    """Of a sequence with its padding; noisy in training."""
    mean = logits.sum(1, keepdim=True) / max(1, logits.shape[1])
    return logits - mean + 0.1 * torch.randn_like(logits) * score.training


def by_place(score: Changed, logits: Tensor, hidden: Tensor) -> Tensor:
    """The first expert gets more with each sequence of the batch; noisy in training where that is declared."""
    noise = 0.1 * torch.randn_like(logits) if score.training and score.training_stochastic else 0
    place = torch.arange(len(logits), dtype=logits.dtype)[:, None, None]
    return logits + nn.functional.pad(place.expand(*logits.shape[:2], 1), (0, logits.shape[2] - 1)) + noise


def seeded(score: Changed, logits: Tensor, hidden: Tensor) -> Tensor:
    torch.manual_seed(0)
    return logits


def of_directions(score: Changed, logits: Tensor, hidden: Tensor) -> Tensor:
    return logits / hidden.norm(dim=-1, keepdim=True)


STAGES: dict[str, Callable[[LayerSpec], Stages]] = {
    "mean with padding": lambda layer: Stages(Changed(layer, less_the_mean, causal=False, training_stochastic=True)),
    "by place, drawing": lambda layer: Stages(Changed(layer, by_place, training_stochastic=True)),
    "by place, of token ids": lambda layer: Stages(Changed(layer, by_place, needs=frozenset({"token_ids"}))),
    "reseeds": lambda layer: Stages(Changed(layer, seeded)),
    "of directions": lambda layer: Stages(Changed(layer, of_directions)),
    "hides its weight": lambda layer: Stages(Hidden(layer)),
    "halves its weight": lambda layer: Stages(Halved(layer.dim, layer.num_experts)),
    "cache, not saved": lambda layer: Stages(Unsaved(layer, "cache")),
    "mean in training, not saved": lambda layer: Stages(Unsaved(layer, "forward")),
    "mean of weights, not saved": lambda layer: Stages(Unsaved(layer, "step")),
    "padding of others": lambda layer: Stages(Neighbours(layer.dim, layer.num_experts)),
    "follows the token before": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=Follows()),
    "carries no positions": lambda layer: Stages(Recurrent(layer.dim, layer.num_experts)),
    "in place": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=Odd(True)),
    "infinite weights": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=Odd(False)),
    "falling": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), Falling()),
    "any scores": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), Exponential("positive")),
    "no share": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), Exponential("positive", "share")),
    "no distribution": lambda layer: Stages(
        LinearScorer(layer.dim, layer.num_experts), Exponential("positive", "distribution")
    ),
    "all that tie": lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts), select=Tied()),
}


def with_loss(layer: LayerSpec, loss: Callable[[LinearScorer], Callable[[LossInput], Tensor]]) -> Stages:
    score = LinearScorer(layer.dim, layer.num_experts)
    return Stages(score, losses={"own": Loss(loss(score), 0.1)})


def real_rows(given: LossInput) -> Tensor:
    """The logits of real tokens, at least one row."""
    rows = given.logits if given.mask is None else given.logits[given.mask]
    return rows if len(rows) else given.logits.new_zeros(1, given.logits.shape[1])


def closed(score: LinearScorer) -> Callable[[LossInput], Tensor]:
    """It holds the parameter that the scorer had when it was built: a copy of the router keeps the original's."""
    weight = score.weight
    return lambda given: weight.square().mean() + 0 * given.logits.sum()


LOSSES: dict[str, Callable[[LinearScorer], Callable[[LossInput], Tensor]]] = {
    "a right loss": lambda _: lambda given: real_rows(given).square().mean(),
    "closes over a parameter": closed,
    "grows with the tokens": lambda _: lambda given: real_rows(given).square().mean(-1).sum(),
    "diluted by padding": lambda _: lambda given: real_rows(given).square().mean(-1).sum() / max(1, len(given.logits)),
    "NaN for padding alone": lambda _: (
        lambda given: real_rows(given).sum() / (1 if given.mask is None else given.mask.sum())
    ),
}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Case]:
    """A case of a mutant router by its name."""

    def case(kind: str) -> Case:
        def stages(layer: LayerSpec) -> Stages:
            if kind in STAGES:
                return STAGES[kind](layer)
            if kind in LOSSES:
                return with_loss(layer, LOSSES[kind])
            return Stages(LinearScorer(layer.dim, layer.num_experts), select=Counting(layer.num_experts, kind))

        monkeypatch.setitem(registry.ROUTERS, "mutant", registry.Entry("mutant", stages, "", ""))
        return Case("mutant", dim=24, num_experts=6)

    return case


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("padding too", steps.statistics),
        ("padding alone", steps.statistics),
        ("all tokens", steps.statistics),
        ("mean", steps.statistics),
        ("padding too, drawing", steps.statistics),
        ("undeclared", steps.state_moves_where_declared),
        ("counts steps", steps.state_moves_where_declared),
        ("in the forward", steps.state_moves_where_declared),
        ("in evaluation", steps.state_moves_where_declared),
        ("halves its weight", steps.state_moves_where_declared),
        ("hides its weight", routing.state_dict),
        ("mean in training, not saved", steps.state_moves_where_declared),
        ("mean of weights, not saved", steps.state_moves_where_declared),
        ("closes over a parameter", steps.losses_of_their_own),
        ("grows with the tokens", steps.losses_of_their_own),
        ("diluted by padding", routing.padding),
        ("padding of others", routing.padding),
        ("mean with padding", routing.padding),
        ("NaN for padding alone", layer.nothing_to_do),
        ("by place, drawing", flags.batch_invariant_flag),
        ("by place, of token ids", flags.batch_invariant_flag),
        ("reseeds", flags.stochastic_flag),
        ("follows the token before", flags.segments),
        ("carries no positions", flags.segments),
        ("of directions", routing.shapes_and_sums),
        ("all that tie", routing.shapes_and_sums),
        ("in place", routing.shapes_and_sums),
        ("infinite weights", routing.shapes_and_sums),
        ("falling", routing.shapes_and_sums),
        ("no share", routing.shapes_and_sums),
        ("no distribution", routing.shapes_and_sums),
    ],
)
def test_a_mutant_is_killed(kind: str, check: Check, build: Callable[[str], Case]) -> None:
    with pytest.raises(AssertionError):
        check(build(kind))


@pytest.mark.parametrize("kind", ["right", "right, drawing", "a right loss", "cache, not saved"])
def test_what_they_are_made_from_is_right(kind: str, build: Callable[[str], Case]) -> None:
    case = build(kind)
    compiling = (routing.compiles, layer.compiles_in_training, layer.trains_the_same_parameters)
    for check in CHECKS:
        if check not in compiling:
            torch.manual_seed(0)
            check(case)


def test_scores_that_overflow_draw_nothing(build: Callable[[str], Case]) -> None:
    flags.stochastic_flag(build("any scores"))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_gradient_of_the_fast_path_is_found(which: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the input, of the combine weights, and of w_in; also where only wide layers are wrong."""
    right = products.backward

    def wrong(gradient: Tensor, *rest: Any) -> tuple[Any, ...]:
        found = list(right(gradient, *rest))
        if gradient.shape[1] > 24 or not wide:
            found[which] = found[which] * 1.01
        return tuple(found)

    monkeypatch.setattr(products, "backward", wrong)
    with pytest.raises(AssertionError):
        steps.equals_the_reference(Case("smoe", dim=24, num_experts=6))
