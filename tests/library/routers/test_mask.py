"""MaskMoE against a float64 transcription, the sets of ids, and the routers that it equals at its limits."""

import math

import pytest
import torch

from pointsman import MoE, Router, RoutingContext, build_router, build_routers
from tests.library.routers.oracle import EXPERTS, Expected, compare, inputs, ranked, router_for, softmax

IDS = torch.arange(21).view(3, 7) * 3 % 64


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("visible", [1, 3, 6])
def test_transcription(k: int, visible: int) -> None:
    router = router_for(f"mask:visible={visible}:rare=20:balance=0.1:z_loss=0.1", k)
    router.score.calibrate(torch.arange(64))
    hidden, mask = inputs()
    hidden.requires_grad_()
    experts, weights, probs, squares = [], [], [], []
    for h, index, real in zip(hidden.flatten(0, 1), IDS.flatten().tolist(), mask.flatten(), strict=True):
        first, stride = int(router.score.first[index]), int(router.score.stride[index])
        assert math.gcd(stride, EXPERTS) == 1
        seen = [(first + j * stride) % EXPERTS for j in range(1 if index < 20 else visible)]
        z = torch.stack([(router.score.gate.weight[e] * h).sum() for e in seen])
        p = dict(zip(seen, softmax(z), strict=True))
        full = [p.get(e, torch.zeros((), dtype=torch.float64)) for e in range(EXPERTS)]
        chosen = [
            e for e in ranked([float(one.detach()) if e in p else -1.0 for e, one in enumerate(full)], k) if e in p
        ]
        chosen = chosen if real else []
        total = sum((p[e] for e in chosen), torch.zeros((), dtype=torch.float64)) if k > 1 else 1.0
        experts.append(chosen)
        weights.append([p[e] / total for e in chosen])
        if real:
            probs.append(torch.stack(full))
            squares.append(torch.log(torch.exp(z).sum()) ** 2)
    counts = [sum(row.count(e) for row in experts) for e in range(EXPERTS)]
    mean = torch.stack(probs).mean(0)
    losses = {
        "balance": 0.1 * EXPERTS * sum(count / sum(counts) * mean[e] for e, count in enumerate(counts)),
        "z_loss": 0.1 * torch.stack(squares).mean(),
    }
    routing = router(hidden, RoutingContext(token_ids=IDS, padding_mask=mask))
    compare(router, hidden, mask, Expected(experts, weights, losses), routing)


def test_all_visible_is_smoe_and_one_is_a_hash() -> None:
    hidden, _ = inputs()
    context = RoutingContext(token_ids=IDS)
    every, plain = router_for("mask:visible=6"), router_for("smoe:bias=false")
    with torch.no_grad():
        plain.score.weight.copy_(every.score.gate.weight)
    left, right = every(hidden, context), plain(hidden, context)
    assert torch.equal(left.experts, right.experts)
    assert torch.equal(left.weights, right.weights)
    one = router_for("mask:visible=1", k=1)(hidden, context)
    table = router_for("hash", k=1).eval()(hidden, context)  # drawn from the same seed
    assert torch.equal(one.experts, table.experts)
    assert torch.equal(one.weights, torch.ones_like(one.weights))


def test_a_layer_with_fewer_visible_experts_than_k_trains() -> None:
    layer = MoE(8, 8, 4, router="mask:visible=1:z_loss=0.1:balance=0.1", top_k=3, vocab_size=64)
    hidden = torch.randn(3, 7, 8, requires_grad=True)
    layer(hidden, RoutingContext(token_ids=IDS)).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in (hidden, *layer.parameters()) if p.grad is not None)
    routing = layer.router(hidden, RoutingContext(token_ids=IDS))
    assert ((routing.experts >= 0).sum(-1) == 1).all()


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_a_temperature_trains_behind_the_mask(gate: str) -> None:
    torch.manual_seed(0)
    router = build_router(f"xmoe:gate={gate}@mask:visible=2", dim=8, num_experts=6, vocab_size=64)
    router.normalize.temperature.data.fill_(1e-4)  # its floor
    routing = router(torch.randn(3, 7, 8), RoutingContext(token_ids=IDS))
    assert ((routing.probs == 0).sum(-1) >= 4).all()
    routing.probs.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in router.parameters() if p.grad is not None)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(ValueError, match="mask: the router routes by token ids and needs vocab_size"):
        build_router("mask", dim=4, num_experts=4)
    router = build_router("mask:rare=2", dim=4, num_experts=4, vocab_size=10)
    context = RoutingContext(token_ids=torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"call router.score.calibrate\(counts\)"):
        router(torch.zeros(1, 2, 4), context)
    with pytest.raises(ValueError, match="calibrate needs 10 counts from 0"):
        router.score.calibrate([1, -2])
    router.score.calibrate([3] * 10)
    with pytest.raises(ValueError, match="mask: a token id is outside 0 to 9"):
        router(torch.zeros(1, 1, 4), RoutingContext(token_ids=torch.tensor([[10]])))
    other = build_router("mask:rare=2", dim=4, num_experts=4, vocab_size=10)
    other.load_state_dict(router.state_dict())  # with the counts
    assert torch.equal(other(torch.zeros(1, 2, 4), context).experts, router(torch.zeros(1, 2, 4), context).experts)


def test_each_layer_draws_its_own_sets_and_a_checkpoint_keeps_its_own() -> None:
    def of(router: Router) -> torch.Tensor:
        return torch.stack([router.score.first, router.score.stride])

    low, high = build_routers("mask:visible=2", layers=2, dim=8, num_experts=6, vocab_size=64)
    assert not torch.equal(low.score.first, high.score.first)
    alone = build_router("mask:visible=2", dim=8, num_experts=6, vocab_size=64)
    assert torch.equal(of(low), of(alone))
    again = build_router("mask:visible=2", dim=8, num_experts=6, vocab_size=64, place=1)
    assert torch.equal(of(high), of(again))
    again.load_state_dict(alone.state_dict())  # as a checkpoint with the same sets in all layers
    assert torch.equal(of(again), of(alone))
