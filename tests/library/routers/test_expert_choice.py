"""Expert Choice against a float64 transcription, and its worked example."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import MoE, Router
from tests.library.routers.oracle import Expected, compare, inputs, ranked, route, router_for, softmax


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, group: str) -> Expected:
    batch, length = mask.shape
    tokens = list(range(batch * length))
    groups = [tokens] if group == "batch" else [tokens[b * length : (b + 1) * length] for b in range(batch)]
    flat, real = hidden.flatten(0, 1), mask.flatten()
    probs = [softmax(router.score.weight @ h) for h in flat]
    experts: list[list[int]] = [[] for _ in tokens]
    for members in groups:
        there = [token for token in members if real[token]]
        capacity = min(len(there), math.ceil(k * len(there) / router.num_experts))
        for e in range(router.num_experts):
            for place in ranked(torch.stack([probs[token][e] for token in there]), capacity):
                experts[there[place]].append(e)
    return Expected(experts, [[probs[token][e] for e in experts[token]] for token in tokens])


@pytest.mark.parametrize("group", ["sequence", "batch"])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_transcription(k: int, group: str) -> None:
    router = router_for(f"expert-choice:group={group}", k)
    hidden, mask = inputs()
    hidden.requires_grad_()
    routing = route(router, hidden, mask)
    compare(router, hidden, mask, transcription(router, hidden, mask, k, group), routing)
    pairs = routing.pairs
    listed = sorted(zip(pairs.token.tolist(), pairs.expert.tolist(), strict=True))
    assert listed == [(token, e) for token, row in enumerate(routing.experts.tolist()) for e in row if e >= 0]
    assert pairs.expert.tolist() == sorted(pairs.expert.tolist())
    assert pairs.offsets.tolist() == [sum(e < bound for e in pairs.expert.tolist()) for bound in range(7)]


def chosen(rows: list[list[float]]) -> list[list[int]]:
    router = router_for("expert-choice", 1, experts=3)
    with torch.no_grad():
        router.score.weight.zero_()
        router.score.weight[:, :3] = torch.tensor(rows).T
    routing = route(router, torch.eye(3, 5, dtype=torch.float64)[None])
    return [[e for e in row if e >= 0] for row in routing.experts.tolist()]


def test_worked_example() -> None:
    assert chosen([[3, 3, 0], [0, 0, 0], [0, 0, 1]]) == [[0, 1], [], [2]]
    # the third token alone changes, and with it what the others get
    assert chosen([[3, 3, 0], [0, 0, 0], [4, 0, 0]]) == [[1], [2], [0]]


def test_all_experts_are_a_dense_layer() -> None:
    torch.manual_seed(0)
    layer = MoE(5, 4, 6, router="expert-choice", top_k=6).double()
    hidden, _ = inputs()
    e, x = layer.experts, hidden.flatten(0, 1)
    inner = torch.relu(torch.einsum("td,ehd->teh", x, e.w_in) + e.b_in)
    every = torch.einsum("teh,edh->ted", inner, e.w_out) + e.b_out
    probs = torch.softmax(x @ layer.router.score.weight.T, -1)
    torch.testing.assert_close(layer(hidden).flatten(0, 1), torch.einsum("te,ted->td", probs, every))


def test_every_expert_has_the_same_load() -> None:
    hidden, _ = inputs()
    routing = route(router_for("expert-choice", 2), hidden)
    assert [int((routing.experts == e).sum()) for e in range(6)] == [3 * math.ceil(2 * 7 / 6)] * 6
