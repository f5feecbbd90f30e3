"""The page's sections on images: patches, from pictures.json, and tables of shifted images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman._errors import RunError
from pointsman._values import finite, mean_of
from pointsman_lab.report import series
from pointsman_lab.report.cell import Cell, squared_variation
from pointsman_lab.report.page import Sections
from pointsman_lab.report.published import Column
from pointsman_lab.report.sections import charts
from pointsman_lab.report.series import short_layer
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import CHECKPOINTS, PICTURES
from pointsman_lab.runs.record import RunRecord, read_object
from pointsman_lab.tasks.images.robust_table import RobustTable, robust_tables

FORMAT = 1


def sections(comparison: Comparison, quotes: bool) -> Sections | None:
    """Patches and shifted images of the comparison's runs, as far as there are records of them."""
    shown, shifted = pictures(comparison) if quotes else {}, robust(comparison)
    titles = [("patches", "Patches")] if shown else []
    titles += [("robust", "Robustness")] if shifted else []
    data = {"pictures": shown, "robust": charts(shifted)}
    return Sections(__package__, titles, {"robust": shifted}, data) if titles else None


def is_current(run: RunRecord) -> bool:
    """Whether the pictures are of the checkpoint of the run's evaluation, or cannot be made anew."""
    found = read_object(run.path / PICTURES)
    if found.get("format") != FORMAT:
        return not (run.path / CHECKPOINTS).is_dir()
    return found.get("checkpoint") == run.evaluation.get("checkpoint") or not (run.path / CHECKPOINTS).is_dir()


def pictures(comparison: Comparison) -> dict[str, Any]:
    """The data of the page's section on images: those of each router's first run that has any; {} without.

    Returns:
        {"sets": [{"images", "names"}], "routers": [{"name", "seed", "set", "topK", "k", "experts", "grid", "layers",
        "first", "found", "best", "sampled", "loads": {k: {layer: [share of each expert]}}}]}.
    """
    sets: list[dict[str, Any]] = []
    routers = []
    for router in comparison.routers:
        for run in comparison.of(router):
            found = read_object(run.path / PICTURES)
            if found.get("format") != FORMAT:
                continue
            classes = found["classes"]
            if not all(0 <= label < len(classes) for of in (found["labels"], *found["found"].values()) for label in of):
                raise RunError(f"{run.path / PICTURES}: a label without a class; it has {len(classes)}")
            shown = {"images": found["images"], "names": [classes[label] for label in found["labels"]]}
            if shown not in sets:
                sets.append(shown)
            routers.append({
                "name": router, "seed": run.seed, "set": sets.index(shown), "topK": found["top_k"],
                "k": found["trained_k"], "experts": found["num_experts"], "grid": found["grid"],
                "layers": [[name, short_layer(name)] for name in found["layers"]], "first": found["first"],
                "found": {k: [classes[label] for label in labels] for k, labels in found["found"].items()},
                "best": found["best"], "sampled": found["sampled"], "loads": loads(run),
            })  # fmt: skip
            break
    return {"sets": sets, "routers": routers} if routers else {}


def loads(run: RunRecord) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """k -> layer -> share of the assignments that each expert takes on the whole evaluated part."""
    return {
        str(k): {name: layer["load"] for name, layer in (row.get("routers") or {}).items() if layer.get("load")}
        for k, row in run.results().items()
    }


def robust(comparison: Comparison) -> list[dict[str, Any]]:
    """One entry for each kind of shifted images."""
    return [
        {
            "id": f"robust-{i}",
            "name": table.title,
            "grids": table.grids,
            "note": table.note,
            "by_corruption": table.by_corruption,
            "chart": _severity_chart(table) if table.severities else None,
        }
        for i, table in enumerate(robust_tables(comparison))
    ]


def _severity_chart(table: RobustTable) -> dict[str, Any]:
    """Accuracy against severity of every router, for each corruption and for their mean."""
    names = list(dict.fromkeys(name for of in table.severities.values() for name in of))
    names.sort(key=bool)  # the mean first

    def curves(name: str, *, drop: bool) -> list[dict[str, Any]]:
        found = []
        for router, of in table.severities.items():
            cells = of.get(name, {})
            start = cells.get(0, Cell({}))
            points = [
                point
                for severity, cell in cells.items()
                if (point := series.cell_point(severity, cell.minus(start) if drop else cell, 100.0))
            ]
            if points:
                found.append({"name": router, "points": points})
        return found

    return {
        "choices": [[name, name.replace("_", " ") or "mean over all"] for name in names],
        "of": {shown: {name: curves(name, drop=shown == "drop") for name in names} for shown in ("value", "drop")},
    }


def published(run: RunRecord, column: Column, top_k: int | None) -> float | None:
    """A run's figure of a column of V-MoE's tables at this k: expert loads, or accuracy on clean or shifted images."""
    if column.quantity == "imbalance":
        return _imbalance(run, column.layer, top_k)
    shift = column.shift
    if shift == "clean":
        return finite(run.results().get(top_k or 0, {}).get("value"))
    for file in sorted(run.path.glob(f"robust-{shift}*.json")):
        rows = [row for row in read_object(file).get("results", ()) if row.get("top_k") == top_k]
        if (mean := mean_of(row.get("value") for row in rows)) is not None:
            return mean
    return None


def _imbalance(run: RunRecord, layer: int | None, top_k: int | None) -> float | None:
    """Squared coefficient of variation of the expert loads on a run's own images: of a layer, or mean over layers."""
    found = [squared_variation(one) for one in (run.results().get(top_k or 0, {}).get("routers") or {}).values()]
    chosen = found if layer is None else found[layer : layer + 1]
    values = [value for value in chosen if value is not None]
    return math.fsum(values) / len(values) if values else None
