"""trends.md on invented grids: gaps, seeds, categories, and wrong fields."""

import math
import statistics
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.report.figures import _apart
from tests.lab.report.fixtures import write_comparison, write_run
from tools.results.claims_file import CLAIMS
from tools.results.trends import _drawn, read_trends, write_trends

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


def test_a_gap_against_a_setting(folder: Path) -> None:
    (folder / CLAIMS).write_text(GRIDS + LENGTH)
    trends = read_trends(folder)
    [trend] = trends
    assert {name: list(points) for name, points in trend.curves.items()} == {
        "wider": [10, 40], "closer": [10, 40], "over": [10, 40], "same": [10, 40], "young": [10],
    }  # fmt: skip
    assert statistics.fmean(trend.curves["wider"][40]) == pytest.approx(0.6, abs=1e-3)
    page = write_trends(trends, folder).read_text()
    assert "![Gap against length](pictures/length.svg)\n\nSeeds: 3 at each point.\n" in page
    assert (folder / "pictures" / "length.svg").read_bytes().startswith(b"<?xml")
    assert all(len(line) <= 120 for line in page.splitlines())


def test_a_bar_is_the_interval_of_its_mean_alone() -> None:
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert _drawn(5, [1.0, 1.2, 1.4]) == pytest.approx({"x": 5, "y": 1.2, "low": 1.2 - half, "high": 1.2 + half})
    assert _drawn(5, [1.0, 1.2]) == {"x": 5, "y": 1.1}


def test_seeds_are_told_where_they_differ(folder: Path) -> None:
    rows = {"smoe": 1.5, "wider": 1.6}
    write_comparison(folder / "longer", routers=list(rows), missing=[(row, seed) for row in rows for seed in range(3)])
    for router, value in rows.items():
        write_run(folder / f"longer/runs/{router}/seed-0", router, 0, top_k=(1,), values={1: value})
    (folder / "short/runs/closer/seed-0/evaluation.json").unlink()
    longer = '\n[grids.longer]\ncommand = "pointsman compare --steps 1600"\n'
    (folder / CLAIMS).write_text(GRIDS + longer + LENGTH.replace('"long"]]', '"long"], [1600, "longer"]]'))
    page = write_trends(read_trends(folder), folder).read_text()
    assert "Seeds: 2 to 3 at steps 10, 3 at steps 40, 1 at steps 1,600.\n" in page


def test_categories_and_what_has_not_been_run(folder: Path) -> None:
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
name = "none"
title = "Nothing yet"
x = "k"
measure = "collapse"
rows = ["smoe"]
grids = [[1, "short"]]
"""
    (folder / CLAIMS).write_text(GRIDS + curves)
    kinds, none = read_trends(folder)
    assert {x: statistics.fmean(of) for x, of in kinds.curves["all"].items()} == pytest.approx(
        {"plain": 3.1, "other": 4.1}, abs=1e-3
    )
    page = write_trends([kinds, none], folder).read_text()
    assert page.endswith("Not run.\n")
    assert [file.name for file in (folder / "pictures").iterdir()] == ["kinds.svg"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("log", "logg"), "trend 1: unknown field 'logg'"),
        (('"quality"', '"qualiti"'), "did you mean 'quality'"),
        (("k = 1", "k = 0"), "trend 1: measure='quality' needs a k"),
        (('"long"]', '"longer"]'), "did you mean 'long'"),
        (('x = "steps"', ""), "an object with 'x'"),
        (("[[trends]]", "[[trends]"), "not TOML"),
    ],
)
def test_a_wrong_trend_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / CLAIMS).write_text((GRIDS + LENGTH).replace(*change))
    with pytest.raises(RunError, match=message):
        read_trends(tmp_path)


def test_labels_of_ticks_do_not_stand_on_each_other() -> None:
    assert _apart([1, 10, 11.3, 30, 100]) == ["1", "10", "", "30", "100"]
    assert _apart([1600, 6400, 25600]) == ["1600", "6400", "25600"]
