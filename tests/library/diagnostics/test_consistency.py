import numpy as np
import pytest
import torch

from pointsman.diagnostics import inter_run_consistency
from tests.library.diagnostics.helpers import same


def test_against_numpy():
    loads = torch.rand(5, 16, dtype=torch.float64) * 100
    found = inter_run_consistency(list(loads))
    matrix = np.corrcoef(loads.numpy())
    assert np.allclose(found["matrix"], matrix)
    assert found["with_diagonal"] == pytest.approx(matrix.mean())
    assert found["without_diagonal"] == pytest.approx(matrix[~np.eye(5, dtype=bool)].mean())


def test_identical_runs_have_one():
    found = inter_run_consistency([[3.0, 5.0, 1.0]] * 4)
    assert found["with_diagonal"] == pytest.approx(1)
    assert found["without_diagonal"] == pytest.approx(1)


def test_opposite_runs_show_the_diagonals_share():
    found = inter_run_consistency([[1.0, 2.0], [2.0, 1.0]])
    assert found["without_diagonal"] == pytest.approx(-1)
    assert found["with_diagonal"] == pytest.approx(0)


def test_even_loads_have_no_correlation_and_are_left_out():
    found = inter_run_consistency([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [2.0, 4.0, 6.0]])
    assert found["runs"] == 2
    assert found["without_diagonal"] == pytest.approx(1)
    assert found["matrix"][1] == [None] * 3
    assert same(found, found)


def test_one_run_has_no_off_diagonal():
    found = inter_run_consistency([[1.0, 2.0]])
    assert (found["with_diagonal"], found["without_diagonal"]) == (pytest.approx(1), None)
    assert inter_run_consistency([])["with_diagonal"] is None
    assert inter_run_consistency([[1.0, 1.0]])["with_diagonal"] is None


def test_runs_with_other_numbers_of_experts_are_refused():
    with pytest.raises(ValueError, match="loads of"):
        inter_run_consistency([[1.0, 2.0], [1.0, 2.0, 3.0]])
