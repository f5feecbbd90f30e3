"""An entry of the exam's track on the leaderboard: a router's cells on all tasks, and the source of the router."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import read_json
from pointsman_lab._shapes import SHAPES
from pointsman_lab.exam.cell import VERSION, chosen, is_whole
from pointsman_lab.exam.exam import PLAN, SEEDS, collect, plan_in
from pointsman_lab.exam.scores import TASKS
from pointsman_lab.exam.student import ROWS
from pointsman_lab.runs.sharing import ENTRY_FORMAT, entry_sources, signed

CELL = {"tried!": [[str | float | int | None]], "chosen!": {"spec!": str, "rate!": float},
        "runs!": SHAPES["exam-*.json"]["runs!"]}  # fmt: skip
SHAPE: dict[str, Any] = {"format!": int, "name!": str, "router!": str, "version!": int, "sources!": {"*": str},
                         "cells!": {"*": CELL}, "sha256!": str}  # fmt: skip


def exam_entry(folder: Path, router: str, name: str) -> dict[str, Any]:
    """The entry of one row of an exam's directory: of the tasks whose best routing is known."""
    plan = plan_in(folder)
    routers = [row for row in plan.rows if row not in ROWS]
    if router not in routers:
        raise RunError(f"{folder} has no router {router!r}: {did_you_mean(router, routers)}")
    known = [task for task in plan.tasks if TASKS[task].known]
    cells = {task: cell for (task, row), cell in collect(plan, folder).items() if row == router and task in known}
    for task in known:
        if task not in cells or not is_whole(cells[task], plan.seeds):
            raise RunError(f"{folder}: {router}, task {task}: not finished; the command of the exam goes on")
        if "refused" in cells[task]:
            raise RunError(f"{folder}: {router} was refused on the task {task}: {cells[task]['refused']}")
    kept = {
        task: {"tried": cell["tried"], "chosen": cell["chosen"], "runs": {
            seed: {key: value for key, value in run.items() if key != "confusion"} for seed, run in cell["runs"].items()
        }}
        for task, cell in cells.items()
    }  # fmt: skip
    origin = (read_json(folder / PLAN) or {}).get("origins", {}).get(router, {})
    sources, _ = entry_sources(folder, router, plan.imports, [origin])
    return signed({
        "format": ENTRY_FORMAT, "name": name, "router": router, "version": VERSION, "sources": sources, "cells": kept,
    })  # fmt: skip


def unlike_track(entry: Mapping[str, Any]) -> str:
    """In what an entry differs from the leaderboard's track, which refuses it then; empty if in nothing."""
    left = [name for name, task in TASKS.items() if task.known and name not in entry["cells"]]
    counts = sorted({len(cell["runs"]) for cell in entry["cells"].values()} - {SEEDS})
    parts = [*([f"it lacks {', '.join(left)}"] if left else []), *(f"{one} seeds, not {SEEDS}" for one in counts)]
    parts += [f"{task}, seed {seed}, diverged" for task, cell in entry["cells"].items()
              for seed, run in cell["runs"].items() if run.get("value", 0) is None]  # fmt: skip
    return "; ".join(parts)


def consistent(entry: Mapping[str, Any], where: str) -> None:
    """RunError where the cells contradict themselves: spec and rate are those chosen, values those of the curves."""
    for task, cell in entry["cells"].items():
        for one in cell["tried"]:
            match one:
                case [str(), float() | int(), int(), float() | int() | None]:
                    continue
            raise RunError(f"{where}, {task}: tried has {one}; allowed is [spec, rate, seed, value]")
        tried = {(spec, rate, seed): math.inf if value is None else value for spec, rate, seed, value in cell["tried"]}
        try:
            wanted = chosen(entry["router"], lambda *one: tried[one])  # noqa: B023 - called at once
        except KeyError as error:
            raise RunError(f"{where}, {task}: a choice was not tried: {error.args[0]}") from None
        if wanted != (cell["chosen"]["spec"], cell["chosen"]["rate"]):
            raise RunError(f"{where}, {task}: what was tried chooses {wanted[0]} at {wanted[1]:g}, not the entry's")
        for seed, run in cell["runs"].items():
            for point in [point for point in run.get("curve", ()) if len(point) != 2]:
                raise RunError(f"{where}, {task}, seed {seed}: its curve has {point}; allowed is [step, value]")
            curve = {step: math.nan if one is None else one for step, one in run.get("curve", ()) if step is not None}
            if not curve or run["value"] is None:
                continue
            if max(curve) != TASKS[task].steps or not _near(TASKS[task].judge(curve), run["value"]):
                raise RunError(f"{where}, {task}, seed {seed}: the value {run['value']} is not that of its curve")


def _near(one: float, other: float) -> bool:
    """Equal, but for the four digits of a record."""
    return math.isclose(one, other, rel_tol=2e-3, abs_tol=1e-6)
