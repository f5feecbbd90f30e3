"""W ranks with a W-th of the batch each equal one process with the whole batch."""

import warnings

import pytest

from pointsman import list_routers
from tests.lab.parallel.ranks import on_ranks

BOUND = 1e-10
FEW = [
    "smoe:balance=0.05:z_loss=0.01",
    "smoe:gate=sigmoid:balance=0.05:balance_scope=step:balance_on=scores",
    "xmoe+similarity",
    "hyperrouter+attention",
    "loss-free",
    "base",
    "noisy-topk",
]
OPTIONS = [
    "smoe:balance=0.05:balance_scope=sequence",
    "smoe:capacity=1.0",
    "smoe:noise=0.1",
    "switch:jitter=0.1",
    "gshard:second=sampled",
    "smoe:renormalize=false",
    "smoe+similarity:source=attention",
    "smoe+similarity:learned=true",
    "smoe+attention:heads=all",
    "xmoe:routing_dim=full:normalize=false",
    "expert-choice:group=batch",
    "base:group=sequence",
    "loss-free:nulls=1:kind=constant",
    "loss-free:update=quantile",
    "smoe:variance=0.1",
    "stable:stage_one=2",
]


LAYOUTS = {
    2: ["", "replicas=2", "experts=2"],
    4: ["", "replicas=4", "experts=2", "experts=4", "experts=2,replicas=2"],
}
"""Number of ranks -> layouts."""


def every_router() -> list[str]:
    """Those that draw a number for each token as well: ranks draw what one process draws."""
    return [name for name in list_routers() if name != "compete"]  # which is refused


def check(found: list[dict[str, tuple[float, str]]]) -> None:
    for rank in found:
        wrong = {case: worst for case, worst in rank.items() if not worst[0] < BOUND}
        assert not wrong


def test_two_ranks() -> None:
    check(on_ranks("invariant", 2, specs=FEW, layouts=["", "experts=2"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", LAYOUTS)
def test_routers_in_every_layout(count: int, pytestconfig: pytest.Config) -> None:
    """With activation checkpointing, which the one process has not; every router of two ranks that divide the experts,
    and, weekly (`--all-specs`), in every layout."""
    mixed = [f"{router}+{mixer}" for router in ("smoe", "xmoe") for mixer in ("similarity", "attention")]
    every = list(dict.fromkeys([*every_router(), *mixed, *OPTIONS, *FEW]))
    if pytestconfig.getoption("--all-specs"):
        check(on_ranks("invariant", count, specs=every, layouts=LAYOUTS[count], checkpointing=True))
        return
    check(on_ranks("invariant", count, specs=FEW, layouts=LAYOUTS[count], checkpointing=True))
    if count == 2:
        check(on_ranks("invariant", count, specs=every, layouts=["experts=2"], checkpointing=True))


@pytest.mark.slow
def test_four_ranks_without_checkpointing() -> None:
    check(on_ranks("invariant", 4, specs=FEW[:3], layouts=["experts=2,replicas=2"]))


@pytest.mark.slow
def test_base_experts() -> None:
    check(on_ranks("invariant", 2, specs=["smoe:balance=0.05", "loss-free"], layouts=["experts=2"], experts="base"))


@pytest.mark.slow
def test_a_wrong_factor_is_found() -> None:
    """With SGD: Adam hides a factor that is the same in every step."""
    right, wrong = (
        on_ranks("invariant", 2, specs=["smoe:balance=0.05"], layouts=["experts=2"], sgd=True, factor=factor)
        for factor in (1.0, 2.0)
    )
    check(right)
    assert all(worst > 1e-4 for rank in wrong for worst, _ in rank.values())


@pytest.mark.slow
def test_every_parameter_has_a_gradient_on_every_rank() -> None:
    """Gradients that one rank lacks would be added to another parameter's."""
    specs = [name for name in every_router() if name not in ("default", "recurrent")]
    assert on_ranks("every_gradient", 2, specs=specs) == [[], []]


@pytest.mark.parametrize("through", ["", "add_losses"])
def test_somebody_elses_model(through: str) -> None:
    assert max(on_ranks("own_model", 2, layout="experts=2", through=through)) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("through", ["accelerate", "accelerate, add_losses", "lightning", "lightning, add_losses"])
def test_somebody_elses_model_in_somebody_elses_loop(through: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(through.partition(",")[0])
    assert max(on_ranks("own_model", 2, layout="experts=2", through=through)) < BOUND


@pytest.mark.slow
def test_a_replayed_routing() -> None:
    assert max(on_ranks("replayed", 2, layout="experts=2")) < BOUND


def test_mistakes_are_one_line() -> None:
    for world, weights, experts, one_process, order, whole in on_ranks("refused", 2):
        assert world == "layout shards is of 4 ranks; there are 2"
        assert weights.startswith("ranks differ in the initial weights: rank 0 has")
        assert experts == "layer '0': experts=2 does not divide the 3 experts of a layer; 1, 3 do"
        assert one_process.startswith("layer '0': router 'compete' trains in one process: in a competition")
        assert "divided over 2 ranks: write add_losses(loss, model, ranks), which divides the loss" in order
        assert "not divided by parallelize: under DDP, which averages gradients, leave ranks out" in whole


@pytest.mark.parametrize("layout", ["", "experts=2"])
def test_weights_that_rank_0_alone_draws(layout: str) -> None:
    """No other rank ever holds the model: its half, and a group."""
    first, other = on_ranks("placed", 2, layout=layout)
    for found in (first, other):
        assert [found["same"], found["shared"], found["half"]] == [True, True, True]
        assert found["most"][0] > 1
    assert other["most"][1] < 0.75


def test_ranks_that_differ_are_refused_on_all() -> None:
    """Unequal rows are right where a router neither draws nor compares sequences."""
    one, other = on_ranks("differing_steps", 2)
    assert one == other
    assert one.pop("smoe:balance=0.1") == one.pop("smoe:balance=0.1 later") == ""
    for what, line in one.items():
        spec, _, later = what.partition(" ")
        named = what if what in ("k", "loss_scale", "autocast") else f"router '{spec}' every rank needs as many"
        assert line.startswith(f"ranks differ in layer '0' at {'a later' if later else 'the first'} step: ")
        assert named in line
    assert "rank 0 has (3, 6), rank 1 has (4, 6)" in one["vmoe"]


def test_recording_on_a_sharded_model() -> None:
    assert on_ranks("recorded", 2) == [True, True]


@pytest.mark.slow
def test_dropout() -> None:
    """On embeddings, positions, sublayers and attention; that on experts' hidden units is each rank's own."""
    changes = {"dropout": 0.2, "attention_dropout": 0.2, "expert_dropout": 0.0}
    specs = ["smoe:balance=0.05", "thor"]
    for count in (2, 4):
        check(on_ranks("invariant", count, specs=specs, layouts=["", "experts=2"], changes=changes))
