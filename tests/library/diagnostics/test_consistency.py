import numpy as np
import pytest
import torch

from pointsman.diagnostics import consistency_over_training, gathered_loads, inter_run_consistency
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


def row(step, load, batches, tokens=10, layer="a"):
    return {"kind": "routing", "step": step, "layer": layer, "load": load, "tokens": tokens, "batches": batches}


def test_loads_are_gathered_for_every_hundred_batches():
    rows = [
        row(50, [0.5, 0.5], 50),
        {"kind": "train", "step": 60},
        row(100, [1.0, 0.0], 50, tokens=30),
        row(150, [0.25, 0.75], 100),
        row(180, [0.0, 1.0], 30),
    ]
    found = gathered_loads(rows)["a"]
    assert [step for step, _ in found] == [100, 150]
    assert found[0][1].tolist() == [35, 5]
    assert found[1][1].tolist() == [2.5, 7.5]


def test_consistency_over_training():
    one = [row(100, [0.7, 0.2, 0.1], 100), row(200, [0.6, 0.3, 0.1], 100), row(300, [0.6, 0.3, 0.1], 100)]
    two = [row(100, [0.1, 0.2, 0.7], 100), row(200, [0.6, 0.3, 0.1], 100)]
    found = consistency_over_training([one, two])
    assert [point["step"] for point in found["a"]] == [100, 200]
    assert found["a"][0]["without_diagonal"] == pytest.approx(np.corrcoef([0.7, 0.2, 0.1], [0.1, 0.2, 0.7])[0, 1])
    assert found["a"][1]["with_diagonal"] == pytest.approx(1)
    assert consistency_over_training([]) == {}
    assert consistency_over_training([one, []]) == {}
