"""Consistency of several runs over their training."""

import numpy as np
import pytest

from pointsman_lab.finetuning.consistency import consistency_over_training, gathered_loads


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
