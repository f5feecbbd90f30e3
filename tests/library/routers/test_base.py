"""BASE against a float64 transcription: exhaustive assignment in training, the best score in evaluation."""

import itertools

import pytest
import torch
from torch import Tensor

from pointsman import MoE, RoutingContext, build_router, step_end
from tests.library.routers.oracle import Expected, compare, inputs, ranked, route, router_for


def assigned(z: Tensor, k: int) -> list[list[int]]:
    """The sets of experts of the largest total score with equal loads, of all there are."""
    z = z.detach()
    tokens, experts = z.shape
    most, least = -(-tokens * k // experts), tokens * k // experts
    best, found = -float("inf"), []
    for rows in itertools.product(itertools.combinations(range(experts), k), repeat=tokens):
        loads = [sum(e in row for row in rows) for e in range(experts)]
        total = sum(float(z[n, e]) for n, row in enumerate(rows) for e in row)
        if least <= min(loads) and max(loads) <= most and total > best:
            best, found = total, [sorted(row, key=lambda e, n=n: -float(z[n, e])) for n, row in enumerate(rows)]
    return found


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("group", ["batch", "sequence"])
def test_transcription(k: int, training: bool, group: str) -> None:
    router = router_for(f"base:group={group}", k, experts=3).train(training)
    hidden, mask = inputs(batch=2, length=4)
    hidden.requires_grad_()
    z = hidden @ router.score.weight.T
    chosen = {(b, t): ranked(z[b, t], k) for b in range(2) for t in range(4)}
    if training:
        for members in [[0, 1]] if group == "batch" else [[0], [1]]:
            places = [(b, t) for b in members for t in range(4) if mask[b, t]]
            chosen |= dict(zip(places, assigned(torch.stack([z[place] for place in places]), k), strict=True))
    experts = [chosen[b, t] if mask[b, t] else [] for b in range(2) for t in range(4)]
    weights = [[1 / (1 + torch.exp(-z[n // 4, n % 4, e])) for e in row] for n, row in enumerate(experts)]
    compare(router, hidden, mask, Expected(experts, weights), route(router, hidden, mask))


def test_training_has_equal_loads_and_the_start_is_orthogonal() -> None:
    router = build_router("base", dim=16, num_experts=4, top_k=1)
    product = router.score.weight @ router.score.weight.T
    torch.testing.assert_close(product, 0.01 * torch.eye(4), rtol=0, atol=1e-6)
    hidden = torch.randn(3, 7, 16) + 3 * router.score.weight[0] / 0.1  # every token prefers one expert
    assert torch.bincount(router(hidden).experts[:, 0]).tolist() == [6, 5, 5, 5]
    assert torch.bincount(router.eval()(hidden).experts[:, 0])[0] > 15


@pytest.mark.parametrize("experts", ["ffn", "base"])
def test_a_layer_trains_compiled_as_not(experts: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = MoE(8, 8, 4, router="base", top_k=1, experts=experts)
        call = torch.compile(layer.router, backend="aot_eager") if compiled else layer.router
        hidden = torch.randn(2, 6, 8)
        context = RoutingContext(padding_mask=torch.arange(12).view(2, 6) != 5)
        for _ in range(3):
            routing = call(hidden, context)
            layer.experts(hidden.flatten(0, 1), routing).square().sum().backward()
            step_end(layer)
        found.append([routing.experts, routing.weights.detach(), layer.router.score.weight.grad])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)
