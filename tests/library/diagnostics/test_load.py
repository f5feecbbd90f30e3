import math
from collections import Counter

import pytest
import torch

from pointsman import build_router
from pointsman.diagnostics import CoActivation, Diagnostics, Load, load_summary
from pointsman.routing import Routing
from tests.library.diagnostics.helpers import part, random_routing, same


def test_load_against_counting():
    routing = random_routing(200, 10, 3, sharpness=3)
    diagnostic = Load()
    diagnostic.update(routing)
    found = diagnostic.result()
    counted = Counter(routing.experts.reshape(-1).tolist())
    loads = [counted[e] for e in range(10)]
    share = [n / 600 for n in loads]
    mean = 60
    std = math.sqrt(sum((n - mean) ** 2 for n in loads) / 10)
    assert found["share"] == pytest.approx(share)
    assert found["cv"] == pytest.approx(std / mean)
    assert found["effective"] == pytest.approx(math.exp(-sum(f * math.log(f) for f in share if f)))
    assert found["max_violation"] == pytest.approx((max(loads) - mean) / mean)
    assert (found["tokens"], found["assignments"], found["unfilled"]) == (200, 600, 0.0)


def test_even_load():
    found = load_summary(torch.full((8,), 5.0))
    assert found["cv"] == 0
    assert found["effective"] == pytest.approx(8)
    assert found["max_violation"] == 0
    assert found["dead"] == []


def test_one_expert_takes_all():
    found = load_summary(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    assert found["dead"] == [0, 2, 3]
    assert found["effective"] == pytest.approx(1)
    assert found["max_violation"] == pytest.approx(3)
    assert found["cv"] == pytest.approx(math.sqrt(3))


def test_unfilled_choices():
    experts = torch.tensor([[0, 1], [0, -1], [-1, -1], [-1, -1]])
    routing = Routing(experts, torch.rand(4, 2).masked_fill(experts < 0, 0), torch.rand(4, 3), torch.rand(4, 3))
    diagnostic = Load()
    diagnostic.update(routing, torch.tensor([True, True, True, False]))
    found = diagnostic.result()
    assert (found["tokens"], found["assignments"]) == (3, 3)
    assert found["unfilled"] == pytest.approx(0.5)


@pytest.mark.parametrize("router", ["smoe:nulls=2", "loss-free:nulls=3:kind=copy"])
def test_virtual_experts_fill_choices_and_have_a_share_of_the_uniform_entropy(router):
    built = build_router(router, dim=8, num_experts=4, top_k=2).eval()
    diagnostics = Diagnostics("load", "entropy")
    with diagnostics.observe(built):
        routing = built(torch.randn(2, 50, 8))
    found = diagnostics.result()[""]
    assert found["load"]["unfilled"] == 0
    assert found["load"]["assignments"] == int((routing.experts >= 0).sum()) < 200
    assert found["entropy"]["mean"] <= found["entropy"]["uniform"] == math.log(routing.probs.shape[-1])


def test_co_activation_against_counting():
    routing = random_routing(300, 5, 2)
    diagnostic = CoActivation()
    diagnostic.update(routing)
    found = diagnostic.result()
    pairs, alone = Counter(), Counter()
    for i, j in routing.experts.tolist():
        pairs[i, j] += 1
        pairs[j, i] += 1
        alone.update([i, j])
    for i in range(5):
        for j in range(5):
            assert found["given"][i][j] == pytest.approx(1 if i == j else pairs[i, j] / alone[i])
    lift = {(i, j): pairs[i, j] * 300 / (alone[i] * alone[j]) for i in range(5) for j in range(i + 1, 5)}
    best = max(lift, key=lambda pair: lift[pair])
    assert tuple(found["pairs"][0]["experts"]) == best
    assert found["pairs"][0]["lift"] == pytest.approx(lift[best])
    assert found["pairs"][0]["tokens"] == pairs[best]
    assert all(a["lift"] >= b["lift"] for a, b in zip(found["pairs"], found["pairs"][1:], strict=False))


def test_co_activation_counts_under_autocast():
    diagnostic = CoActivation()
    with torch.autocast("cpu", torch.bfloat16):
        diagnostic.update(of := random_routing(1003, 3, 2))
    assert diagnostic.together.diagonal().tolist() == torch.bincount(of.experts.flatten()).tolist()


def test_a_dead_expert_goes_with_none():
    diagnostic = CoActivation()
    experts = torch.tensor([[0, 1]] * 12)
    diagnostic.update(Routing(experts, torch.full((12, 2), 0.5), torch.rand(12, 3), torch.rand(12, 3)))
    found = diagnostic.result()
    assert found["given"][2] == [None, None, None]
    assert found["pairs"] == [{"experts": [0, 1], "tokens": 12, "lift": 1.0}]


@pytest.mark.parametrize("kind", [Load, CoActivation])
def test_padding_counts_nothing_and_shards_equal_one_pass(kind):
    routing = random_routing(60, 8, 2)
    mask = torch.rand(60) < 0.7
    whole, masked, shards = kind(), kind(), kind()
    whole.update(part(routing, mask))
    masked.update(routing, mask)
    for rows in (slice(0, 13), slice(13, 13), slice(13, 60)):
        shard = kind()
        shard.update(part(routing, rows), mask[rows])
        shards.merge(shard)
    assert whole.result()["tokens"] == int(mask.sum())
    assert same(whole.result(), masked.result())
    assert same(whole.result(), shards.merge(kind()).result())


@pytest.mark.parametrize("kind", [Load, CoActivation])
def test_nothing_seen(kind):
    assert same(kind().result(), kind().result())
    empty = kind()
    empty.update(random_routing(4, 4, 2), torch.zeros(4, dtype=torch.bool))
    found = empty.result()
    assert found["tokens"] == 0
    assert same(found, found)
