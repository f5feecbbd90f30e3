"""Mixture of Depths against a float64 transcription, in both modes."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import Router, build_router
from tests.library.routers.oracle import BATCH, EXPERTS, LENGTH, Expected, compare, inputs, ranked, route, router_for


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, share: float, gate: str) -> Expected:
    scores = [router.score.weight @ h for h in hidden.flatten(0, 1)]
    real = mask.flatten().tolist()
    chosen: list[list[int]] = [[] for _ in scores]
    for b in range(BATCH):
        rows = [n for n in range(b * LENGTH, (b + 1) * LENGTH) if real[n]]
        for e in range(EXPERTS):
            if router.training:
                order = ranked([float(scores[n][e].detach()) for n in rows], len(rows))
                for place in order[: math.ceil(share * k * len(rows) / EXPERTS - 1e-9)]:
                    chosen[rows[place]].append(e)
    cross = []
    for n, r in enumerate(scores):
        if not router.training and real[n]:
            chosen[n] = [e for e in ranked(r, k) if float(r[e].detach()) > 0]
        if real[n]:
            for e in range(EXPERTS):
                p = 1 / (1 + torch.exp(-r[e]))
                cross.append(-torch.log(p if e in chosen[n] else 1 - p))
    weigh = (lambda r: r) if gate == "linear" else torch.sigmoid
    weights = [[weigh(r[e]) for e in experts] for r, experts in zip(scores, chosen, strict=True)]
    return Expected(chosen, weights, {"auxiliary": 0.25 * torch.stack(cross).mean()})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
@pytest.mark.parametrize(("k", "share"), [(1, 0.5), (2, 0.25), (3, 1.0), (6, 1.0)])
def test_transcription(k: int, share: float, gate: str, training: bool) -> None:
    router = router_for(f"depths:share={share}:gate={gate}:auxiliary=0.25").train(training)
    router.top_k = k
    hidden, mask = inputs()
    hidden.requires_grad_()
    expected = transcription(router, hidden, mask, k, share, gate)
    compare(router, hidden, mask, expected, route(router, hidden, mask))


def test_one_expert_takes_an_eighth_of_the_tokens() -> None:
    router = build_router("depths", dim=4, num_experts=1, top_k=1)
    routing = router(torch.randn(2, 32, 4))
    assert (routing.experts >= 0).view(2, 32).sum(1).tolist() == [4, 4]
    assert torch.equal(routing.weights[routing.experts >= 0], routing.logits[routing.experts >= 0])


def test_under_a_mixer_evaluation_goes_by_the_scores_that_training_teaches() -> None:
    router = router_for("depths+uniform", k=1, experts=1).eval()
    routing = route(router, inputs()[0])
    assert torch.equal(routing.experts >= 0, routing.logits > 0)
