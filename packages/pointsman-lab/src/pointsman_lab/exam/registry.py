"""The tasks by name."""

from __future__ import annotations

from contextlib import suppress

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.exam import clusters, parts, sequences
from pointsman_lab.exam.task import Task

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
