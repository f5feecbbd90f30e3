import math

import pytest
import torch

from pointsman import MoE, RoutingContext, build_router
from pointsman.diagnostics import Diagnostics, Mixing
from tests.library.diagnostics.helpers import same


def reference(hidden, mask, tau):
    """S[i, i] and exp(H(S[i, :])) of causal Similarity-Inform on unit vectors, a token at a time."""
    own, effective = [], []
    for rows, real in zip(hidden.double(), mask, strict=True):
        units = rows / rows.norm(dim=-1, keepdim=True)
        for i in range(len(rows)):
            if not real[i]:
                continue
            seen = [j for j in range(i + 1) if real[j]]
            s = torch.softmax(torch.stack([units[i] @ units[j] for j in seen]) / tau, 0)
            own.append(float(s[-1]))
            effective.append(math.exp(float(torch.special.entr(s).sum())))
    return own, effective


def test_against_the_definition():
    layer = MoE(6, 8, 4, router="smoe+similarity:tau=0.5").eval()
    hidden = torch.randn(2, 9, 6)
    mask = torch.rand(2, 9) < 0.8
    mask[:, 0] = True
    diagnostics = Diagnostics("mixing", "entropy")
    with torch.no_grad(), diagnostics.observe(layer):
        layer(hidden, RoutingContext(padding_mask=mask))
    found = diagnostics.result()[""]["mixing"]
    own, effective = reference(hidden, mask, 0.5)
    assert found["tokens"] == int(mask.sum())
    assert found["own_mean"] == pytest.approx(sum(own) / len(own), abs=1e-6)
    assert found["effective_mean"] == pytest.approx(sum(effective) / len(effective), rel=1e-5)


def test_a_cold_mixer_leaves_every_token_alone():
    router = build_router("smoe+similarity:source=input:tau=0.001", dim=16, num_experts=4).eval()
    diagnostics = Diagnostics()
    with torch.no_grad(), diagnostics.observe(router):
        router(torch.nn.functional.normalize(torch.randn(2, 10, 16), dim=-1))
    found = diagnostics.result()[""]
    assert found["mixing"]["own_mean"] == pytest.approx(1)
    assert found["mixing"]["effective_mean"] == pytest.approx(1)
    assert found["entropy"]["ratio"] == pytest.approx(1)


def test_the_same_tokens_inform_each_other_evenly():
    router = build_router("smoe+similarity", dim=16, num_experts=4).eval()
    diagnostics = Diagnostics()
    with torch.no_grad(), diagnostics.observe(router):
        router(torch.ones(1, 8, 16), RoutingContext(causal=False))
    found = diagnostics.result()[""]["mixing"]
    assert found["own_mean"] == pytest.approx(1 / 8)
    assert found["effective_mean"] == pytest.approx(8, rel=1e-5)


def test_tokens_that_mixing_moves():
    """All tokens get the mean scores: those with another set of the two largest are moved. Padding does not count."""
    layer = MoE(6, 8, 4, top_k=2, router="smoe+uniform").eval()
    hidden, mask = torch.randn(1, 12, 6), torch.arange(12)[None] < 10
    diagnostics = Diagnostics("mixing")
    with torch.no_grad(), diagnostics.observe(layer):
        layer(hidden, RoutingContext(causal=False, padding_mask=mask))
    scorer = layer.router.score
    probs = (hidden[0, :10] @ scorer.weight.T + scorer.bias).softmax(-1)
    together = set(probs.mean(0).topk(2).indices.tolist())
    moved = [set(row.topk(2).indices.tolist()) != together for row in probs]
    assert 0 < sum(moved) < 10
    assert diagnostics.result()[""]["mixing"]["changed"] == pytest.approx(sum(moved) / 10)


def test_virtual_experts_count_in_a_tokens_set() -> None:
    layer = MoE(6, 8, 4, top_k=2, router="smoe:nulls=3+uniform").eval()
    hidden = torch.randn(1, 12, 6)
    diagnostics = Diagnostics("mixing")
    with torch.no_grad(), diagnostics.observe(layer):
        routing = layer.router(hidden, RoutingContext(causal=False))
    before, after = (each.topk(2).indices.sort().values for each in (routing.unmixed, routing.probs))
    moved = float((before != after).any(-1).double().mean())
    assert bool((before >= 4).any())
    assert 0 < moved < 1
    assert diagnostics.result()[""]["mixing"]["changed"] == pytest.approx(moved)


def test_without_a_mixer_there_is_none():
    diagnostics = Diagnostics()
    layer = MoE(6, 8, 4).eval()
    with diagnostics.observe(layer):
        layer(torch.randn(1, 4, 6))
    assert "mixing" not in diagnostics.result()[""]


def test_shards_equal_one_pass_and_padding_counts_nothing():
    own, effective = torch.rand(4, 7), torch.rand(4, 7) + 1
    mask = torch.rand(4, 7) < 0.7
    whole, shards = Mixing(), Mixing()
    whole.update(own[mask][None], effective[mask][None])
    for rows in (slice(0, 1), slice(1, 4)):
        shard = Mixing()
        shard.update(own[rows], effective[rows], mask[rows])
        shards.merge(shard)
    assert same(whole.result(), shards.result())
    assert Mixing().result()["own_mean"] is None
