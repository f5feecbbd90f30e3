"""An entry of the leaderboard: one row of a comparison in one file, with all that it takes to train it again.

`sources` has the text of the files that the row's router comes from, `runs` each seed's environment, evaluation and
log: the loss of every step that was logged. `sha256` is that of the rest: a file that was damaged on its way is
refused. Whoever deceives can make it anew: an entry is believed once a seed was trained again (`tools.leaderboard`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import read_json
from pointsman_lab._shapes import check_shape
from pointsman_lab.runs.comparison import read_comparison, required_plan
from pointsman_lab.runs.imports import source_of
from pointsman_lab.runs.paths import EVALUATION
from pointsman_lab.runs.record import RunRecord

FORMAT = 1
SHAPE: dict[str, Any] = {
    "format!": int, "name!": str, "router!": str, "settings!": dict, "tuned!": dict, "data!": str,
    "sources!": {"*": str}, "sha256!": str,
    "runs!": {"*": {"environment!": dict, "evaluation!": {"results!": [dict]}, "step_seconds!": float,
                    "log!": {"step!": [int], "loss!": [float]}}},
}  # fmt: skip


def digest(entry: Mapping[str, Any]) -> str:
    """SHA-256 of everything but `sha256`."""
    rest = {key: value for key, value in entry.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def signed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with its checksum."""
    return {**entry, "sha256": digest(entry)}


def entry_of(folder: Path, router: str, name: str) -> dict[str, Any]:
    """The entry of one row of a comparison."""
    plan, comparison = required_plan(folder), read_comparison(folder)
    if router not in comparison.routers:
        raise RunError(f"{folder} has no row {router!r}: {did_you_mean(router, comparison.routers)}")
    unfinished = [seed for one, seed in comparison.missing() if one == router]
    if unfinished:
        raise RunError(f"{folder}: {router}, seed {unfinished[0]}: not finished; the command of the comparison goes on")
    return signed({
        "format": FORMAT, "name": name, "router": router, "settings": plan["settings"],
        "tuned": plan.get("tuned", {}).get(router, {}), "data": plan.get("data", ""),
        "sources": sources_of(plan["settings"].get("imports") or ()),
        "runs": {str(run.seed): _run(run) for run in comparison.of(router)},
    })  # fmt: skip


def sources_of(imports: Iterable[Any]) -> dict[str, str]:
    """The text of each Python file among what a plan imports."""
    return {one: source_of(one) for one in imports if isinstance(one, str) and one.endswith(".py")}


def _run(run: RunRecord) -> dict[str, Any]:
    rows = list(run.metrics("train"))
    seconds = sorted(float(row.get("step_seconds") or 0.0) for row in rows) or [0.0]
    return {
        "environment": read_json(run.path / "environment.json") or {},
        "evaluation": {"results": read_json(run.path / EVALUATION)["results"]},  # type: ignore[index]
        "log": {"step": [row["step"] for row in rows], "loss": [row["loss"] for row in rows]},
        "step_seconds": run.evaluation.get("step_seconds") or seconds[len(seconds) // 2],
    }


def read_entry(file: Path, shape: Mapping[str, Any] = SHAPE) -> dict[str, Any]:
    """An entry's file."""
    entry = read_json(file)
    if entry is None:
        raise RunError(f"{file}: no such file")
    check_shape(entry, shape, str(file))
    try:
        json.dumps(entry, allow_nan=False)
    except ValueError:
        raise RunError(f"{file}: a figure in it is no finite number") from None
    if entry["format"] != FORMAT:
        raise RunError(f"{file}: no entry of format {FORMAT}")
    if entry["sha256"] != digest(entry):
        raise RunError(f"{file}: it was changed after `pointsman submit` wrote it: its SHA-256 differs")
    return entry
