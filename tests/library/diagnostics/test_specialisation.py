import math

import pytest
import torch

from pointsman.diagnostics import Specialisation
from pointsman.routing import Routing
from tests.library.diagnostics.helpers import part, random_routing, same


def of_experts(experts, num_experts):
    tokens = len(experts)
    return Routing(experts, torch.ones(experts.shape), torch.rand(tokens, num_experts), torch.rand(tokens, num_experts))


def test_experts_that_follow_the_id_share_all_its_information():
    ids = torch.arange(400) % 8
    diagnostic = Specialisation()
    diagnostic.update(of_experts((ids % 4)[:, None], 4), token_ids=ids)
    found = diagnostic.result()
    assert found["mutual_information"] == pytest.approx(math.log(4))
    assert found["saturation"] == 1
    assert found["top"][1] == [[1, 50, 1.0], [5, 50, 1.0]]


def test_experts_that_ignore_the_id_share_none():
    ids, experts = torch.meshgrid(torch.arange(6), torch.arange(4), indexing="ij")
    diagnostic = Specialisation()
    diagnostic.update(of_experts(experts.reshape(-1, 1), 4), token_ids=ids.reshape(-1))
    found = diagnostic.result()
    assert found["mutual_information"] == pytest.approx(0, abs=1e-12)
    assert found["corrected"] == 0
    assert found["saturation"] == pytest.approx(0.25)


def test_against_plain_python():
    routing = random_routing(300, 6, 2)
    ids = torch.randint(0, 20, (300,))
    diagnostic = Specialisation()
    diagnostic.update(routing, token_ids=ids)
    found = diagnostic.result()
    joint = {}
    for v, experts in zip(ids.tolist(), routing.experts.tolist(), strict=True):
        for e in experts:
            joint[v, e] = joint.get((v, e), 0) + 1
    of_id = {v: sum(n for (w, _), n in joint.items() if w == v) for v in range(20)}
    of_expert = {e: sum(n for (_, f), n in joint.items() if f == e) for e in range(6)}
    information = sum(n / 600 * math.log(n * 600 / (of_id[v] * of_expert[e])) for (v, e), n in joint.items())
    bias = (len(joint) - 20 - 6 + 1) / 1200
    assert found["mutual_information"] == pytest.approx(information)
    assert found["corrected"] == pytest.approx(information - bias)
    assert found["saturation"] == pytest.approx(
        sum(max(joint.get((v, e), 0) for e in range(6)) for v in range(20)) / 600
    )
    for e in range(6):
        best = sorted(range(20), key=lambda v, e=e: (-joint.get((v, e), 0), v))
        assert [v for v, _, _ in found["top"][e]] == [v for v in best if (v, e) in joint]
        assert found["top"][e][0][2] == pytest.approx(joint[best[0], e] / of_id[best[0]])


def test_the_table_is_bounded_and_pools_the_rest():
    diagnostic = Specialisation(most_ids=1000)
    routing = random_routing(50, 4, 1)
    diagnostic.update(routing, token_ids=torch.arange(50))
    assert diagnostic.table.shape == (256, 4)
    diagnostic.update(routing, token_ids=torch.arange(50) + 10**9)
    assert diagnostic.table.shape == (1000, 4)
    assert diagnostic.result()["pooled"]
    assert diagnostic.result()["ids"] == 51


def test_padding_counts_nothing_and_shards_equal_one_pass():
    routing, ids = random_routing(60, 8, 2), torch.randint(0, 3000, (60,))
    mask = torch.rand(60) < 0.7
    whole, masked, shards = Specialisation(), Specialisation(), Specialisation()
    whole.update(part(routing, mask), token_ids=ids[mask])
    masked.update(routing, mask, token_ids=ids)
    for rows in (slice(0, 13), slice(13, 13), slice(13, 60)):
        shard = Specialisation()
        shard.update(part(routing, rows), mask[rows], token_ids=ids[rows])
        shards.merge(shard)
    assert whole.result()["assignments"] == 2 * int(mask.sum())
    assert same(whole.result(), masked.result())
    assert same(whole.result(), shards.merge(Specialisation()).result())


def test_misuse():
    with pytest.raises(ValueError, match="token_ids"):
        Specialisation().update(random_routing(4, 4, 2))
    other = Specialisation(most_ids=10)
    other.update(random_routing(4, 4, 2), token_ids=torch.arange(4))
    with pytest.raises(ValueError, match="do not merge"):
        Specialisation().merge(other)
    assert Specialisation().result()["mutual_information"] is None
