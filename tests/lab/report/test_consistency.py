"""The page's panel on fine-tunings of one run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pointsman_lab.report.page import render
from pointsman_lab.report.sections import consistency
from pointsman_lab.runs.comparison import read_comparison
from tests.lab.report.fixtures import write_comparison, write_finetuning


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Two routers, each with twelve fine-tunings of one run, free and frozen."""
    path = tmp_path / "comparison"
    write_comparison(path, ("smoe", "hyperrouter"), (0,))
    for place, router in enumerate(("smoe", "hyperrouter")):
        for seed in range(12):
            for variant in ("xnli", "xnli,freeze=router+experts"):
                write_finetuning(path / f"runs/r{place}/seed-0", variant, router, seed, metric=0.5)
    return path


def test_the_panel_shows_both_readings_of_each_variant(comparison: Path) -> None:
    found = consistency(read_comparison(comparison))
    chart = found["chart"]
    assert [name for name, _ in chart["variants"]] == ["xnli", "xnli,freeze=router+experts"]
    assert len(chart["layers"]) == 4
    assert [name for name, _ in chart["diagonal"]] == ["with_diagonal", "without_diagonal"]
    layer = "blocks.0.moe"
    one = {curve["name"]: curve["points"] for curve in chart["of"]["xnli"][layer]["with_diagonal"]}
    assert list(one) == ["smoe", "hyperrouter"]
    assert [point["x"] for point in one["smoe"]] == [2, 4, 6, 8, 10]
    loads = []
    for seed in range(12):
        file = comparison / f"runs/r0/seed-0/finetune/xnli/seed-{seed}/metrics.jsonl"
        rows = [row for row in map(json.loads, file.read_text().splitlines()) if row.get("layer") == layer]
        loads.append(np.array(rows[-2]["load"]) + np.array(rows[-1]["load"]))
    rho = np.corrcoef(loads)
    assert one["smoe"][-1]["y"] == pytest.approx(rho.mean(), rel=1e-4)
    other = chart["of"]["xnli"][layer]["without_diagonal"][0]["points"]
    assert other[-1]["y"] == pytest.approx((rho.sum() - 12) / 132, rel=1e-4)
    assert [row[:4] for row in found["grid"].rows][:2] == [
        ["smoe", "xnli", "12", "10"], ["smoe", "xnli,freeze=router+experts", "12", "10"],
    ]  # fmt: skip
    page = render(read_comparison(comparison))
    assert 'id="consistency"' in page
    assert "Consistency of fine-tunings of one run" in page


def test_no_panel_without_two_fine_tunings_of_a_run(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "comparison", ("smoe",), (0, 1))
    for seed in (0, 1):
        write_finetuning(path / f"runs/r0/seed-{seed}", "xnli", "smoe", seed, metric=0.5)
    assert consistency(read_comparison(path)) == {}
    assert 'id="consistency"' not in render(read_comparison(path))
