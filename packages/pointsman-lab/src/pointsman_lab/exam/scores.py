"""The tasks by name, and their scores by seed, (plain - row) / (plain - oracle)."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._values import finite
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.exam import clusters, parts, sequences
from pointsman_lab.exam.task import Task
from pointsman_lab.report.cell import Paired

Cells = Mapping[tuple[str, str], Mapping[str, Any]]
"""(task, row) -> what `cell.read_cell` gives."""

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
