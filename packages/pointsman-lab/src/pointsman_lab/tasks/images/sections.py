"""The page's section on images: tables of shifted images."""

from __future__ import annotations

import math

from pointsman_lab._values import finite, mean_of
from pointsman_lab.report.cell import squared_variation
from pointsman_lab.report.page import Sections
from pointsman_lab.report.published import Column
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord, read_object
from pointsman_lab.tasks.images.robust_table import robust_tables


def sections(comparison: Comparison) -> Sections | None:
    """Shifted images of the comparison's runs, if there are records of them."""
    shifted = robust_tables(comparison)
    if not shifted:
        return None
    return Sections(__package__, [("robust", "Robustness")], {"robust": shifted})


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
