import math

import pytest
import torch

from pointsman.diagnostics import Entropy, Margin
from pointsman.routing import Combine, Pairs, Routing
from tests.library.diagnostics.helpers import part, random_routing, routing_of, same


def entropy(row):
    total = sum(row)
    return -sum(p / total * math.log(p / total) for p in row if p > 0)


def mean_and_std(values):
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def test_uniform_routing_has_entropy_ln_n():
    diagnostic = Entropy()
    diagnostic.update(routing_of(torch.full((7, 16), 1 / 16), 2))
    found = diagnostic.result()
    assert found["mean"] == pytest.approx(math.log(16), abs=1e-12)
    assert found["uniform"] == math.log(16)
    assert found["std"] == pytest.approx(0, abs=1e-12)
    assert found["ratio"] == pytest.approx(1)


def test_certain_routing_has_entropy_zero():
    diagnostic = Entropy()
    diagnostic.update(routing_of(torch.eye(4), 1))
    assert diagnostic.result()["mean"] == 0
    assert diagnostic.result()["ratio"] is None  # 0 / 0


def test_entropy_before_and_after_mixing_against_plain_python():
    before = torch.rand(40, 5).softmax(-1)
    after = torch.rand(40, 5).mul(4).softmax(-1)
    diagnostic = Entropy()
    diagnostic.update(routing_of(after, 3, unmixed=before))
    found = diagnostic.result()
    first = mean_and_std([entropy(row) for row in before.double().tolist()])
    second = mean_and_std([entropy(row) for row in after.double().tolist()])
    assert (found["mean"], found["std"]) == pytest.approx(first, rel=1e-12)
    assert (found["mixed_mean"], found["mixed_std"]) == pytest.approx(second, rel=1e-12)
    assert found["ratio"] == pytest.approx(second[0] / first[0])


def test_sigmoid_scores_are_scaled_to_sum_one():
    scores = torch.rand(9, 4)
    diagnostic = Entropy()
    diagnostic.update(routing_of(scores, 2))
    assert diagnostic.result()["mean"] == pytest.approx(sum(entropy(r) for r in scores.double().tolist()) / 9)


def test_margin_is_between_the_kth_and_the_next():
    routing = random_routing(50, 6, 2)
    diagnostic = Margin()
    diagnostic.update(routing)
    ordered = [sorted(row, reverse=True) for row in routing.probs.double().tolist()]
    mean, std = mean_and_std([row[1] - row[2] for row in ordered])
    found = diagnostic.result()
    assert (found["mean"], found["std"]) == pytest.approx((mean, std), rel=1e-9)


def test_there_is_no_margin_when_all_are_chosen_or_experts_choose():
    for routing in (
        random_routing(5, 4, 4),
        Routing(
            torch.full((2, 4), -1),
            torch.zeros(2, 4),
            torch.rand(2, 4),
            torch.rand(2, 4),
            how=Combine(Pairs(*(torch.zeros(0, dtype=torch.int64),) * 4)),
        ),
    ):
        diagnostic = Margin()
        diagnostic.update(routing)
        assert diagnostic.result()["mean"] is None


@pytest.mark.parametrize("kind", [Entropy, Margin])
def test_padding_counts_nothing_and_shards_equal_one_pass(kind):
    routing = random_routing(60, 8, 2)
    mask = torch.rand(60) < 0.7
    spoiled = Routing(
        routing.experts,
        routing.weights,
        torch.where(mask[:, None], routing.probs, torch.nan),
        routing.logits,
    )
    whole, masked, shards = kind(), kind(), kind()
    whole.update(part(routing, mask))
    masked.update(spoiled, mask)
    for rows in (slice(0, 13), slice(13, 13), slice(13, 41), slice(41, 60)):
        shard = kind()
        shard.update(part(spoiled, rows), mask[rows])
        shards.merge(shard)
    assert whole.result()["tokens"] == int(mask.sum())
    assert same(whole.result(), masked.result())
    assert same(whole.result(), shards.merge(kind()).result())


@pytest.mark.parametrize("kind", [Entropy, Margin])
def test_nothing_seen_is_none(kind):
    assert kind().result()["mean"] is None
    empty = kind()
    empty.update(random_routing(4, 4, 2), torch.zeros(4, dtype=torch.bool))
    assert empty.result()["mean"] is None
    assert empty.result()["tokens"] == 0
