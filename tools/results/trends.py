"""trends.md: pictures of a figure of several rows against a setting (length, learning rate, sigma).

`claims.toml` names the trends beside the claims. A gap is a row minus `base`, paired by seed within each grid:

    [[trends]]
    name = "length"                      # of the picture
    title = "Does the gap to smoe grow with training?"
    x = "steps"
    log = true                           # the axis of x
    measure = "quality"                  # and k, as in claims
    k = 1
    base = "smoe"                        # optional; without it the figures themselves are shown
    rows = ["hyperrouter", "xmoe"]
    grids = [[1600, "enwik8-tiny"], [6400, "enwik8-tiny-6400"]]
    note = "Equal tokens."               # optional: stands above the picture

Where x is a setting of the rows, `curves` names every point:

    [trends.curves]
    "with H" = [[1, "mixers", "smoe+attention"], [10, "mixers", "smoe+attention:sigma=10"]]
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import write_whole
from pointsman_lab._grid import wrapped
from pointsman_lab.report.cell import LEAST_SEEDS, Paired
from pointsman_lab.report.figures import save_lines
from pointsman_lab.report.forms import joined
from pointsman_lab.runs.comparison import Comparison
from tools.results.claims_file import CLAIMS, planned, read_toml
from tools.results.grids import read_grids
from tools.results.measures import AT_ONE_K, UNITS, Measure

X = float | str
FIELDS = ("name", "title", "x", "log", "measure", "k", "base", "note", "rows", "grids", "curves")
EXPLAINED = """
Made by `make results` from the records in `records/`; nothing here is typed by hand.

A gap is paired by seed: same data order, same initial weights outside the router. A bar is the 95 % interval of its
mean alone; a hollow mark is a mean of fewer than three seeds. No change along a curve is tested: three to five seeds
decide nothing once the many comparisons of the page are corrected for. This page had such tests up to commit c0af7e08:
63 of 70 changes were not significant.
"""


@dataclass(frozen=True)
class Trend:
    """One picture; the fields of claims.toml, see the module.

    Attributes:
        label: what is measured, with its unit.
        curves: name -> x -> its figures, one a seed.
    """

    name: str
    title: str
    x: str
    label: str
    curves: Mapping[str, Mapping[X, Sequence[float]]]
    log: bool = False
    base: str = ""
    note: str = ""

    def markdown(self) -> str:
        """Heading, what is shown, picture and seeds."""
        of = f"Gap to `{self.base}`, row minus `{self.base}`" if self.base else "Mean"
        shown = [f"![{self.title}](pictures/{self.name}.svg)", self._seeds()] if self.curves else ["Not run."]
        return joined(f"## {self.title}", f"{of}: {self.label}. {self.note}".strip(), *shown)

    def draw(self, folder: Path) -> None:
        """Writes the picture, FOLDER/NAME.svg, where anything has been run."""
        if not self.curves:
            return
        names = [str(x) for x in self._xs()] if any(isinstance(x, str) for x in self._xs()) else []
        places = {x: names.index(str(x)) if names else float(x) for x in self._xs()}
        drawn = {name: [_drawn(places[x], of) for x, of in points.items()] for name, points in self.curves.items()}
        curves = [{"name": name, "points": points} for name, points in drawn.items()]
        label = f"gap to {self.base}: {self.label}" if self.base else self.label
        file = folder / f"{self.name}.svg"
        save_lines(file, curves, self.x, label, log_x=self.log, names=names, zero=bool(self.base))

    def _seeds(self) -> str:
        """How many seeds the curves have at each x."""
        counts = {}
        for x in self._xs():
            of = [len(points[x]) for points in self.curves.values() if x in points]
            counts[x] = " to ".join(str(one) for one in sorted({min(of), max(of)}))
        if len(set(counts.values())) == 1:
            return f"Seeds: {next(iter(counts.values()))} at each point."
        return f"Seeds: {', '.join(f'{count} at {self.x} {_number(x)}' for x, count in counts.items())}."

    def _xs(self) -> list[X]:
        """The settings that have figures."""
        return list(dict.fromkeys(x for points in self.curves.values() for x in points))


def read_trends(folder: Path) -> list[Trend]:
    values = read_toml(folder / CLAIMS)
    known = values.get("grids", {})
    grids = read_grids(folder)[1]
    trends = enumerate(values.get("trends", []), 1)
    return [_trend(one, f"{folder / CLAIMS}, trend {number}", known, grids) for number, one in trends]


def write_trends(trends: Sequence[Trend], folder: Path) -> Path:
    for one in trends:
        one.draw(folder / "pictures")
    parts = ["# Trends", EXPLAINED.strip(), *(one.markdown().strip() for one in trends)]
    return write_whole(folder / "trends.md", wrapped(joined(*parts)))


def _trend(one: Mapping[str, Any], where: str, known: Mapping[str, Any], grids: Mapping[str, Comparison]) -> Trend:
    for key in one:
        if key not in FIELDS:
            raise RunError(f"{where}: unknown field {key!r}: {did_you_mean(key, FIELDS)}")
    if (name := one["measure"]) not in UNITS:
        raise RunError(f"{where}: unknown measure {name!r}: {did_you_mean(name, UNITS)}")
    measure, base = Measure(name, one.get("k", 0)), one.get("base", "")
    if name in AT_ONE_K and not measure.k:
        raise RunError(f"{where}: measure={name!r} needs a k")
    curves: dict[str, dict[X, Sequence[float]]] = {}
    for curve, points in planned(one).items():
        for x, grid, row in points:
            if grid not in known:
                raise RunError(f"{where}: unknown grid {grid!r}: {did_you_mean(grid, known)}")
            if figures := _figures(measure, grids.get(grid), row, base):
                curves.setdefault(curve, {})[x] = figures
    first = next((grids[grid] for points in planned(one).values() for _, grid, _ in points if grid in grids), None)
    label = f"{measure.text}, {measure.unit(first)}".removesuffix(", ")
    rest = {key: one[key] for key in ("log", "note") if key in one}
    return Trend(one["name"], one["title"], one["x"], label, curves, base=base, **rest)


def _figures(measure: Measure, grid: Comparison | None, row: str, base: str) -> list[float]:
    """One a seed: the row's, minus those of the base where there is one."""
    if grid is None:
        return []
    values = measure.of(grid, row)
    if not base:
        return list(values.values())
    theirs = measure.of(grid, base)
    return [values[seed] - theirs[seed] for seed in sorted(values.keys() & theirs.keys())]


def _drawn(x: float, figures: Sequence[float]) -> dict[str, float]:
    mean = statistics.fmean(figures)
    if len(figures) < LEAST_SEEDS:
        return {"x": x, "y": mean}
    half = Paired(figures).half or 0.0
    return {"x": x, "y": mean, "low": mean - half, "high": mean + half}


def _number(x: X) -> str:
    return x if isinstance(x, str) else f"{x:g}" if x < 1000 else f"{x:,.0f}"
