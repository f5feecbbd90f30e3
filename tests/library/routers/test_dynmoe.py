"""DynMoE against a float64 transcription; the gradient of its weights against the method's own formula."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import Router, build_router
from tests.library.routers.oracle import EXPERTS, Expected, compare, inputs, route, router_for


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int) -> Expected:
    score = router.score
    tau = torch.exp(torch.clamp(score.temperature, max=math.log(100)))
    chosen, weights = [], []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        s = [torch.sigmoid(tau * (h @ w) / (h.norm() * w.norm())) for w in score.weight]
        margin = [one - torch.sigmoid(tau * g) for one, g in zip(s, score.threshold, strict=True)]
        order = sorted(range(EXPERTS), key=lambda e: (-float(margin[e].detach()), e))[:k]
        active = [e for e in order if margin[e] > 0]
        if not real:
            active = []
        elif not active and not router.training:
            active = [max(range(EXPERTS), key=lambda e: (float(s[e].detach()), -e))]
        chosen.append(active)
        # straight through: of value 1 / count and slope 1 / count
        lonely = len(active) == 1 and not margin[active[0]] > 0
        weights.append(
            [(1 + (0 if lonely else margin[e] - margin[e].detach())) / len(active) + 0 * h.sum() for e in active]
        )
    gram = sum(
        (sum(a * b for a, b in zip(one, other, strict=True)) - float(i == j)) ** 2
        for i, one in enumerate(score.weight)
        for j, other in enumerate(score.weight)
    )
    mean = sum(torch.sqrt((w * w).sum()) for w in score.weight) / EXPERTS
    return Expected(chosen, weights, {"auxiliary": 0.25 * (torch.sqrt(gram) + mean)})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_transcription(k: int, training: bool) -> None:
    router = router_for("dynmoe:auxiliary=0.25").train(training)
    router.top_k = k
    hidden, mask = inputs()
    hidden.requires_grad_()
    routing = route(router, hidden, mask)
    lonely = int((routing.weights > 0).any(-1).sum())
    assert lonely == mask.sum() if not training else lonely <= mask.sum()
    compare(router, hidden, mask, transcription(router, hidden, mask, k), routing)


def test_a_token_below_all_thresholds() -> None:
    router = build_router("dynmoe", dim=4, num_experts=6)
    with torch.no_grad():
        router.score.threshold.fill_(2.0)
    hidden = torch.randn(1, 5, 4)
    assert (router(hidden).experts == -1).all()
    routing = router.eval()(hidden)
    assert ((routing.experts >= 0).sum(-1) == 1).all()
    assert torch.equal(routing.experts[:, 0], routing.logits.argmax(-1))
    assert torch.equal(routing.weights[:, 0], torch.ones(5))


def test_it_starts_with_half_of_the_experts() -> None:
    router = build_router("dynmoe", dim=16, num_experts=8, top_k=2)
    assert router.top_k == 8
    share = float((router(torch.randn(4, 64, 16)).experts >= 0).float().mean())
    assert 0.4 < share < 0.6


@pytest.mark.parametrize("mixer", ["", "+uniform"])
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_sigmoids_that_are_all_one_are_ranked_by_their_logits(threshold: float, mixer: str) -> None:
    torch.manual_seed(0)
    router = build_router(f"dynmoe{mixer}", dim=4, num_experts=8).eval()
    router.top_k = 1
    with torch.no_grad():
        router.score.temperature.fill_(math.log(100))
        router.score.threshold.fill_(threshold)
    routing = router(torch.randn(1, 500, 4))
    best = (routing.probs if mixer else routing.logits).argmax(-1)
    assert torch.equal(routing.experts[:, 0], best)


def test_it_starts_as_the_published_code_does() -> None:
    score = build_router("dynmoe", dim=8, num_experts=4).score
    assert torch.allclose(score.weight @ score.weight.T, torch.eye(4), atol=1e-6)
    assert score.temperature.item() == pytest.approx(math.log(1 / 0.1))  # its init_t
    assert not score.threshold.any()
