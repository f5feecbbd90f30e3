"""trends.md: a figure of several rows against a setting (length, learning rate, sigma) or against another figure.

`claims.toml` names the trends beside the claims. A gap is a row minus `base`, paired by seed within each grid:

    [[trends]]
    name = "length"                      # of the picture
    title = "Does the gap to smoe grow with training?"
    x = "steps"
    log = true                           # the axis of x
    measure = "quality"                  # as in claims; k, attack, rate, task likewise
    k = 1
    base = "smoe"                        # optional; without it the figures themselves are shown
    rows = ["hyperrouter", "xmoe"]
    grids = [[1600, "enwik8-tiny"], [6400, "enwik8-tiny-6400"]]

Where x is a setting of the rows, `curves` names every point:

    [trends.curves]
    "with H" = [[1, "mixers", "smoe+attention"], [10, "mixers", "smoe+attention:sigma=10"]]

`against = "entropy"` in place of x shows each row of the grids as one point: that measure and this.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import write_whole
from pointsman_lab._grid import NONE, Grid
from pointsman_lab.intervals import LEVEL
from pointsman_lab.report.cell import LEAST_SEEDS, Paired
from pointsman_lab.report.figures import save_lines
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.paths import COMPARISON
from tools.results.claims_file import CLAIMS, planned, read_toml
from tools.results.measures import UNITS, Measure

X = float | str


@dataclass(frozen=True)
class Point:
    """One row of one grid that has been run."""

    x: X
    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())


@dataclass(frozen=True)
class Trend:
    """One picture and its table; the fields of claims.toml, see the module."""

    name: str
    title: str
    measure: Measure
    x: str = ""
    log: bool = False
    base: str = ""
    against: str = ""
    note: str = ""
    planned: Mapping[str, Sequence[tuple[X, str, str]]] = field(default_factory=dict)
    grids: Mapping[str, Comparison] = field(default_factory=dict)

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """name -> its points that have figures, in the order of claims.toml."""
        found = {}
        for name, points in self.planned.items():
            made = [Point(self._x(x, grid, row), self._values(grid, row)) for x, grid, row in points]
            found[name] = [point for point in made if point.values and point.x != NONE]
        return {name: points for name, points in found.items() if points}

    @cached_property
    def ends(self) -> dict[str, tuple[Point, Point]]:
        """Curve -> its first point, and the last that has three seeds in common with it; curves that have both."""
        found = {}
        for name, (first, *later) in self.curves.items():
            if shared := [point for point in later if len(first.values.keys() & point.values) >= LEAST_SEEDS]:
                found[name] = first, shared[-1]
        return found

    def changes(self) -> dict[str, Paired]:
        """Curve -> the last point of `ends` minus the first, over the seeds that both have."""
        return {
            name: Paired([last.values[seed] - first.values[seed] for seed in sorted(first.values.keys() & last.values)])
            for name, (first, last) in self.ends.items()
        }

    def verdict(self, name: str, comparisons: int) -> str:
        """Between the `ends`: grows, shrinks or turns (rises, falls), or not significant."""
        if name not in self.ends:
            return NONE
        ends = self.ends[name]
        change = Paired(self.changes()[name].values, comparisons)
        until = "" if ends[1] is self.curves[name][-1] else f" until {self.x} {_number(ends[1].x)}"
        if not change.sign:
            return f"not significant{until} ({change.text()})"
        shared = ends[0].values.keys() & ends[1].values
        first, last = (statistics.fmean(end.values[seed] for seed in shared) for end in ends)
        words = ("rises", "falls") if change.sign > 0 else ("falls", "rises")
        if self.base:
            words = ("grows", "shrinks") if abs(last) > abs(first) else ("shrinks", "grows")
            words = ("turns", "turns") if first * last < 0 else words
        return f"**{words[0]}**{until} ({change.text()})"

    def markdown(self, comparisons: int, pictures: str) -> str:
        """Heading, picture and table."""
        what = f"{self.measure.text}, {self._unit()}".removesuffix(", ")
        of = f"Gap to `{self.base}`, row minus `{self.base}`" if self.base else "Mean"
        lines = [f"## {self.title}", "", f"{of}: {what}. {self.note}".strip(), ""]
        if not self.curves:
            return "\n".join([*lines, "Not run.", ""])
        lines += [f"![{self.title}]({pictures}/{self.name}.svg)", "", self._table(comparisons).markdown(), ""]
        return "\n".join(lines)

    def draw(self, folder: Path, look: Mapping[str, int] | None = None) -> Path | None:
        """Writes the picture, FOLDER/NAME.svg; None where nothing has been run; `look` as in `save_lines`."""
        if not self.curves:
            return None
        xs = self._xs()
        names = [str(x) for x in xs] if any(isinstance(x, str) for x in xs) and not self.against else []
        curves = [
            {"name": name, "points": [self._drawn(point, xs if names else []) for point in points]}
            for name, points in self.curves.items()
        ]
        label = f"{self.measure.text}, {self._unit()}".removesuffix(", ")
        label = f"gap to {self.base}: {label}" if self.base else label
        axis = f"{self.against}, {UNITS[self.against]}" if self.against else self.x
        file = folder / f"{self.name}.svg"
        return save_lines(file, curves, axis, label, log_x=self.log, names=names, zero=bool(self.base), look=look)

    def _table(self, comparisons: int) -> Grid:
        if self.against:
            rows = [
                [name, f"{point.x:.3f}", f"{point.mean:.3f}", str(len(point.values))]
                for name, (point, *_) in self.curves.items()
            ]
            return Grid(("row", self.against, self.measure.text, "seeds"), rows, labels=1)
        found = {point.x for points in self.curves.values() for point in points}
        xs = [x for x in self._xs() if x in found]
        rows = []
        for name, points in self.curves.items():
            by_x = {point.x: list(point.values.values()) for point in points}
            cells = [self._cell(by_x.get(x, []), comparisons) for x in xs]
            rows.append([name, *cells, *([self.verdict(name, comparisons)] if len(xs) > 1 else [])])
        last = ["first to last"] if len(xs) > 1 else []
        return Grid(("row", *(f"{self.x} {_number(x)}" for x in xs), *last), rows, labels=1)

    def _xs(self) -> list[X]:
        """All settings, in the order of claims.toml."""
        return list(dict.fromkeys(x for points in self.planned.values() for x, _, _ in points))

    def _cell(self, values: Sequence[float], comparisons: int) -> str:
        if not values:
            return NONE
        if self.base:
            return f"{Paired(values, comparisons).text()}, {len(values)} seeds".replace(" 1 seeds", " 1 seed")
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3f}{spread}"

    def _drawn(self, point: Point, names: Sequence[X]) -> dict[str, float]:
        at = {"x": float(names.index(point.x)) if names else float(point.x), "y": point.mean}
        if len(point.values) < LEAST_SEEDS:
            return at
        half = Paired(list(point.values.values())).half or 0.0
        return at | {"low": point.mean - half, "high": point.mean + half}

    def _x(self, x: X, grid: str, row: str) -> X:
        if not self.against:
            return x
        values = Measure(self.against).of(self.grids[grid], row) if grid in self.grids else {}
        return statistics.fmean(values.values()) if values else NONE

    def _values(self, grid: str, row: str) -> dict[int, float]:
        if grid not in self.grids:
            return {}
        values = self.measure.of(self.grids[grid], row)
        if not self.base:
            return values
        base = self.measure.of(self.grids[grid], self.base)
        return {seed: values[seed] - base[seed] for seed in sorted(values.keys() & base.keys())}

    def _unit(self) -> str:
        return self.measure.unit(next(iter(self.grids.values()), None))


@dataclass(frozen=True)
class Trends:
    """All trends of a folder of grids."""

    trends: Sequence[Trend]

    @classmethod
    def read(cls, folder: Path) -> Trends:
        """The trends of `folder`/claims.toml."""
        values = read_toml(folder / CLAIMS)
        known = values.get("grids", {})
        grids = {name: read_comparison(folder / name) for name in known if (folder / name / COMPARISON).is_file()}
        named = enumerate(values.get("trends", []), 1)
        return cls([_trend(one, f"{folder / CLAIMS}, trend {number}", known, grids) for number, one in named])

    @property
    def comparisons(self) -> int:
        """Intervals on the page: gaps of at least three seeds, and changes."""
        gaps = [
            point for one in self.trends if one.base for points in one.curves.values() for point in points
            if len(point.values) >= LEAST_SEEDS
        ]  # fmt: skip
        return max(1, len(gaps) + sum(len(one.changes()) for one in self.trends if not one.against))

    def write(self, folder: Path) -> Path:
        """Writes trends.md and the pictures beside it."""
        lines = [
            "# Trends",
            "",
            "Made by `make results` from the records in `records/`; nothing here is typed by hand.",
            "",
            "A gap is paired by seed: same data order, same initial weights outside the router. Gaps: mean ± half of",
            f"the interval, corrected for the {self.comparisons} comparisons of this page (Bonferroni, Student's t);",
            f"in brackets half of the {LEVEL:.0%} interval, which the bars of the pictures show (a hollow mark: fewer",
            "than three seeds). Other figures: mean ± sample standard deviation over seeds. Last column: the last",
            "point of three seeds or more minus the first, paired by seed.",
            "",
        ]
        lines += [one.markdown(self.comparisons, "pictures") for one in self.trends]
        look = self._look()
        for one in self.trends:
            one.draw(folder / "pictures", look)
        return write_whole(folder / "trends.md", "\n".join(lines))

    def _look(self) -> dict[str, int]:
        """Curve -> colour: the same in all pictures, another than that of the curves beside it."""
        look: dict[str, int] = {}
        for name in dict.fromkeys(name for one in self.trends for name in one.curves):
            beside = {look.get(other) for one in self.trends if name in one.curves for other in one.curves}
            look[name] = next(place for place in range(len(beside) + 1) if place not in beside)
        return look


def _trend(one: Mapping[str, Any], where: str, known: Mapping[str, Any], grids: Mapping[str, Comparison]) -> Trend:
    fields = {"name", "title", "x", "log", "measure", "k", "attack", "rate", "task", "base", "against", "note", "rows",
              "grids", "curves"}  # fmt: skip
    for key in one:
        if key not in fields:
            raise RunError(f"{where}: unknown field {key!r}: {did_you_mean(key, fields)}")
    for key in ("measure", "against"):
        if (name := one.get(key, "quality")) not in UNITS:
            raise RunError(f"{where}: unknown measure {name!r}: {did_you_mean(name, UNITS)}")
    points = planned(one)
    for grid in (grid for curve in points.values() for _, grid, _ in curve):
        if grid not in known:
            raise RunError(f"{where}: unknown grid {grid!r}: {did_you_mean(grid, known)}")
    measure = Measure(**{"name" if key == "measure" else key: one[key] for key in MEASURED if key in one})
    rest = {key: one[key] for key in ("x", "log", "base", "against", "note") if key in one}
    return Trend(one["name"], one["title"], measure, **rest, planned=points, grids=grids)


MEASURED = ("measure", "k", "attack", "rate", "task")


def _number(x: X) -> str:
    return x if isinstance(x, str) else f"{x:g}" if x < 1000 else f"{x:,.0f}"
