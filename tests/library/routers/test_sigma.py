"""sigma-MoE against a float64 transcription of its equations."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import Router, build_router
from tests.library.routers.oracle import Expected, compare, inputs, ranked, route, router_for, softmax


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, dropped: Tensor | None) -> Expected:
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    averages = []
    for token, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten(), strict=True)):
        if not real:
            experts.append([])
            weights.append([])
            continue
        z = router.score.weight @ h
        s = 1 / (1 + torch.exp(-z))
        free = [e for e in range(len(s)) if dropped is None or not dropped[token, e]]
        chosen = [free[place] for place in ranked(s[free], k)]
        experts.append(chosen)
        weights.append([s[e] for e in chosen])
        averages.append(softmax(z))
    q = torch.stack(averages).mean(0)
    return Expected(experts, weights, {"entropy": 0.5 * ((q * q.log()).sum() + math.log(len(q)))})


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("training", [False, True])
def test_transcription(k: int, training: bool) -> None:
    router = router_for("sigma:dropout=0.4:entropy=0.5", k).train(training)
    hidden, mask = inputs()
    hidden.requires_grad_()
    dropped = None
    if training:
        torch.manual_seed(3)
        dropped = torch.rand(hidden.shape[0] * hidden.shape[1], 6) < 0.4
    compare(router, hidden, mask, transcription(router, hidden, mask, k, dropped), route(router, hidden, mask))


def test_without_dropout_and_entropy_it_is_a_sigmoid_router() -> None:
    hidden, mask = inputs()
    ours = router_for("sigma:dropout=0:entropy=0", 3)
    plain = router_for("smoe:gate=sigmoid:renormalize=false:bias=false", 3)
    left, right = route(ours, hidden, mask), route(plain, hidden, mask)
    assert torch.equal(left.experts, right.experts)
    assert torch.equal(left.weights, right.weights)


def test_rows_start_with_norm_1() -> None:
    weight = build_router("sigma", dim=64, num_experts=8).score.weight
    torch.testing.assert_close(weight.norm(dim=-1), torch.ones(8))
