"""The tasks by name, their scores by seed, (plain - row) / (plain - oracle), and the rule by which a task stays."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._values import finite
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.exam import clusters, parts, sequences
from pointsman_lab.exam.student import ROWS
from pointsman_lab.exam.task import Task
from pointsman_lab.report.cell import Paired

Cells = Mapping[tuple[str, str], Mapping[str, Any]]

NEAR = 0.02
"""How near its floor an oracle must come: 2 % of the variance, or of the floor of a cross-entropy."""
APART = 10
"""How many times further from the floor `plain` must stay."""
LEAST_SEEDS = 8
_SEED = re.compile("0|[1-9][0-9]{0,8}")

TASKS: dict[str, Task] = {
    one.name: one
    for one in (
        clusters.Clusters(),
        clusters.Many(),
        parts.Fine(),
        clusters.Zipf(),
        clusters.Norms(),
        clusters.Collapse(),
        sequences.Neighbours(),
        sequences.NeighboursCausal(),
        clusters.Outliers(),
        parts.Amount(),
        parts.AnyK(),
        clusters.Nothing(),
        clusters.Drift(),
        sequences.Ids(),
        clusters.Freeze(),
        sequences.Sources(),
        sequences.SourcesSwitching(),
        clusters.Teacher(),
        sequences.Languages(),
    )
}
QUICK = ("clusters", "zipf", "norms", "neighbours")


def tasks(names: list[str] | None) -> list[Task]:
    """The named tasks, or all whose data is here; ValueError names the nearest."""
    for name in names or ():
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}: {did_you_mean(name, TASKS)}")
    return [TASKS[name] for name in names or TASKS if names or _has_data(TASKS[name])]


def _has_data(task: Task) -> bool:
    with suppress(RunError):
        return task.name != "languages" or bool(data_folder() and task.world(0))
    return False


def values(cells: Cells, task: str, row: str) -> dict[int, float]:
    """The primary measure by seed; without runs that diverged, or whose seed is no whole number."""
    runs = cells.get((task, row), {}).get("runs", {})
    kept = {
        seed: run["value"] for seed, run in runs.items() if _SEED.fullmatch(seed) and finite(run["value"]) is not None
    }
    return {int(seed): value for seed, value in kept.items()}


def scores(cells: Cells, task: str, row: str) -> dict[int, float]:
    """Score by seed, where row, plain and oracle have it and these two differ; none where a run of the row diverged."""
    if any(run["value"] is None for run in cells.get((task, row), {}).get("runs", {}).values()):
        return {}
    own, plain, oracle = (values(cells, task, name) for name in (row, "plain", "oracle"))
    seeds = [seed for seed in sorted(own.keys() & plain.keys() & oracle.keys()) if plain[seed] != oracle[seed]]
    found = {seed: finite((plain[seed] - own[seed]) / (plain[seed] - oracle[seed])) for seed in seeds}
    return {seed: score for seed, score in found.items() if score is not None}


def regret(cells: Cells, task: str, row: str) -> dict[int, float]:
    """The measure above the oracle's, by seed."""
    own, oracle = values(cells, task, row), values(cells, task, "oracle")
    return {seed: own[seed] - oracle[seed] for seed in sorted(own.keys() & oracle.keys())}


def mean_of_runs(cells: Cells, task: str, row: str, name: str) -> float | None:
    """Mean over seeds of ami, used or cost; None for rows without a router."""
    found = [run[name] for run in cells.get((task, row), {}).get("runs", {}).values() if name in run]
    return sum(found) / len(found) if found else None


def difference(cells: Cells, task: str, first: str, second: str, comparisons: int = 1) -> Paired:
    """Differences of two rows' scores, seed by seed."""
    a, b = scores(cells, task, first), scores(cells, task, second)
    return Paired([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())], comparisons)


def accept(cells: Cells, task: str, published: Sequence[str]) -> dict[str, Any]:
    """Whether a task stays: its oracle is within `NEAR` of the floor, `plain` is `APART` times further from it, and two
    published routers differ, corrected for the number of pairs, over 8 seeds.

    Returns:
        near, apart, differ (the pair that differs most, or None), oracle, plain and floor (means over seeds), accepted.
    """
    oracle, plain = values(cells, task, "oracle"), values(cells, task, "plain")
    one = TASKS[task]
    floors = {seed: one.least(one.world(seed)) if one.known else math.nan for seed in oracle}
    seeds = sorted(oracle.keys() & plain.keys())
    if not seeds:
        return {"accepted": False, "near": False, "apart": False, "differ": None}
    floor, least, most = (sum(of[seed] for seed in seeds) / len(seeds) for of in (floors, oracle, plain))
    rows = [row for row in published if row not in ROWS and len(scores(cells, task, row)) >= LEAST_SEEDS]
    pairs = list(combinations(rows, 2))
    found = {pair: difference(cells, task, *pair, comparisons=len(pairs)) for pair in pairs}
    apart = {pair: abs(paired.mean or 0) for pair, paired in found.items() if paired.sign}
    near, far = abs(least - floor) <= NEAR, most - floor >= APART * abs(least - floor)
    differ = max(apart, key=lambda pair: apart[pair]) if apart else None
    return {
        "near": near, "apart": far, "differ": differ, "floor": floor if one.known else None, "oracle": least,
        "plain": most, "accepted": near and far and differ is not None,
    }  # fmt: skip
