"""Static figures for papers, from the data of the page's charts: PNG, SVG and PDF, with matplotlib."""

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pointsman._errors import RunError, did_you_mean, needing
from pointsman_lab._files import replacing, within
from pointsman_lab.report import series
from pointsman_lab.report.inside import entropy_by_layer, layer_names, load_heat, rows_by_layer
from pointsman_lab.report.page import page_path, refuse_foreign
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison, read
from pointsman_lab.runs.paths import AUDIT
from pointsman_lab.runs.record import read_object

FORMATS = ("png", "svg", "pdf")
OURS = "pointsman report"
"""In the metadata of every figure."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#857600")
MARKERS = ("o", "s", "^", "D", "v", "x", "+", "P")
DASHES = ("-", "--", ":", "-.")
STYLE: dict[Any, Any] = {
    "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
    "axes.axisbelow": True, "legend.frameon": False, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "pointsman", "figure.dpi": 200.0,
}  # fmt: skip


def figures(path: Path | Sequence[Path], formats: Sequence[str] = ("png",), out: Path | None = None) -> list[Path]:
    """Writes the figures of a run or comparison directory: quality against k, loss, entropy by layer, expert loads.

    Args:
        formats: of png, svg, pdf.
        out: the page or its folder, as `write_report` takes it: the files go into `figures` beside the page.

    Returns:
        The files written; a figure without data is left out. The same data give the same bytes.

    Raises:
        RunError: a file in a figure's place that this function did not write, of an `out` that is given.
    """
    check_formats(formats)
    import matplotlib.style

    comparison = read(path)
    table = ComparisonTable.of(comparison)
    folder = within(page_path(out, comparison).parent, "figures")
    with matplotlib.style.context(["default", STYLE]):  # and no matplotlibrc, which the folder may bring
        made = drawn(comparison, table)
        files = {folder / f"{name}.{ending}": (name, ending) for name in made for ending in formats}
        for file in files if out is not None else ():
            refuse_foreign(file, OURS.encode(), "figure")
        return [_save(made[name], file, ending) for file, (name, ending) in files.items()]


def check_formats(formats: Sequence[str]) -> None:
    """Checks that figures of these formats can be drawn here."""
    for name in formats:
        if name not in FORMATS:
            raise RunError(f"figure format {name!r}: {did_you_mean(name, FORMATS)}")
    with needing("figures need matplotlib", "report"):
        import matplotlib  # noqa: F401


def drawn(comparison: Comparison, table: ComparisonTable) -> dict[str, Any]:
    """The matplotlib figures that have data, by name."""
    look = {router: index for index, router in enumerate(comparison.routers)}
    found: dict[str, Any] = {}
    if curves := series.quality(table):
        values = [point["y"] for curve in curves for point in curve["points"]]
        log = min(values) > 0 and max(values) / min(values) > 3
        found["quality"] = _lines(curves, look, "experts per token, k", table.metric.label, log=log, ks=table.top_k)
        if table.audit and len(comparison.runs) == 1 and (figure := _audit(comparison, curves, table)):
            found["audit"] = figure
    loss = series.loss(comparison, bits=table.metric.name.startswith("bits"))
    if loss["series"]:
        curves = [{"name": one["name"], "points": list(map(_point, one["points"]))} for one in loss["series"]]
        found["loss"] = _lines(curves, look, "step", str(loss["label"]), band=True)
    if entropies := entropy_by_layer(comparison):
        curves = [{"name": one["name"], "points": list(map(_point, one["points"]))} for one in entropies]
        names = [series.short_layer(name) for name in layer_names(comparison)]
        found["entropy-by-layer"] = _lines(curves, look, "", "entropy (nats)", names=names)
    rows = {key: rows_by_layer(run) for key, run in comparison.runs.items()}
    for router, index in look.items():
        if heat := load_heat(comparison, router, rows, series.last_step(comparison)):
            found[f"loads-{index}"] = _heat(heat)
    return found


def _plain(name: str) -> str:
    """A name in which matplotlib finds no formula."""
    return name.replace("$", r"\$")


def _point(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(("x", "y", "low", "high"), values, strict=False))


def _new(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def save_lines(path: Path, curves: Sequence[Mapping[str, Any]], x_label: str, y_label: str, **how: Any) -> Path:
    """Writes one figure of curves; the ending of the path says the format.

    Args:
        path: ending in one of `FORMATS`.
        curves: name and points, each with x, y and, for a bar, low and high; beside points with a bar, one without is
            hollow.
        how: log_x, with ticks at the points; ks or names for the ticks of x; zero: a line at y = 0.
    """
    ending = path.suffix.removeprefix(".")
    check_formats([ending])
    import matplotlib.style

    look = {curve["name"]: index for index, curve in enumerate(curves)}
    with matplotlib.style.context(["default", STYLE]):  # and no matplotlibrc, which the folder may bring
        return _save(_lines(curves, look, x_label, y_label, **how), path, ending)


def _lines(
    curves: Sequence[Mapping[str, Any]],
    look: Mapping[str, int],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    log_x: bool = False,
    zero: bool = False,
    band: bool = False,
    ks: Sequence[int] = (),
    names: Sequence[str] = (),
) -> Any:
    figure, (axes,) = _new(6.4, 3.2)
    for curve in curves:
        index, points = look[curve["name"]], curve["points"]
        x, y = [point["x"] for point in points], [point["y"] for point in points]
        low, high = [p.get("low", p["y"]) for p in points], [p.get("high", p["y"]) for p in points]
        style: dict[str, Any] = {
            "color": COLOURS[index % 8], "marker": MARKERS[index % 8], "linestyle": DASHES[index // 8 % 4],
            "markersize": 4, "linewidth": 1.3, "markevery": max(1, len(x) // 9), "label": _plain(curve["name"]),
        }  # fmt: skip
        axes.plot(x, y, **style)
        if len(ks) > 1 and len(x) == 1:  # a dense model has no k
            axes.axhline(y[0], color=style["color"], linestyle=(0, (4, 3)), linewidth=0.9, zorder=1)
        if band:
            axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)
        elif low != high:
            barred, bare = [p for p in points if "low" in p], [p for p in points if "low" not in p]
            spread = [[p["y"] - p["low"] for p in barred], [p["high"] - p["y"] for p in barred]]
            bars = {"fmt": "none", "ecolor": style["color"], "elinewidth": 0.9, "capsize": 2.5}
            axes.errorbar([p["x"] for p in barred], [p["y"] for p in barred], yerr=spread, **bars)
            if bare:
                hollow = style | {"linestyle": "none", "markerfacecolor": "white", "markevery": 1, "label": None}
                axes.plot([p["x"] for p in bare], [p["y"] for p in bare], **hollow, zorder=3)
    if ks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
    if log:
        axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log")
        xs = sorted({point["x"] for curve in curves for point in curve["points"]})
        axes.set_xticks(xs, _apart(xs))
        axes.minorticks_off()
    if zero:
        axes.axhline(0.0, color="#888888", linewidth=0.8, zorder=1)
    if names:
        axes.set_xticks(range(len(names)), [*map(_plain, names)])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def _apart(xs: Sequence[float]) -> list[str]:
    """Labels of ticks on a logarithmic axis; none where one would stand on the label before it."""
    labels, before = [], 0.0
    for x in xs:
        shown = not before or math.log(x / before) > 0.06 * math.log(xs[-1] / xs[0])
        labels.append(f"{x:g}" if shown else "")
        before = x if shown else before
    return labels


def _heat(heat: Mapping[str, Any]) -> Any:
    layers = heat["layers"]
    figure, all_axes = _new(2.1 * len(layers) + 0.8, 2.4, len(layers))
    image = None
    for axes, layer in zip(all_axes, layers, strict=True):
        load = np.frombuffer(base64.b64decode(layer["load"]), dtype=np.uint8).reshape(layer["experts"], -1) / 85
        steps = layer["steps"]
        half = (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2 or 0.5  # a column's middle is at its step
        image = axes.imshow(
            load, aspect="auto", cmap="cividis", vmin=0, vmax=3, interpolation="nearest",
            extent=(steps[0] - half, steps[-1] + half, layer["experts"] - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(visible=False)
        axes.set_title(_plain(layer["label"]), fontsize=8)
        axes.set_xlabel("step")
    all_axes[0].set_ylabel("expert")
    figure.suptitle(_plain(f"{heat['router']}, seed {heat['seed']}"), fontsize=9)
    figure.colorbar(image, ax=list(all_axes), label="load / even share", pad=0.01)
    return figure


def _audit(comparison: Comparison, curves: Sequence[Mapping[str, Any]], table: ComparisonTable) -> Any:
    """The load of every expert of an audited model at its own k, beside its quality at every k."""
    [run] = comparison.runs.values()
    results, own = run.results(), read_object(run.path / AUDIT).get("top_k")
    layers = results[own if own in results else max(results)].get("routers") or {}
    if not (layers := {name: layer for name, layer in layers.items() if layer.get("load")}):
        return None
    experts = max(len(layer["load"]) for layer in layers.values())
    load = np.full((len(layers), experts), np.nan)
    for row, layer in zip(load, layers.values(), strict=True):
        row[: len(layer["load"])] = np.array(layer["load"], dtype=float) * len(layer["load"])
    figure, (left, right) = _new(6.4, 2.4, 2)
    image = left.imshow(load, aspect="auto", cmap="cividis", vmin=0, vmax=3, interpolation="nearest")
    left.grid(visible=False)
    left.set_xlabel("expert")
    left.set_ylabel("layer")
    left.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=left, label="load / even share")
    for curve in curves:
        points = curve["points"]
        ks, ys = ([point[axis] for point in points] for axis in "xy")
        ends = [[abs(point.get(end, point["y"]) - point["y"]) for point in points] for end in ("low", "high")]
        right.errorbar(ks, ys, ends, color=COLOURS[0], marker=MARKERS[0], capsize=2)
        lack = max(3 * (max(ends[0]) + max(ends[1])), 0.02 * max(ys)) - (max(ys) - min(ys))
        if lack > 0:  # differences within the bars do not fill the height
            right.set_ylim(min(ys) - lack / 2, max(ys) + lack / 2)
        right.set_xscale("log", base=2)
        right.set_xticks(ks, [f"{k:g}" for k in ks])
    right.minorticks_off()
    right.set_xlabel("experts per token, k")
    right.set_ylabel(table.metric.label)
    return figure


def _save(figure: Any, path: Path, ending: str) -> Path:
    metadata = {
        "svg": {"Creator": OURS, "Date": None}, "pdf": {"Creator": OURS, "CreationDate": None},
        "png": {"Software": OURS},
    }[ending]  # fmt: skip
    with replacing(path) as aside:
        figure.savefig(aside, format=ending, metadata=metadata)
    return path
