import pytest
import torch

from pointsman.diagnostics import Fluctuation
from pointsman.diagnostics.base import first_choice
from pointsman.routing import Routing
from tests.library.diagnostics.helpers import part, random_routing, same


def of_experts(experts, num_experts=8, weights=None):
    experts = torch.tensor(experts)
    tokens = len(experts)
    weights = torch.tensor([[0.6, 0.4, 0.1][: experts.shape[1]]] * tokens) if weights is None else torch.tensor(weights)
    return Routing(experts, weights, torch.rand(tokens, num_experts), torch.rand(tokens, num_experts))


def test_counted_by_hand():
    one = of_experts([[0, 1], [0, 1], [0, 1], [0, 1]])
    two = of_experts([[0, 1], [1, 0], [0, 2], [2, 3]])
    diagnostic = Fluctuation()
    diagnostic.update(one, two)
    found = diagnostic.result()
    assert found["tokens"] == 4
    assert found["top1"] == 2 / 4  # tokens 1 (order) and 3
    assert found["sets"] == 2 / 4  # tokens 2 and 3; order does not matter
    assert found["overlap"] == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert found["by_expert"] == [0.5, *[None] * 7]


def test_the_first_expert_is_the_heaviest_not_the_first_column():
    one = of_experts([[0, 1]], weights=[[0.2, 0.8]])
    two = of_experts([[1, 0]], weights=[[0.8, 0.2]])
    diagnostic = Fluctuation()
    diagnostic.update(one, two)
    assert diagnostic.result()["top1"] == 0


def test_a_dropped_entry_is_not_the_first_expert():
    routing = of_experts([[-1, 3], [-1, -1]], weights=[[0.0, -2.0], [0.0, 0.0]])
    assert first_choice(routing).tolist() == [3, -1]


def test_the_same_routing_does_not_fluctuate():
    routing = random_routing(100, 8, 2)
    diagnostic = Fluctuation()
    diagnostic.update(routing, routing)
    found = diagnostic.result()
    assert (found["top1"], found["sets"], found["overlap"]) == (0, 0, 1)


def test_different_k_has_overlap_but_no_sets():
    probs = torch.rand(50, 8).softmax(-1)
    small, large = (Routing(top.indices, top.values, probs, probs) for top in (probs.topk(1, -1), probs.topk(4, -1)))
    diagnostic = Fluctuation()
    diagnostic.update(small, large)
    found = diagnostic.result()
    assert (found["top1"], found["sets"], found["overlap"]) == (0, None, 1)


def test_padding_counts_nothing_and_shards_equal_one_pass():
    one, two = random_routing(60, 8, 2, seed=1), random_routing(60, 8, 2, seed=2)
    mask = torch.rand(60) < 0.7
    whole, masked, shards = Fluctuation(), Fluctuation(), Fluctuation()
    whole.update(part(one, mask), part(two, mask))
    masked.update(one, two, mask)
    for rows in (slice(0, 13), slice(13, 13), slice(13, 60)):
        shard = Fluctuation()
        shard.update(part(one, rows), part(two, rows), mask[rows])
        shards.merge(shard)
    assert whole.result()["tokens"] == int(mask.sum())
    assert same(whole.result(), masked.result())
    assert same(whole.result(), shards.merge(Fluctuation()).result())


def test_tokens_that_one_model_dropped_are_left_out():
    one, two = of_experts([[0, 1], [-1, -1]]), of_experts([[0, 1], [2, 3]])
    diagnostic = Fluctuation()
    diagnostic.update(one, two)
    assert diagnostic.result()["tokens"] == 1


def test_other_tokens_or_experts_are_refused():
    with pytest.raises(ValueError, match="same tokens"):
        Fluctuation().update(random_routing(4, 8, 2), random_routing(5, 8, 2))
    with pytest.raises(ValueError, match="4 tokens over 8 experts and of 4 over 6"):
        Fluctuation().update(random_routing(4, 8, 2), random_routing(4, 6, 2))
    assert Fluctuation().result()["top1"] is None
