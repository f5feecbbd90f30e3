"""DSelect-k against a float64 transcription, and its worked example."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import MoE, Router, build_router
from pointsman.routers.papers.dselect import SelectorScorer, smooth_step
from pointsman.routing import RoutingContext
from tests.library.routers.oracle import Expected, compare, inputs, ranked, route, router_for, softmax


def step(t: Tensor) -> Tensor:
    if abs(float(t.detach())) >= 0.5:
        return torch.zeros_like(t) + float(float(t.detach()) > 0)
    return -2 * t**3 + 1.5 * t + 0.5


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, experts: int, selectors: int) -> Expected:
    bits = math.ceil(math.log2(experts))
    chosen, weights, entropies, penalties = [], [], [], []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        codes = (router.score.codes @ h).view(selectors, bits)
        gate = softmax(router.score.gate @ h)
        r = [
            [
                math.prod((step(c[i]) if e >> i & 1 else 1 - step(c[i]) for i in range(bits)), start=torch.ones(()))
                for e in range(experts)
            ]
            for c in codes
        ]
        w = torch.stack([sum(g * row[e] for g, row in zip(gate, r, strict=True)) for e in range(experts)])
        picked = [e for e in ranked(w, k) if w[e] > 0] if real else []
        chosen.append(picked)
        weights.append([w[e] for e in picked])
        if real:
            if experts == 2**bits:
                ones = [step(one) for one in codes.flatten()]
                entropies.append(-sum(p * torch.log(p + 1e-6) for one in ones for p in (one, 1 - one)))
            else:
                entropies.append(-sum(one * torch.log(one + 1e-6) for row in r for one in row))
            penalties.append(sum(1 / sum(row) for row in r))
    losses = {"entropy": 0.25 * torch.stack(entropies).mean()}
    if experts != 2**bits:
        losses["codes"] = 0.5 * torch.stack(penalties).mean()
    return Expected(chosen, weights, losses)


@pytest.mark.parametrize("experts", [6, 8])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_transcription(k: int, experts: int) -> None:
    router = router_for("dselect:selectors=3:entropy=0.25:codes=0.5", experts=experts)
    with torch.no_grad():
        router.score.codes.mul_(0.15 if experts == 8 else 0.03)  # within the smooth step; at 8 also beyond
    router.top_k = k
    hidden, mask = inputs()
    hidden.requires_grad_()
    routing = route(router, hidden, mask)
    assert (routing.experts[:, 0] >= 0).sum() == mask.sum()
    compare(router, hidden, mask, transcription(router, hidden, mask, k, experts, 3), routing)


def test_worked_example() -> None:
    t = torch.tensor([0.25, -0.1, 0.5, -0.7], dtype=torch.float64)
    assert smooth_step(t, 1.0).tolist() == pytest.approx([0.84375, 0.352, 1, 0])
    scorer = SelectorScorer(2, 4, 1, 1.0).double()
    with torch.no_grad():
        scorer.codes.copy_(torch.tensor([[0.25, 0], [-0.1, 0]]))
    scored = scorer(torch.tensor([[[1.0, 0.0]]], dtype=torch.float64), RoutingContext())
    assert scored.logits.exp().flatten().tolist() == pytest.approx([0.10125, 0.54675, 0.055, 0.297])


def test_it_starts_dense_and_has_as_many_selectors_as_the_layers_k() -> None:
    router = build_router("dselect", dim=4, num_experts=8, top_k=3)
    assert (router.top_k, router.score.selectors) == (8, 3)
    weights = router(torch.randn(1, 5, 4)).weights
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 8), rtol=0.2, atol=0)


def test_saturated_selectors_train_without_nan() -> None:
    layer = MoE(5, 4, 6, router="dselect")
    with torch.no_grad():
        layer.router.score.codes.mul_(1e6)
    layer(torch.randn(2, 7, 5)).sum().backward()
    for parameter in layer.router.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_one_selector_has_no_gate_to_train() -> None:
    router = router_for("dselect:selectors=1", experts=5)
    assert [name for name, _ in router.named_parameters()] == ["score.codes"]
