"""SparseMixer: its worked example, the gradient it defines, and how often an expert is drawn."""

import pytest
import torch
from torch import Tensor

from pointsman import RoutingContext
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.papers.sparsemixer import Drawn
from tests.library.routers.oracle import inputs, route, router_for

Z = (1.0, 0.9, -1.0)


def choose(select: Drawn, k: int, z: tuple[float, ...] = Z, rows: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Experts, weights, and the gradient of the first weight of each row."""
    logits = torch.tensor([[z] * rows], dtype=torch.float64, requires_grad=True)
    experts, weights = select(Scores(logits, torch.softmax(logits, -1), logits), k, RoutingContext())
    (gradient,) = torch.autograd.grad(weights[:, 0].sum(), logits)
    return experts, weights.detach(), gradient[0]


def test_evaluation_by_hand() -> None:
    experts, weights, gradient = choose(Drawn(0.1, 2, False).eval(), 2)
    assert experts.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.524979, 1.0], abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([0.249376, -0.249376, 0], abs=1e-6)


@pytest.mark.parametrize(("version", "factors", "gain"), [(2, {1.0, 1 / 3}, 1.0), (1, {1.0, 0.5}, 2.0)])
def test_training_by_hand(version: int, factors: set[float], gain: float) -> None:
    torch.manual_seed(0)
    rows = 4000
    experts, weights, gradient = choose(Drawn(0.1, version, False), 1, rows=rows)
    q = torch.tensor([0.524979, 0.475021], dtype=torch.float64)
    assert set(experts.unique().tolist()) == {0, 1}, "the third logit is too far below"
    share = float((experts == 1).double().mean())
    assert abs(share - 0.475021) < 4 * (0.475021 * 0.524979 / rows) ** 0.5
    for e in (0, 1):
        mine = experts[:, 0] == e
        found = {round(float(value / q[e]), 4) for value in weights[mine, 0]}
        assert found == ({1.0} if e == 0 else {round(factor, 4) for factor in factors})
        slope = gain * 0.249376 * (1 if e == 0 else -1)
        assert gradient[mine][0].tolist() == pytest.approx([slope, -slope, 0], abs=1e-5)
    small = (weights[experts[:, 0] == 1, 0] < 0.4).double().mean()
    wanted = 0.75 if version == 2 else 0.5
    assert abs(float(small) - wanted) < 4 * (wanted * (1 - wanted) / (rows * share)) ** 0.5


def test_the_denominator_of_negative_and_zero_logits() -> None:
    # (m - z) / max(|z|, m): for m = -1 and z = -1.1 it is 0.1 / 1.1, within 2 r = 0.2; z = -2 is 0.5 away
    experts, weights, _ = choose(Drawn(0.1, 2, False).eval(), 1, (-1.0, -1.1, -2.0))
    near = torch.softmax(torch.tensor([-1.0, -1.1]), 0)
    assert float(weights[0, 0]) == pytest.approx(float(near[0]))
    experts, weights, _ = choose(Drawn(0.1, 2, False).eval(), 2, (0.0, 0.0, -1.0))
    assert experts.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.5, 1.0])


def test_every_round_takes_another_expert() -> None:
    hidden, mask = inputs()
    routing = route(router_for("sparsemixer", 6), hidden, mask)
    real = mask.flatten()
    assert torch.equal(routing.experts[real].sort(-1).values, torch.arange(6).expand(19, 6))
    assert routing.weights.isfinite().all()
