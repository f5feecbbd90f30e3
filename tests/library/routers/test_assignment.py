"""The balanced assignment against SciPy's solver, and examples worked out by hand."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pointsman.routers.papers.base import assign, balanced_assignment

Scores = NDArray[np.float64]


def value(scores: Scores, k: int) -> float:
    """The value of the assignment found, once loads and rows are as they must be."""
    tokens, num_experts = scores.shape
    experts = balanced_assignment(torch.from_numpy(scores)[None], None, k)[0].numpy()
    loads = np.bincount(experts.reshape(-1), minlength=num_experts)
    assert loads.min() == tokens * k // num_experts
    assert loads.max() == -(-tokens * k // num_experts)
    assert all(len(set(row)) == k for row in experts.tolist())
    ranked = np.take_along_axis(scores, experts, 1)
    assert (np.diff(ranked, axis=1) <= 0).all()
    return float(ranked.sum())


@pytest.mark.parametrize(
    ("scores", "optimum", "chosen"),
    [
        ([[0.90, 0.10], [0.80, 0.30], [0.70, 0.60], [0.60, 0.55]], 2.85, [0, 0, 1, 1]),
        ([[5, 4, 0], [5, 1, 0], [4, 3, 1], [4, 4, 2], [3, 0, 2], [6, 5, 5]], 24, None),
        ([[0.19, 0.55], [0.59, 0.73], [0.24, 0.37], [0.93, 0.55]], 2.45, [1, 1, 0, 0]),  # the auction: 2.44
    ],
)
def test_by_hand(scores: list[list[float]], optimum: float, chosen: list[int] | None) -> None:
    matrix = np.array(scores, dtype=np.float64)
    assert value(matrix, 1) == pytest.approx(optimum)
    if chosen is not None:
        assert balanced_assignment(torch.tensor(scores)[None], None, 1)[0, :, 0].tolist() == chosen


def test_the_optimum_of_scipy() -> None:
    """The linear programme by HiGHS, also with ties. The published auction does not end at 5 tokens, 2 experts."""
    optimize = pytest.importorskip("scipy.optimize")
    generator = np.random.default_rng(1)
    for tokens, num_experts, k in ((13, 4, 2), (20, 6, 5), (31, 5, 3), (5, 2, 1), (40, 5, 1), (24, 8, 1), (3, 4, 2)):
        scores = generator.normal(size=(tokens, num_experts)) + 2 * generator.normal(size=num_experts)
        scores = scores.round() if tokens % 8 == 0 else scores
        rows = np.kron(np.eye(tokens), np.ones(num_experts))
        columns = np.kron(np.ones(tokens), np.eye(num_experts))
        share = tokens * k / num_experts
        limits = optimize.LinearConstraint(
            np.vstack([rows, columns]),
            [k] * tokens + [np.floor(share)] * num_experts,
            [k] * tokens + [np.ceil(share)] * num_experts,
        )
        found = optimize.milp(-scores.reshape(-1), constraints=limits, bounds=optimize.Bounds(0, 1))
        assert value(scores, k) == pytest.approx(-found.fun, abs=1e-9)


def test_padding_scores_that_are_not_finite_and_nothing_at_all() -> None:
    scores = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 2] = mask[1, 4:] = False
    found = balanced_assignment(scores, mask, 1)
    assert (found[~mask] == -1).all()
    alone = balanced_assignment(scores[1:, :4], None, 1)
    assert torch.equal(found[1:, :4], alone)
    scores[0, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert balanced_assignment(scores, None, 1)[0, 0, 0] == 0
    assert (balanced_assignment(torch.full((1, 4, 3), torch.nan), None, 2).sort(-1).values >= 0).all()
    assert balanced_assignment(scores[:, :0], None, 2).shape == (2, 0, 2)
    assert balanced_assignment(scores[:0], mask[:0], 2).shape == (0, 6, 2)
    assert assign(np.zeros((3, 1), dtype=np.int64), 1).tolist() == [[0], [0], [0]]
