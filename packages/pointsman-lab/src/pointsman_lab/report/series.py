"""Chart data: curves averaged over seeds and in bins, so that their size does not grow with the length of a run."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pointsman_lab._values import finite
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord

BINS = 160
Point = list[float]
Curve = dict[float, float]


def significant(value: float, digits: int = 5) -> float:
    """`value` rounded to this many significant digits, which keeps the page small."""
    return float(f"{value:.{digits}g}")


def drawn(curves: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """name -> points as the scripts read them, without curves that have no point."""
    return [{"name": name, "points": points} for name, points in curves.items() if points]


def by_layer(of: Mapping[str, Any]) -> dict[str, Any]:
    """A chart with a choice of the layer: layer -> its curves, if it has any."""
    of = {layer: curves for layer, curves in of.items() if curves}
    return {"choices": [[layer, short_layer(layer)] for layer in of], "of": of}


def short_layer(name: str) -> str:
    """'layers.3.inner' -> 'layer 3', 'encoder.layers.3' -> 'encoder layer 3', as the model counts; others stay."""
    parts = name.split(".")
    numbers = [part for part in parts if part.isdigit()]
    side = next((f"{part} " for part in parts if part in ("encoder", "decoder", "thinker", "talker")), "")
    return f"{side}layer {numbers[0]}" if len(numbers) == 1 else name


def quality(table: ComparisonTable) -> list[dict[str, Any]]:
    """For every row its points (k, mean, spread), in printed units."""
    curves = {row.router: cell_points(row.quality, table.metric.scale) for row in table.rows}
    for row in table.rows:
        for point in curves[row.router]:
            if ends := row.ranges.get(int(point["x"])):
                point |= {"low": significant(ends[0], 7), "high": significant(ends[1], 7)}
    return drawn(curves)


def differences(table: ComparisonTable) -> list[dict[str, Any]]:
    """For every row but the baseline its paired differences, in printed units."""
    return drawn({router: cell_points(of, table.metric.scale) for router, of in table.differences().items()})


def cell_points(cells: Mapping[Any, Cell], scale: float) -> list[dict[str, float]]:
    """x -> cell as points, without empty cells."""
    return [point for x, cell in cells.items() if (point := cell_point(x, cell, scale))]


def cell_point(x: float, cell: Cell, scale: float) -> dict[str, float] | None:
    """A cell's mean and spread at `x`, in printed units; None for an empty cell."""
    if cell.mean is None:
        return None
    mean = cell.mean * scale
    point = {"x": significant(x, 7), "y": significant(mean, 7)}
    if cell.std is not None:
        std = cell.std * scale
        point |= {"std": significant(std), "low": significant(mean - std, 7), "high": significant(mean + std, 7)}
    return point


def binned(rows: Iterable[tuple[float, float]], last: float, bins: int = BINS) -> Curve:
    """(step, value) pairs, `in_bins` if they are many; of two values for one step the later one counts."""
    values = dict(rows)
    return in_bins(values, last, bins) if len(values) > bins else dict(sorted(values.items()))


def in_bins(values: Curve, last: float, bins: int) -> Curve:
    """A curve averaged in equal bins of (0, last], x = the bin's middle."""
    groups: dict[int, list[float]] = {}
    for step, value in values.items():
        groups.setdefault(min(bins - 1, max(0, math.ceil(step / last * bins) - 1)), []).append(value)
    return {significant((index + 0.5) * last / bins): statistics.fmean(of) for index, of in sorted(groups.items())}


def over_seeds(curves: Sequence[Curve]) -> list[Point]:
    """[x, mean, smallest, largest] over the curves that have that x."""
    xs = sorted({x for curve in curves for x in curve})
    points: list[Point] = []
    for x in xs:
        values = [curve[x] for curve in curves if x in curve]
        point = [x, significant(statistics.fmean(values))]
        if len(values) > 1:
            point += [significant(min(values)), significant(max(values))]
        points.append(point)
    return points


def last_step(comparison: Comparison) -> float:
    """The length of the horizontal axis: the planned steps, or the last step of the metrics."""
    planned = [run.steps for run in comparison.runs.values() if run.steps]
    seen = [run.last_step() for run in comparison.runs.values()]
    return float(max([*planned, *seen, 1]))


def loss(comparison: Comparison, *, bits: bool) -> dict[str, Any]:
    """Training loss of every router against the step."""
    unit = math.log(2) if bits else 1.0

    def curve(run: RunRecord) -> Curve:
        rows = [(finite(row.get("step")), finite(row.get("loss"))) for row in run.metrics("train")]
        return {step: value / unit for step, value in rows if step is not None and value is not None}

    series = per_router(comparison, curve, last_step(comparison), BINS)
    return {"label": "loss (bits)" if bits else "loss (nats)", "series": series}


def validation(comparison: Comparison, scale: float = 1.0) -> dict[str, Any]:
    """Validation metric of every router against the step, for every k."""
    last = last_step(comparison)
    tables: dict[int, dict[tuple[str, int], Curve]] = {}
    for key, run in comparison.runs.items():
        for row in run.metrics("valid"):
            k, step, value = finite(row.get("top_k")), finite(row.get("step")), finite(row.get("value"))
            if k is not None and step is not None and value is not None:
                tables.setdefault(int(k), {}).setdefault(key, {})[step] = value * scale
    ks = sorted(tables)
    of = {
        str(k): per_router(comparison, lambda run, k=k: tables[k].get((run.router, run.seed), {}), last, BINS)  # type: ignore[misc]
        for k in ks
    }
    return {"choices": [[str(k), str(k)] for k in ks], "first": str(ks[-1]) if ks else None, "of": of}


def per_router(
    comparison: Comparison, curve: Callable[[RunRecord], Curve], last: float = 0.0, bins: int = 0
) -> list[dict[str, Any]]:
    """For every router its runs' curves over seeds; where one has more points than `bins`, all are put `in_bins`."""
    curves = {name: [curve(run) for run in comparison.of(name)] for name in comparison.routers}
    if bins and any(len(one) > bins for of in curves.values() for one in of):
        curves = {name: [in_bins(one, last, bins) for one in of] for name, of in curves.items()}
    return drawn({name: over_seeds(of) for name, of in curves.items()})
