"""Top-p routing against a float64 transcription, and its worked example."""

import pytest
import torch
from torch import Tensor

from pointsman import Router, RoutingContext, build_router
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.papers.top_p import TopP
from tests.library.routers.oracle import Expected, balance_loss, compare, inputs, ranked, route, router_for, softmax


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, tau: float) -> Expected:
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    every, entropies = [], []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        chosen: list[int] = []
        p = softmax(router.score.weight @ h)
        if real:
            total = 0.0
            for e in ranked(p, k):
                if chosen and total >= tau:
                    break
                chosen.append(e)
                total += float(p[e].detach())
            every.append(p)
            entropies.append(-(p * p.log()).sum())
        experts.append(chosen)
        weights.append([p[e] for e in chosen])
    counted = [one for one in experts if one]
    losses = {"balance": 0.01 * balance_loss(every, counted), "dynamic": 0.25 * torch.stack(entropies).mean()}
    return Expected(experts, weights, losses)


@pytest.mark.parametrize("tau", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_transcription(k: int, tau: float) -> None:
    router = router_for(f"top-p:tau={tau}:dynamic=0.25")
    router.top_k = k
    hidden, mask = inputs()
    hidden.requires_grad_()
    compare(router, hidden, mask, transcription(router, hidden, mask, k, tau), route(router, hidden, mask))


@pytest.mark.parametrize(("tau", "count"), [(0.3, 1), (0.4, 2), (0.66, 3), (1.0, 4)])
def test_worked_example(tau: float, count: int) -> None:
    p = torch.tensor([[[0.35, 0.30, 0.20, 0.15]]], dtype=torch.float64)
    experts, weights = TopP(tau, renormalize=False)(Scores(p.log(), p, p), 4, RoutingContext())
    assert experts.tolist() == [[*range(count), *[-1] * (4 - count)]]
    assert weights[0, :count].tolist() == p[0, 0, :count].tolist()


def test_the_balance_loss_may_count_first_choices() -> None:
    """XMoE's, against loops."""
    router = router_for("top-p:dynamic=0:counted=first:balance=1")
    hidden, mask = inputs()
    probs = [
        softmax(router.score.weight @ h) for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True) if real
    ]
    expected = balance_loss(probs, [ranked(p, 1) for p in probs])
    torch.testing.assert_close(route(router, hidden, mask).losses["balance"], expected)


def test_it_starts_with_all_experts_and_a_tiny_tau_takes_one() -> None:
    assert build_router("top-p", dim=4, num_experts=6, top_k=2).top_k == 6
    hidden, mask = inputs()
    routing = route(router_for("top-p:tau=1e-6"), hidden, mask)
    assert ((routing.experts >= 0).sum(-1) == mask.flatten()).all()
