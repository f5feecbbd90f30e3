"""The page's panel on fine-tunings of one run: whether they load the experts alike (X-MoE, Fig. 3b)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman._grid import NONE, Grid
from pointsman_lab.report.series import drawn, short_layer, significant
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.finetunings import finetunings_of
from pointsman_lab.runs.paths import finetuned_runs

DIAGONAL = {"with_diagonal": "with the diagonal, the paper's", "without_diagonal": "without"}
NOTE = (
    "Inter-run consistency: the mean Pearson correlation between the expert loads of fine-tunings that start from the "
    "same pre-trained weights and differ in their seed; loads summed over windows of training batches. The diagonal "
    "alone adds 1 / runs. The table has the last window, mean over layers."
)


def consistency(comparison: Comparison) -> dict[str, Any]:
    """The panel's data, from each router's first pre-trained run with two finished fine-tunings; {} without any.

    Returns:
        {"grid", "note", "chart": {"variants", "layers", "diagonal": [[value, label], …], "of": {variant: {layer:
        {"with_diagonal" or "without_diagonal": curves over steps}}}}}.
    """
    found = {router: tuned for router in comparison.routers if (tuned := _of_router(comparison, router))}
    if not found:
        return {}
    variants = sorted({variant for tuned in found.values() for variant in tuned})
    layers = list(dict.fromkeys(name for tuned in found.values() for one in tuned.values() for name in one["layers"]))
    of = {
        variant: {
            layer: {key: drawn({router: _points(found[router], variant, layer, key) for router in found})
                    for key in DIAGONAL}
            for layer in layers
        }
        for variant in variants
    }  # fmt: skip
    chart = {
        "variants": [[variant, variant] for variant in variants],
        "layers": [[layer, short_layer(layer)] for layer in layers],
        "diagonal": list(map(list, DIAGONAL.items())),
        "of": of,
    }
    return {"grid": _grid(found), "note": NOTE, "chart": chart}


def _of_router(comparison: Comparison, router: str) -> dict[str, Any]:
    for run in comparison.of(router):
        if len(finetuned_runs(run.path)) > 1 and (found := finetunings_of(run.path)):
            return found
    return {}


def _points(tuned: Mapping[str, Any], variant: str, layer: str, key: str) -> list[dict[str, float]]:
    rows: Sequence[Mapping[str, Any]] = tuned.get(variant, {"layers": {}})["layers"].get(layer, [])
    return [{"x": row["step"], "y": significant(row[key])} for row in rows if row[key] is not None]


def _grid(found: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Consistency in the last window, for each router and variant."""
    rows = []
    for router, tuned in found.items():
        for variant, one in tuned.items():
            last = [rows[-1] for rows in one["layers"].values()]
            shown = []
            for key in DIAGONAL:
                values = [row[key] for row in last if row[key] is not None]
                shown.append(f"{statistics.fmean(values):.3f}" if values else NONE)
            rows.append([router, variant, str(one["runs"]), str(last[0]["step"]), *shown])
    return Grid(["router", "fine-tuned", "runs", "step", "with diagonal", "without"], rows)
