"""trends.md on invented grids: gaps, verdicts, categories, points of two measures, and wrong fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.report.figures import _apart
from tests.lab.report.fixtures import write_comparison, write_run
from tools.results.claims_file import CLAIMS
from tools.results.trends import Trends

GRIDS = """
[grids.short]
command = "pointsman compare --steps 10"

[grids.long]
command = "pointsman compare --steps 40"
"""
LENGTH = """
[[trends]]
name = "length"
title = "Gap against length"
x = "steps"
log = true
measure = "quality"
k = 1
base = "smoe"
rows = ["wider", "closer", "over", "same", "young", "absent"]
grids = [[10, "short"], [40, "long"]]
"""
VALUES = {
    "short": {"smoe": 3.0, "wider": 3.2, "closer": 4.0, "over": 2.5, "same": 3.1, "young": 3.5},
    "long": {"smoe": 2.0, "wider": 2.6, "closer": 2.3, "over": 2.4, "same": 2.1},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    for grid, rows in VALUES.items():
        skipped = [(router, seed) for router in rows for seed in range(3)]
        write_comparison(tmp_path / grid, routers=list(rows), missing=skipped)
        for place, (router, value) in enumerate(rows.items()):
            for seed in range(3):
                off = 0.1 * seed + 1e-4 * ((seed + place) % 3)
                path = tmp_path / grid / "runs" / router / f"seed-{seed}"
                write_run(path, router, seed, top_k=(1,), values={1: value + off})
    return tmp_path


def test_how_a_gap_goes_from_the_first_point_to_the_last(folder: Path) -> None:
    (folder / CLAIMS).write_text(GRIDS + LENGTH)
    trends = Trends.read(folder)
    (trend,) = trends.trends
    assert trends.comparisons == 9 + 4, "nine gaps of three seeds, and the change of four curves"
    assert list(trend.curves) == ["wider", "closer", "over", "same", "young"]
    assert trend.curves["wider"][1].mean == pytest.approx(0.6, abs=1e-3)
    words = {name: trend.verdict(name, 1).split(" (")[0] for name in trend.curves}
    assert words == {
        "wider": "**grows**", "closer": "**shrinks**", "over": "**turns**", "same": "not significant", "young": "-",
    }  # fmt: skip
    page = trends.write(folder).read_text()
    assert "| row | steps 10 | steps 40 | first to last |" in page
    assert "![Gap against length](pictures/length.svg)" in page
    assert (folder / "pictures" / "length.svg").read_bytes().startswith(b"<?xml")
    assert all(len(line) <= 120 for line in page.splitlines() if not line.startswith("|"))


def test_the_word_for_a_change_is_about_the_seeds_of_both_points(folder: Path) -> None:
    for seed in (3, 4):  # the first point alone: a far wider gap
        for router, value in {"smoe": 3.0, "wider": 4.0}.items():
            path = folder / f"short/runs/{router}/seed-{seed}"
            write_run(path, router, seed, top_k=(1,), values={1: value + 0.1 * seed})
    about = json.loads((folder / "short/comparison.json").read_text())
    (folder / "short/comparison.json").write_text(json.dumps({**about, "seeds": [0, 1, 2, 3, 4]}))
    (folder / CLAIMS).write_text(GRIDS + LENGTH)
    [trend] = Trends.read(folder).trends
    assert trend.curves["wider"][0].mean == pytest.approx(0.52, abs=1e-3)
    assert trend.verdict("wider", 1).startswith("**grows** (+0.400")


def test_a_last_point_of_one_seed_leaves_the_change_before_it(folder: Path) -> None:
    rows = {"smoe": 1.5, "wider": 1.6}
    write_comparison(folder / "longer", routers=list(rows), missing=[(row, seed) for row in rows for seed in range(3)])
    for router, value in rows.items():
        write_run(folder / f"longer/runs/{router}/seed-0", router, 0, top_k=(1,), values={1: value})
    longer = '\n[grids.longer]\ncommand = "pointsman compare --steps 160"\n'
    (folder / CLAIMS).write_text(GRIDS + longer + LENGTH.replace('"long"]]', '"long"], [160, "longer"]]'))
    trends = Trends.read(folder)
    (trend,) = trends.trends
    assert trends.comparisons == 9 + 4, "a gap of one seed has no interval"
    assert trend.verdict("wider", 1).startswith("**grows** until steps 40 (+0.400")
    assert trend.verdict("over", 1).startswith("**turns** (")
    page = trends.write(folder).read_text()
    assert "| row | steps 10 | steps 40 | steps 160 | first to last |" in page
    assert "| +0.100, 1 seed |" in page


def test_categories_and_points_of_two_measures(folder: Path) -> None:
    curves = """
[[trends]]
name = "kinds"
title = "Kinds"
x = "kind"
measure = "quality"
k = 1
[trends.curves]
all = [["plain", "short", "smoe"], ["other", "short", "closer"]]

[[trends]]
name = "scatter"
title = "Scatter"
against = "entropy"
measure = "quality"
k = 1
rows = ["smoe", "wider"]
grids = [[0, "short"]]

[[trends]]
name = "none"
title = "Nothing yet"
x = "k"
measure = "collapse"
rows = ["smoe"]
grids = [[1, "short"]]
"""
    (folder / CLAIMS).write_text(GRIDS + curves)
    trends = Trends.read(folder)
    page = trends.write(folder).read_text()
    assert "| row | kind plain | kind other | first to last |" in page
    assert "| `all` | 3.100 ± 0.100 | 4.100 ± 0.100 | **rises**" in page
    assert "| `smoe` | 1.850 | 3.100 | 3 |" in page
    assert page.endswith("Not run.\n")
    assert sorted(file.name for file in (folder / "pictures").iterdir()) == ["kinds.svg", "scatter.svg"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("log", "logg"), "trend 1: unknown field 'logg'"),
        (('"quality"', '"qualiti"'), "did you mean 'quality'"),
        (('"long"]', '"longer"]'), "did you mean 'long'"),
        (("[[trends]]", "[[trends]"), "not TOML"),
    ],
)
def test_a_wrong_trend_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / CLAIMS).write_text((GRIDS + LENGTH).replace(*change))
    with pytest.raises(RunError, match=message):
        Trends.read(tmp_path)


def test_a_row_looks_the_same_in_all_pictures(folder: Path) -> None:
    other = LENGTH.replace('"length"', '"other"').replace('"wider", "closer", "over"', '"over", "wider"')
    (folder / CLAIMS).write_text(GRIDS + LENGTH + other)
    look = Trends.read(folder)._look()
    assert look == {"wider": 0, "closer": 1, "over": 2, "same": 3, "young": 4}
    (folder / CLAIMS).write_text(
        GRIDS + LENGTH.replace('"wider", "closer", "over", "same", "young"', '"wider"') + other
    )
    assert Trends.read(folder)._look() == {"wider": 0, "over": 1, "same": 2, "young": 3}


def test_labels_of_ticks_do_not_stand_on_each_other() -> None:
    assert _apart([1, 10, 11.3, 30, 100]) == ["1", "10", "", "30", "100"]
    assert _apart([1600, 6400, 25600]) == ["1600", "6400", "25600"]
