"""Scores @ choice: the grammar, what a choice needs, and what would change nothing."""

import copy
import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pointsman import MoE, Router, build_router, list_routers, materialize, replay_routing
from pointsman.routers.frame.registry import ROUTERS, parse_spec
from tests.library.routers.oracle import DIM, EXPERTS, inputs, ranked, route, router_for


def build(spec: str, **options: object) -> Router:
    return build_router(spec, dim=8, num_experts=4, vocab_size=64, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [(a, b) for a in list_routers() for b in list_routers()], ids="@".join)
def test_every_pair_works_or_is_refused_in_one_line(names: tuple[str, str]) -> None:
    spec = "@".join(names)
    router: Router | None
    told = ""
    try:
        router = build(spec)
    except ValueError as refusal:
        told, router = str(refusal), None
    if router is None:
        assert "\n" not in told
        assert "needs" in told
        assert names[0] != names[1], "a router's own halves fit"
        return
    assert router.spec == spec


@pytest.mark.parametrize("name", list_routers())
def test_a_name_on_itself_is_the_name(name: str) -> None:
    torch.manual_seed(0)
    one = build(name)
    torch.manual_seed(0)
    other = build(f"{name}@{name}")
    assert one.state_dict().keys() == other.state_dict().keys()
    for left, right in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_only_the_noisy_routers_starting_values_belong_to_both_halves() -> None:
    both = {name: (one.of_scores.keys() & one.of_choice.keys()) - one.defaults.keys() for name, one in ROUTERS.items()}
    assert {name: found for name, found in both.items() if found} == {"noisy-topk": {"init"}}


def test_options_by_keyword_go_to_the_half_that_has_them() -> None:
    router = build("xmoe@loss-free", tau0=0.2, rate=0.01, balance=0.1)
    assert router.spec == "xmoe:tau0=0.2@loss-free:rate=0.01:balance=0.1"
    assert parse_spec(router.spec).choice_options == {"rate": "0.01", "balance": "0.1"}


def test_hyperrouters_scores_with_a_bias_by_transcription() -> None:
    """softmax(H(e) h), the k largest of p + b, weights p over their sum: scores of one paper, the choice of another."""
    router = router_for("hyperrouter:hyper_dim=7@loss-free", 3)
    router.select.bias.normal_()
    hidden, mask = inputs()
    routing = route(router, hidden, mask)
    first, _, second = router.score.hypernetwork
    units = torch.relu(first.weight @ router.score.embedding + first.bias)
    table = (second.weight @ units + second.bias).view(EXPERTS, DIM + 1)
    for n, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten().tolist(), strict=True)):
        p = torch.softmax(table[:, :-1] @ h + table[:, -1], -1)
        chosen = ranked(p + router.select.bias, 3) if real else [-1] * 3
        assert routing.experts[n].tolist() == chosen
        if real:
            torch.testing.assert_close(routing.weights[n], p[chosen] / p[chosen].sum(), rtol=1e-12, atol=1e-12)


def test_sigmoid_gates_with_trained_noise_by_transcription() -> None:
    router = router_for("smoe:gate=sigmoid@noisy-topk", 2)
    hidden, mask = inputs()
    routing = route(router, hidden, mask)
    torch.manual_seed(3)
    draws = torch.randn(*mask.shape, EXPERTS, dtype=torch.float64).flatten(0, 1)
    for n, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten().tolist(), strict=True)):
        deviation = torch.log1p(torch.exp(router.score.noise_weight @ h))
        s = torch.sigmoid(router.score.weight @ h + router.score.bias + deviation * draws[n])
        chosen = ranked(s, 2) if real else [-1] * 2
        assert routing.experts[n].tolist() == chosen
        if real:
            torch.testing.assert_close(routing.weights[n], s[chosen] / s[chosen].sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "spec", ["xmoe@noisy-topk", "recurrent@vmoe", "hyperrouter@compete", "smoe:gate=sigmoid@dynmoe", "smoe:weigh=input"]
)
def test_a_router_is_copied_and_pickled(spec: str) -> None:
    router = build(spec)
    for other in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert type(other.score) is type(router.score)
        for left, right in zip(router.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("choice", ["stable", "mask", "hash"])
def test_scores_inside_those_of_token_ids_keep_their_flags_and_their_steps(choice: str) -> None:
    assert build(f"smoe:noise=1@{choice}").training_stochastic
    assert not build(f"smoe@{choice}").training_stochastic
    router = build(f"xmoe@{choice}")
    assert router.needs_step_end
    with torch.no_grad():
        router.score.gate.expert_embeddings.mul_(3)
    router.step_end()
    torch.testing.assert_close(router.score.gate.expert_embeddings.norm(dim=-1), torch.full((4,), 0.1))


def test_a_generated_scorer_with_a_bias_materializes_with_the_bias() -> None:
    layer = MoE(8, 8, 4, router="hyperrouter:gate=sigmoid@loss-free:rate=0.01").eval()
    layer.router.select.bias.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    hidden = torch.randn(5, 8)
    before = layer.router(hidden)
    materialize(layer)
    assert layer.router.spec == "smoe:gate=sigmoid@loss-free:rate=0.01"
    assert torch.equal(layer.router(hidden).experts, before.experts)
    fresh = MoE(8, 8, 4, router=layer.router.spec).eval()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh.router(hidden).weights, before.weights)


@pytest.mark.parametrize(
    "spec", ["smoe:gate=sigmoid", "loss-free", "mask:visible=1+attention:heads=all", "sigma:renormalize=true"]
)
def test_a_replayed_routing_has_the_weights_of_the_original(spec: str) -> None:
    """At logits near -40 the sigmoids of a token sum to 1e-17: both divide by the same floor."""
    from pointsman.testing.case import context_for

    torch.manual_seed(0)
    router = build_router(spec, dim=16, num_experts=4, vocab_size=64).eval()
    hidden = torch.randn(2, 7, 16)
    context = context_for(router, hidden)
    own = router.score.forward

    def low(*args: object) -> Tensor:
        found = own(*args)
        return found - 40 if isinstance(found, Tensor) else found

    router.score.forward = low  # type: ignore[method-assign]
    before = router(hidden, context)
    given: Mapping[str, Tensor] = {"": before.experts}
    with replay_routing(router, given):
        after = router(hidden, context)
    torch.testing.assert_close(after.weights, before.weights)
    some = (before.experts >= 0).any(-1)
    torch.testing.assert_close(before.weights.sum(-1)[some], torch.ones(int(some.sum())))
