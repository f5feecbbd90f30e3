"""Sinkhorn routing: plans worked out by hand, marginals, and what training and evaluation choose."""

import pytest
import torch
from torch import Tensor

from pointsman.routers.papers.sinkhorn import column_potentials
from tests.library.routers.oracle import Expected, compare, inputs, ranked, route, router_for, softmax


def plan(scores: Tensor, iterations: int = 300) -> Tensor:
    """diag(u) exp(z) diag(v), rows summing to 1/N."""
    potential = column_potentials(scores[None], None, iterations)[0]
    return torch.softmax(scores + potential, -1) / len(scores)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[2, 0], [1, 0]], [[0.311230, 0.188770], [0.188770, 0.311230]]),
        ([[3, 0], [2, 0], [0, 0]], [[0.260413, None], [0.189268, None], [0.050319, None]]),
        (
            [[2, 1, 0], [2, 0, 0], [1.5, 1, 0]],
            [[0.110619, 0.126540, 0.096175], [0.145544, 0.061249, 0.126540], [0.077170, 0.145544, 0.110619]],
        ),
    ],
)
def test_plans_by_hand(scores: list[list[float]], expected: list[list[float | None]]) -> None:
    found = plan(torch.tensor(scores, dtype=torch.float64))
    for row, wanted in zip(found.tolist(), expected, strict=True):
        for value, one in zip(row, wanted, strict=True):
            assert one is None or value == pytest.approx(one, abs=1e-6)


def test_marginals_and_invariance() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(64, 16, dtype=torch.float64, generator=generator)
    found = plan(scores)
    torch.testing.assert_close(found.sum(0), torch.full((16,), 1 / 16, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.sum(1), torch.full((64,), 1 / 64, dtype=torch.float64), rtol=0, atol=1e-12)
    shifted = scores + torch.arange(64)[:, None] + torch.arange(16)
    torch.testing.assert_close(plan(shifted), found, rtol=1e-8, atol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    scores = torch.tensor([[1e4, 0.0], [9e3, 0.0]])
    assert plan(scores).isfinite().all()


@pytest.mark.parametrize("masked", [True, False])
def test_logarithms_give_what_products_give(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = 3 * torch.randn(2, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[5], [9]]) if masked else None
    expected = column_potentials(scores, mask, 20)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(column_potentials(scores, mask, 20), expected)


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("group", ["batch", "sequence"])
def test_transcription(k: int, training: bool, group: str) -> None:
    router = router_for(f"sinkhorn:group={group}:iterations=40", k).train(training)
    hidden, mask = inputs()
    hidden.requires_grad_()
    z = (hidden @ router.score.weight.T).detach()
    batch, length = mask.shape
    choice = {(b, t): z[b, t] for b in range(batch) for t in range(length)}
    if training:
        groups = [range(batch)] if group == "batch" else [[b] for b in range(batch)]
        for members in groups:
            places = [(b, t) for b in members for t in range(length) if mask[b, t]]
            scores = torch.stack([z[place] for place in places])
            v = torch.ones(6, dtype=torch.float64)
            for _ in range(40):
                u = 1 / (len(places) * (torch.exp(scores) @ v))
                v = 1 / (6 * (u @ torch.exp(scores)))
            for place, row in zip(places, torch.exp(scores) * v, strict=True):
                choice[place] = row
    experts, weights = [], []
    for b in range(batch):
        for t in range(length):
            logits = router.score.weight @ hidden[b, t]
            probs = torch.sigmoid(logits) if k == 1 else softmax(logits)
            chosen = ranked(choice[b, t], k) if mask[b, t] else []
            experts.append(chosen)
            weights.append([probs[e] for e in chosen])
    compare(router, hidden, mask, Expected(experts, weights), route(router, hidden, mask))


def test_training_balances_what_evaluation_does_not() -> None:
    router = router_for("sinkhorn", 1, experts=2)
    hidden, _ = inputs(batch=4, length=16)
    hidden[..., 0] += 3  # every token likes the same expert
    with torch.no_grad():
        router.score.weight.zero_()
        router.score.weight[0, 0] = 1
    loads = []
    for mode in (True, False):
        loads.append(int((route(router.train(mode), hidden).experts == 0).sum()))
    assert loads == [pytest.approx(32, abs=3), pytest.approx(63, abs=2)]
