"""The table of loads: imbalance by k, and measured shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pointsman_lab.report.cell import Cell
from tools.results.load_table import LoadTable, imbalance, measured_shares


def test_imbalance_is_the_mean_over_layers() -> None:
    layers = {"a": {"load": [0.5, 0.5]}, "b": {"load": [1.0, 0.0]}, "c": {"load": []}}
    assert imbalance({"routers": layers}) == pytest.approx(0.5)
    assert imbalance({"routers": {}}) is None


def test_the_four_forms(tmp_path: Path) -> None:
    table = LoadTable(
        {"smoe": {1: Cell({0: 0.25, 1: 0.35}), 2: Cell({0: 0.5})}, "soft": {2: Cell({0: 0.0})}}, {"smoe": 0.034}
    )
    table.write(tmp_path)
    assert "| `smoe` | 0.300 ± 0.071 | 0.500 | 3.4% |" in (tmp_path / "load.md").read_text()
    assert (tmp_path / "load.csv").read_text().splitlines()[2] == "soft,-,0.0,-"
    assert "soft                -  0.000      -" in (tmp_path / "load.txt").read_text()
    assert "share" not in LoadTable(table.rows, {}).markdown().splitlines()[0]


def test_shares_of_a_benchmark(tmp_path: Path) -> None:
    assert measured_shares(tmp_path / "layer.json") == {}
    (tmp_path / "layer.json").write_text(json.dumps({"routers": {"float32": {"smoe": 0.03}}}))
    assert measured_shares(tmp_path / "layer.json") == {"smoe": 0.03}
