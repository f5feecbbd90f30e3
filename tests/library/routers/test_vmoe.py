"""V-MoE's router against a float64 transcription."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import Router
from tests.library.routers.oracle import Expected, compare, inputs, ranked, route, router_for, softmax


def variation(values: list[Tensor]) -> Tensor:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def phi(x: Tensor) -> Tensor:
    return (1 + torch.erf(x / math.sqrt(2))) / 2


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, draws: Tensor | None) -> Expected:
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    importance: list[Tensor] = []
    load: list[Tensor] = []
    for token, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten(), strict=True)):
        clean = router.score.weight @ h
        noisy = clean if draws is None else clean + draws[token] * 2 / 6
        chosen = ranked(noisy, k) if real else []
        experts.append(chosen)
        weights.append([softmax(noisy)[e] for e in chosen])
        if real:
            importance.append(softmax(clean))
            threshold = noisy[ranked(noisy, k)[-1]]
            load.append(torch.stack([1 - phi((threshold - z) * 6 / 2) for z in clean]))
    zero = torch.zeros((), dtype=torch.float64)
    losses = {"importance": zero, "load": zero}
    if draws is not None:
        for name, rows in (("importance", importance), ("load", load)):
            losses[name] = 0.1 * variation(list(torch.stack(rows).mean(0)))
    return Expected(experts, weights, losses)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("training", [False, True])
def test_transcription(k: int, training: bool) -> None:
    router = router_for("vmoe:noise=2:importance=0.1:load=0.1", k).train(training)
    hidden, mask = inputs()
    hidden.requires_grad_()
    draws = None
    if training:
        torch.manual_seed(3)
        draws = torch.randn(*mask.shape, 6, dtype=torch.float64).flatten(0, 1)
    compare(router, hidden, mask, transcription(router, hidden, mask, k, draws), route(router, hidden, mask))


def test_both_losses_are_0_at_balance() -> None:
    router = router_for("vmoe:noise=0", 6)
    with torch.no_grad():
        router.score.weight.zero_()
    routing = route(router, inputs()[0])
    assert {name: float(value.detach()) for name, value in routing.losses.items()} == {"importance": 0.0, "load": 0.0}
