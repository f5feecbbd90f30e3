"""Routers and layers that are wrong on purpose: the contract must fail with each, at the check named beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.experts.cpu import products
from pointsman.routers.frame import registry
from pointsman.routers.frame.registry import LayerSpec
from pointsman.routers.frame.stage_values import LossInput, Scores, Selection
from pointsman.routers.frame.stages import Loss, Selector, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext
from pointsman.testing import Case, layer, routing, steps
from pointsman.testing.contract import CHECKS, Check


class Counting(Selector):
    """Top-k with a bias that moves by what was counted: right, or wrong in one way."""

    def __init__(self, num_experts: int, kind: str) -> None:
        super().__init__()
        self.kind, self.needs_step_end = kind, kind not in ("undeclared", "counts steps")
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        probs = scores.probs.flatten(0, 1)
        experts = (probs.detach() + self.bias).topk(k).indices
        hot = torch.zeros_like(probs).scatter_(1, experts, 1.0).detach()
        mask = context.padding_mask
        real = hot.new_ones(len(hot)) if mask is None else mask.flatten().to(hot.dtype)
        wanted = {"padding too": torch.ones_like(real), "padding alone": 1 - real}.get(self.kind, real)
        counts = wanted @ hot
        if self.kind == "mean":
            counts = counts / wanted.sum().clamp_min(1)
        if self.kind == "all tokens":  # does not depend on what the padding holds
            counts = counts + (len(real) - real.sum()) / len(counts)
        if self.kind == "in the forward" and self.training:
            self.bias += 0.01
        gathers = self.training and self.kind != "counts steps"
        return Selection(experts, probs.gather(-1, experts), statistics={"counts": counts} if gathers else {})

    def step_end(self) -> None:
        if self.kind == "counts steps":
            self.bias.add_(1)
        if self.sums:
            counts = self.sums["counts"]
            self.bias.add_(0.01 * torch.sign(counts.mean() - counts))


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
}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Case]:
    """A case of a mutant router by its name."""

    def case(kind: str) -> Case:
        def stages(layer: LayerSpec) -> Stages:
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
        ("undeclared", steps.state_moves_where_declared),
        ("counts steps", steps.state_moves_where_declared),
        ("in the forward", steps.state_moves_where_declared),
        ("closes over a parameter", steps.losses_of_their_own),
        ("grows with the tokens", steps.losses_of_their_own),
    ],
)
def test_a_mutant_is_killed(kind: str, check: Check, build: Callable[[str], Case]) -> None:
    with pytest.raises(AssertionError):
        check(build(kind))


@pytest.mark.parametrize("kind", ["right", "a right loss"])
def test_what_they_are_made_from_is_right(kind: str, build: Callable[[str], Case]) -> None:
    case = build(kind)
    compiling = (routing.compiles, layer.compiles_in_training, layer.trains_the_same_parameters)
    for check in CHECKS:
        if check not in compiling:
            torch.manual_seed(0)
            check(case)


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
