"""Placements and caches on a recorded routing, against enumeration."""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from pointsman import MoE, record_routing
from pointsman.traces import RoutingTrace
from pointsman_lab.traces.placement import balanced, bound, cache, contiguous, imbalance, place, replicated


def test_balanced_is_near_the_best_of_all_placements() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        loads = torch.randint(1, 100, (8,), generator=generator)
        every = [imbalance(loads, (half, [e for e in range(8) if e not in half])) for half in combinations(range(8), 4)]
        found = imbalance(loads, balanced(loads, 2))
        assert bound(loads, 2) - 1e-9 <= min(every) <= found + 1e-9
        assert found <= 1.1 * min(every)
        assert min(every) <= imbalance(loads, contiguous(loads, 2)) + 1e-9


def test_copies_divide_the_heaviest_expert() -> None:
    loads = torch.tensor([60, 10, 10, 20])
    assert bound(loads, 2) == pytest.approx(1.2)
    placed = replicated(loads, 2, 2)
    assert sorted(e for device in placed for e in device) == [0, 0, 0, 1, 2, 3]
    assert imbalance(loads, placed) < bound(loads, 2)


def trace(tokens: int = 400) -> RoutingTrace:
    generator = torch.Generator().manual_seed(1)
    popular = torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1])
    rows = torch.multinomial(popular.expand(tokens, 8), 2, generator=generator)
    return RoutingTrace({"a": rows.to(torch.int16)}, {"a": 8}, torch.tensor([tokens]))


def test_place_judges_on_the_second_half() -> None:
    found = place(trace(), 4, spare=4, batch=50)["a"]
    assert found["EPLB, 4 copies"] < found["balanced"] < found["contiguous"]
    assert 1 <= found["bound without copies"] <= found["balanced"]


def test_the_optimal_cache_is_the_best_of_all() -> None:
    found = cache(trace(), 3)["a"]
    assert found["optimum"] > max(found["least recently used"], found["most frequent"])
    # experts in turn, one more than fit: the one used last is never there; who knows the future keeps three of four
    one = RoutingTrace({"a": torch.arange(40).remainder(4).view(-1, 1).to(torch.int16)}, {"a": 4}, torch.tensor([40]))
    cyclic = cache(one, 3)["a"]
    assert cyclic["least recently used"] == 0  # the known worst case
    assert cyclic["optimum"] == 0.75


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed are 2 to 8"):
        place(trace(), 9)
    with pytest.raises(ValueError, match="allowed are 1 to 7"):
        cache(trace(), 8)


def test_virtual_experts_take_no_device_and_no_place_in_a_cache(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = MoE(dim=16, hidden_dim=8, num_experts=6, top_k=4, router="smoe:nulls=3").eval()
    with torch.no_grad(), record_routing(layer).save(tmp_path / "all"):
        layer(torch.randn(1, 512, 16))
    with torch.no_grad(), record_routing(layer) as records:
        layer(torch.randn(1, 512, 16))
    found = RoutingTrace.load(tmp_path / "all")
    assert found.virtual == RoutingTrace.load(records.save(tmp_path / "last")).virtual == {"": 3}
    chosen = found.experts[""]
    assert bool((chosen >= 6).any())
    real = RoutingTrace({"": torch.where(chosen < 6, chosen, -1)}, {"": 6}, found.lengths)
    assert place(found, 3, spare=3, batch=64) == place(real, 3, spare=3, batch=64)
    assert cache(found, 2) == cache(real, 2)
    with pytest.raises(ValueError, match="allowed are 2 to 6"):
        place(found, 7)
