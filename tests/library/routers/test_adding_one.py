"""A router of one's own: the example of docs/routers/index.md, as it stands, and what a scorer is given."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from pointsman import MoE, RoutingContext, build_router
from pointsman.routers.frame import registry
from pointsman.routers.frame.entries import Count, Probability
from pointsman.routers.frame.registry import LayerSpec
from pointsman.routers.frame.stage_values import Loss, Scores
from pointsman.routers.frame.stages import Mixer, Normalizer, Selector, Stages, TopK
from pointsman.routers.papers.topk import LinearScorer, linear_scores


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routers" / "index.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    try:
        exec(found[1], {})
        layer = MoE(8, 8, 4, router="mine:sharpness=2")
        assert layer(torch.randn(2, 3, 8)).shape == (2, 3, 8)
        assert layer.router.score.sharpness == 2.0
        routing = build_router("mine@smoe:nulls=2", dim=8, num_experts=4)(torch.randn(2, 3, 8))
        assert routing.probs.shape == (6, 4 + 2)
        assert registry.entry("mine").summary.startswith("One line that")
    finally:
        registry.ROUTERS.pop("mine", None)


@pytest.fixture
def register() -> Iterator[Callable[..., Any]]:
    """`register_router`, undone afterwards."""
    before = dict(registry.ROUTERS)
    yield partial(registry.register_router, paper="none")
    registry.ROUTERS.clear()
    registry.ROUTERS.update(before)


def test_scores_without_virtual_experts_are_no_scores_with_them(register: Callable[..., Any]) -> None:
    register("flat")(lambda layer: Stages(LinearScorer(layer.dim, layer.num_experts)))
    assert build_router("flat", dim=8, num_experts=4)(torch.randn(3, 8)).probs.shape == (3, 4)
    with pytest.raises(ValueError, match=r"flat@smoe:nulls=2: the scores are of 4 experts, not of 6: use "):
        build_router("flat@smoe:nulls=2", dim=8, num_experts=4)(torch.randn(3, 8))


def test_virtual_experts_need_no_option_for_their_kind(register: Callable[..., Any]) -> None:
    def choice(layer: LayerSpec, stages: Stages, *, nulls: int = 0) -> Stages:
        return stages

    register("counted", scores=linear_scores)(choice)
    assert build_router("counted", dim=8, num_experts=4).virtual == ()
    assert build_router("counted:nulls=1", dim=8, num_experts=4).virtual == ("zero",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"needs": "probability"}, "router 'mine': unknown 'probability': allowed: distribution, "),
        ({"needs": "nothing|sofmax"}, "unknown 'sofmax': did you mean 'softmax'"),
        ({"needs": ""}, "router 'mine': unknown '': allowed: distribution, "),
        ({"balance": -1.0}, "mine: balance=-1.0: allowed are numbers from 0"),
        ({"balance": math.nan}, "mine: balance=nan: allowed is a number"),
        ({"balance": "x"}, "mine: balance='x': allowed is a number"),
        ({"fixed_k": "no"}, "mine: fixed_k='no': allowed is true or false"),
        ({"renormalize": None}, "mine: renormalize=None: allowed is true or false"),
        ({"defaults": {"bais": False}}, "router 'mine': unknown 'bais': did you mean 'bias'"),
        ({}, "option 'sharpness' needs a type, as in sharpness: float = "),
    ],
)
def test_mistakes_in_what_is_registered_are_told_at_once(
    fields: dict[str, Any], says: str, register: Callable[..., Any]
) -> None:
    def choice(layer: LayerSpec, stages: Stages, *, sharpness=1.0) -> Stages:  # type: ignore[no-untyped-def]
        return stages

    if fields:
        choice.__annotations__["sharpness"] = float
    with pytest.raises(ValueError, match=says):
        register("mine", scores=linear_scores, **fields)(choice)


@pytest.mark.parametrize("kind", ["router", "mixer"])
def test_an_option_without_the_star_is_refused_instead_of_left_out(kind: str) -> None:
    def build(layer: LayerSpec, sharpness: float = 1.0) -> Stages:
        return linear_scores(layer)

    add = {"router": registry.register_router, "mixer": registry.register_mixer}[kind]
    with pytest.raises(ValueError, match=r"build: option 'sharpness' must come after a \*: \(layer, \*, sharpness: fl"):
        add("mine", paper="none")(build)


@pytest.mark.parametrize("returned", [None, LinearScorer(8, 4)])
def test_a_function_that_returns_no_stages_is_told(returned: Any, register: Callable[..., Any]) -> None:
    register("bare")(lambda layer: returned)
    with pytest.raises(ValueError, match=f"function of 'bare' returns a {type(returned).__name__}, not Stages"):
        build_router("bare", dim=8, num_experts=4)


def test_an_option_without_a_default_is_refused_instead_of_built_with_none(register: Callable[..., Any]) -> None:
    def bare(layer: LayerSpec, *, sharpness: float) -> Stages:
        return linear_scores(layer)

    with pytest.raises(ValueError, match="bare: option 'sharpness' needs a default, as in sharpness: float = "):
        register("bare")(bare)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"score": LinearScorer}, r"Stages\(score=<class .*LinearScorer'>\) of 'bare' must be a Scorer\(…\)"),
        ({"score": nn.Linear(8, 4)}, r"Stages\(score=Linear\(in_.*\) of 'bare' must be a Scorer\(…\)"),
        ({"normalize": torch.softmax}, r"Stages\(normalize=<built-in .*\) of 'bare' must be a Normalizer\(…\)"),
        ({"select": TopK}, r"Stages\(select=<class .*TopK'>\) of 'bare' must be a Selector\(…\)"),
        ({"losses": {"own": (torch.sum, 1.0)}}, r"the loss 'own' must be Loss\(function, weight from 0\)"),
        ({"losses": {"own": Loss(lambda _: torch.ones(()), -1.0)}}, r"the loss 'own' must be Loss\(function, w"),
    ],
)
def test_stages_of_another_kind_are_told(given: dict[str, Any], says: str, register: Callable[..., Any]) -> None:
    register("bare")(lambda layer: Stages(**{"score": LinearScorer(8, 4), **given}))
    with pytest.raises(ValueError, match=f"router spec 'bare': {says}"):
        build_router("bare", dim=8, num_experts=4)


def test_a_choice_and_a_mixer_that_return_nothing_are_told(
    register: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    register("bare", scores=linear_scores)(lambda layer, stages: None)
    monkeypatch.setitem(registry.MIXERS, "blend", registry.Entry("blend", lambda layer: None, "", ""))
    for spec, name, kind in (("bare", "bare", "Stages"), ("smoe+blend", "blend", "Mixer")):
        with pytest.raises(ValueError, match=rf"the function of '{name}' returns a NoneType, not {kind}\(…\)"):
            build_router(spec, dim=8, num_experts=4)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, r"the selector must return \(experts, weights\) or Selection"),
        (torch.zeros(6, 2), r"the selector must return \(experts, weights\) or Selection"),
        ((torch.zeros(2, 3, 2), torch.zeros(6, 2)), r"experts \[2, 3, 2\], weights \[6, 2\]: not \[6, width\]"),
        ((torch.zeros(5, 2), torch.zeros(5, 2)), r"experts \[5, 2\], weights \[5, 2\]: not \[6, width\]"),
    ],
)
def test_what_a_selector_must_return_is_told(returned: Any, says: str, register: Callable[..., Any]) -> None:
    class Wrong(Selector):
        def forward(self, scores: Scores, k: int, context: RoutingContext) -> Any:
            return returned

    register("bare")(lambda layer: Stages(LinearScorer(layer.dim, layer.columns), select=Wrong(layer.renormalize)))
    with pytest.raises(ValueError, match=f"bare: .*{says}"):
        build_router("bare", dim=8, num_experts=4)(torch.randn(2, 3, 8))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda p: p, r"the mixer must return \(probabilities, carry or None, statistics\)"),
        (lambda p: (p, None), r"the mixer must return \(probabilities, carry or None, statistics\)"),
        (lambda p: (p, None, None), r"the mixer must return \(probabilities, carry or None, statistics\)"),
        (lambda p: (p, [p], {}), r"the mixer must return \(probabilities, carry or None, statistics\)"),
        (lambda p: (p[:, :1], None, {}), r"mixed probabilities \[2, 1, 4\] of \[2, 3, 4\]"),
        (lambda p: (p.transpose(0, 1), None, {}), r"mixed probabilities \[3, 2, 4\] of \[2, 3, 4\]"),
    ],
)
def test_what_a_mixer_must_return_is_told(
    returned: Callable[[Tensor], Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Mixer):
        def forward(self, probs: Tensor, hidden: Tensor, context: RoutingContext) -> Any:
            return returned(probs)

    monkeypatch.setitem(registry.MIXERS, "blend", registry.Entry("blend", lambda layer: Wrong(), "", ""))
    with pytest.raises(ValueError, match=rf"smoe\+blend: {says}"):
        build_router("smoe+blend", dim=8, num_experts=4)(torch.randn(2, 3, 8))


@pytest.mark.parametrize(
    ("kind", "default", "says"),
    [
        (Probability, 2.0, r"mine: default share=2.0: allowed are numbers from 0 to 1"),
        (int, 2.5, r"mine: default share=2.5: allowed is a whole number"),
        (Literal["a", "b"], "c", r"mine: default share='c': allowed is a or b"),
        (list[int], [1], r"option 'share' needs bool, int, float or Literal, not list\[int\], as in share: float = "),
        (str, "a", r"option 'share' needs bool, int, float or Literal, not <class 'str'>, as in share: float = "),
    ],
)
def test_a_default_that_no_spec_may_set_is_refused(
    kind: Any, default: Any, says: str, register: Callable[..., Any]
) -> None:
    def bare(layer: LayerSpec, *, share: Any = default) -> Stages:
        return linear_scores(layer)

    bare.__annotations__["share"] = kind
    with pytest.raises(ValueError, match=says):
        register("mine")(bare)


def test_an_option_may_be_a_word_or_a_number_of_a_range(register: Callable[..., Any]) -> None:
    @register("mine")
    def build(layer: LayerSpec, *, share: Count | Literal["all"] = "all") -> Stages:
        """A range that words do not have.

        share: which.
        """
        return linear_scores(layer)

    for spec in ("mine", "mine:share=all", "mine:share=2"):
        build_router(spec, dim=8, num_experts=4)
    with pytest.raises(ValueError, match="mine: option share=0: allowed are whole numbers from 1"):
        build_router("mine:share=0", dim=8, num_experts=4)


@pytest.mark.parametrize("wrong", [lambda z: z.flatten(0, 1), lambda z: z.transpose(0, 1), lambda z: z[:, :1]])
def test_scores_of_another_shape_are_told(wrong: Callable[[Tensor], Tensor]) -> None:
    class Wrong(LinearScorer):
        def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
            return wrong(super().forward(hidden, context))

    router = build_router("smoe", dim=8, num_experts=4)
    router.score = Wrong(8, 4)
    with pytest.raises(ValueError, match=r"smoe: scores \[.*\] of hidden states \[2, 3, 8\]: not \[B, T, E\]"):
        router(torch.randn(2, 3, 8))


def test_a_normalizer_that_says_nothing_of_its_scores_is_told_what_to_say(register: Callable[..., Any]) -> None:
    register("cubed")(lambda layer: Stages(LinearScorer(layer.dim, layer.columns), Normalizer()))
    with pytest.raises(ValueError, match=r"needs scores above 0 .* its normalizer does not say what it `gives`"):
        build_router("cubed", dim=8, num_experts=4)


@pytest.mark.parametrize("kind", ["router", "mixer"])
def test_what_is_no_function_is_refused(kind: str) -> None:
    add = {"router": registry.register_router, "mixer": registry.register_mixer}[kind]
    with pytest.raises(ValueError, match=r"registered from a function of its own \(def\), not from functools.partial"):
        add("mine", paper="none")(partial(linear_scores, bias=False))


def test_a_scorer_with_a_forward_of_its_own_gets_raised_hidden_states() -> None:
    class Halved(LinearScorer):
        def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
            assert hidden.dtype == torch.float32
            return nn.functional.linear(hidden, self.weight.to(hidden.dtype)) / 2

    class Renamed(LinearScorer):
        """Keeps the forward, and with it what that says."""

    assert (LinearScorer.accepts_half, Renamed.accepts_half, Halved.accepts_half) == (True, True, False)
    router = build_router("smoe", dim=8, num_experts=4, top_k=2).bfloat16()
    for scorer in (Halved(8, 4).bfloat16(), NoPromises()):
        router.score = scorer
        assert router(torch.randn(5, 8).bfloat16()).logits.dtype == torch.float32


class NoPromises(nn.Module):
    """A stage that is no Scorer."""

    causal = batch_invariant = True

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        assert hidden.dtype == torch.float32
        return hidden[..., :4]


def test_a_loss_may_not_have_the_name_of_every_routers(register: Callable[..., Any]) -> None:
    @register("weighty")
    def build(layer: LayerSpec) -> Stages:
        """A loss called balance."""
        return Stages(LinearScorer(layer.dim, layer.columns), losses={"balance": Loss(lambda _: torch.ones(()), 1.0)})

    with pytest.raises(ValueError, match="'weighty': a loss of its own is called 'balance', as that of every router"):
        build_router("weighty", dim=8, num_experts=4)


def test_whole_numbers_are_no_hidden_states() -> None:
    with pytest.raises(ValueError, match=r"smoe: hidden: float .*, not torch.int64 \[1, 5, 8\]"):
        MoE(8, 8, 4)(torch.zeros(5, 8, dtype=torch.int64))
