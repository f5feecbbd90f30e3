"""What a diagnosis adds to the page."""

from pathlib import Path
from typing import Any

import pytest

from pointsman_lab.report import write_report
from pointsman_lab.report.inside import diagnosis_grid, history_of
from pointsman_lab.report.summary import COLUMNS
from pointsman_lab.runs.comparison import read_comparison
from tests.lab.report.fixtures import dump, write_comparison, write_run
from tests.lab.report.test_page import Page


def layer(collapse: float | None, moved: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"num_experts": 8, "entropy": {"mean": 1.25, "std": 0.5}}
    found["load"] = {"effective": 6.5, "dead": [3], "cv": 0.25}
    found["collapse"] = {"value": collapse, "classes": 7}
    if moved is not None:
        found["fluctuation"] = {"top1": moved}
    return found


def diagnosis() -> dict[str, Any]:
    return {
        "format": 1, "source": {"step": 300}, "protocol": {"tokens": 5000, "split": "test", "top_k": 2},
        "layers": {"blocks.0.moe": layer(30.0)},
        "history": [
            {"checkpoint": "step-100", "layers": {"blocks.0.moe": layer(10.0, 0.4)}},
            {"checkpoint": "step-200", "layers": {"blocks.0.moe": layer(20.0, 0.1)}},
        ],
        "consistency": {"blocks.0.moe": {"without_diagonal": 0.5}},
    }  # fmt: skip


def test_a_checkpoints_change_is_since_the_one_before() -> None:
    """diagnostics.json gives a checkpoint's change to the one after it."""
    found = [(one["step"], *one["layers"]["blocks.0.moe"].values()) for one in history_of(diagnosis())]
    assert found == [(100, 10.0, None), (200, 20.0, 0.4), (300, 30.0, 0.1)]


def test_table_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r")
    dump(run / "diagnostics.json", diagnosis())
    table = diagnosis_grid(read_comparison(run))
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert (row["router"], row["layer"], row["RC"], row["fluctuation"], row["dead"]) == (
        "smoe", "blocks.0.moe", "30.0", "0.100", "1",
    )  # fmt: skip
    assert row["IC over seeds"] == "0.500"
    assert "margin" not in row
    page = Page(write_report(run).read_text())
    assert "5,000 tokens of test, k = 2" in page.text
    assert page.data["inside"]["collapse"]["of"]["blocks.0.moe"][0]["points"] == [
        [100.0, 10.0],
        [200.0, 20.0],
        [300.0, 30.0],
    ]
    assert page.data["inside"]["byLayer"]["fluctuation"][0]["points"] == [[0.0, 0.1]]


def test_a_comparisons_own_diagnosis(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "hyperrouter"), (0,))
    dump(path / "diagnostics.json", {"format": 1, "routers": {"hyperrouter": diagnosis()}})
    assert [row[0] for row in diagnosis_grid(read_comparison(path)).rows] == ["hyperrouter"]


@pytest.mark.slow
def test_a_real_diagnosis_fills_the_page(trained: Path) -> None:
    from pointsman_lab.diagnosis import Settings, diagnose_path

    run = trained / "runs" / "smoe" / "seed-0"
    dump(run / "diagnostics.json", diagnose_path(run, settings=Settings(tokens=300)))
    table = diagnosis_grid(read_comparison(run))
    assert len(table.rows) == 2
    assert {"entropy", "load CV", "RC", "fluctuation"} <= set(table.header)
    page = Page(write_report(run).read_text())
    points = page.data["inside"]["collapse"]["of"][table.rows[0][1]][0]["points"]
    assert [point[0] for point in points] == [3.0, 6.0]


@pytest.mark.parametrize(("assignments", "shown"), [(20, "-"), (25, "2.50"), (0, "0.00")])
def test_the_summary_shows_experts_per_token_where_they_vary(assignments: int, shown: str) -> None:
    cell = dict(COLUMNS)["experts/token"]
    assert cell({"load": {"tokens": 10, "assignments": assignments}}) == shown  # records of all ages have these two
