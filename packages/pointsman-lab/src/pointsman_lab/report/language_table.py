"""The table by language: routers at every k, mean, transfer gap, floors, standard errors, and what a token costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pointsman_lab._grid import NONE, Grid
from pointsman_lab._values import finite, mean_of
from pointsman_lab.report.cell import Cell, Metric, metric
from pointsman_lab.report.forms import Forms
from pointsman_lab.report.tables import COST, COSTS, COUNTED, CSV_COSTS, cost_cells, cost_of
from pointsman_lab.runs.record import RunRecord

AT_FLOOR = "°"
FURTHER = ("transfer", "gap", "nats_per_character")
"""Columns after the languages and their mean, where results have them."""

Line = tuple[str, int]
"""A router at one k."""


@dataclass(frozen=True)
class LanguageTable(Forms):
    """Figures of routers at every k by language.

    Attributes:
        name: of its files.
        columns: the languages, then "mean" and what else there is.
        lines: (router, k) -> column -> figures over seeds.
        metric: of the cells. note: the protocol in words.
        floors: column -> (name, figure) of the best prediction without a model.
        errors: column -> standard error over items, mean over runs.
        costs: router -> what a token costs at the first k of training, where that is recorded.
        dense: rows without routers, whose one k stands for every other.
    """

    name: str
    columns: Sequence[str]
    lines: Mapping[Line, Mapping[str, Cell]]
    metric: Metric
    note: str
    floors: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()

    @classmethod
    def of(cls, runs: Sequence[RunRecord], name: str, note: str = "", split: str = "test") -> LanguageTable | None:
        """The table of evaluated runs whose results have "languages"; None where there is none.

        The mean is that over all languages, English included, as in XTREME; of a masked language model the perplexity
        of the pooled nats.
        """
        rows = [
            (run, k, result)
            for run in runs
            for k, result in sorted(run.results(split).items())
            if isinstance(result.get("languages"), dict) and result["languages"]
        ]
        if not rows:
            return None
        _, _, first = rows[0]
        languages = list(first["languages"])
        further = [key for key in FURTHER if any(result.get(key) is not None for _, _, result in rows)]
        columns = list(dict.fromkeys([*languages, "mean", *further]))
        values: dict[Line, dict[str, dict[int, float]]] = {}
        for run, k, result in rows:
            cells = values.setdefault((run.router, k), {column: {} for column in columns})
            figures = {language: of.get("value") for language, of in result["languages"].items()}
            figures |= {"mean": result.get("value"), **{key: result.get(key) for key in FURTHER}}
            for column in columns:
                if (value := finite(figures.get(column))) is not None:
                    cells[column][run.seed] = value
        lines = {line: {column: Cell(seeds) for column, seeds in cells.items()} for line, cells in values.items()}
        known = {language: of for language, of in first["languages"].items() if finite(of.get("floor")) is not None}
        floors = {language: (str(of.get("floor_name", "")), float(of["floor"])) for language, of in known.items()}
        if floors:
            names = dict.fromkeys(name for name, _ in floors.values())
            floors["mean"] = (", ".join(names), statistics.fmean(value for _, value in floors.values()))
        errors = {}
        for column in (*languages, "mean"):
            found = [result["languages"].get(column, {}) if column in languages else result for _, _, result in rows]
            if (error := mean_of(one.get("error") for one in found)) is not None:
                errors[column] = error
        routers = dict.fromkeys(run.router for run, _, _ in rows)
        costs = {router: cost_of(run for run, _, _ in rows if run.router == router) for router in routers}
        costs = costs if any(costs.values()) else {}
        dense = frozenset(routers) - {run.router for run, _, result in rows if result.get("routers")}
        measure = metric(str(first.get("metric", "loss")))
        return cls(name, columns, lines, measure, note, floors, errors, costs, dense)

    def at_floor(self, line: Line, column: str) -> bool:
        """Whether a figure is not above its floor by two standard errors."""
        mean, floor = self.lines[line][column].mean, self.floors.get(column)
        return floor is not None and mean is not None and mean - floor[1] <= 2 * self.errors.get(column, 0.0)

    def shown(self, cell: Cell, column: str, *, sign: bool = False) -> str:
        return cell.text(4, sign=sign) if column == "nats_per_character" else cell.shown(self.metric, sign=sign)

    def grid(self) -> Grid:
        """Routers x languages as text, then floors and errors."""
        rows = []
        for (router, k), cells in self.lines.items():
            marks = [f" {AT_FLOOR}" if self.at_floor((router, k), column) else "" for column in self.columns]
            shown = [self.shown(cells[of], of) + mark for of, mark in zip(self.columns, marks, strict=True)]
            rows.append([f"{router} k={k}", *shown, *(cost_cells(self.costs[router]) if self.costs else ())])
        costs = COSTS if self.costs else ()
        floors = {column: value for column, (_, value) in self.floors.items()}
        for title, found in (("floor", floors), ("standard error over items", self.errors)):
            if found:
                figures = {column: f"{self.metric.scale * v:.{self.metric.decimals}f}" for column, v in found.items()}
                rows.append([title, *(figures.get(column, NONE) for column in (*self.columns, *costs))])
        return Grid(["router", *self.columns, *costs], rows, caption=self.caption)

    def difference_grid(self) -> Grid:
        """Paired differences to the first router at the same k."""
        first = next(iter(self.lines))[0]
        base = {k: cells for (router, k), cells in self.lines.items() if router == first}
        only = next(iter(base.values())) if len(base) == 1 and first in self.dense else None
        rows = []
        for (router, k), cells in self.lines.items():
            other = base.get(k, only)
            if router != first and other is not None:
                minus = {column: cells[column].minus(other[column]) for column in self.columns}
                shown = [self.shown(cell, column, sign=True) for column, cell in minus.items()]
                rows.append([f"{router} k={k}", *shown])
        caption = f"Paired differences to {first}, seed by seed: mean ± sample standard deviation."
        return Grid(["router", *self.columns], rows, caption=caption)

    def shown_grids(self) -> list[Grid]:
        """The figures, then the paired differences."""
        return [self.grid(), self.difference_grid()]

    @property
    def caption(self) -> str:
        words = (
            f"{self.metric.label} by language ({self.metric.direction}); mean ± sample standard deviation over seeds."
        )
        if "transfer" in self.columns:
            words += " mean: all languages; transfer: all but English; gap: English minus transfer."
        if self.floors:
            names = "; ".join(f"{column} {name}" for column, (name, _) in self.floors.items() if column != "mean")
            words += (
                f" {AT_FLOOR}: not above its floor by two standard errors over items. Floors, predictions without a "
                f"model: {names}."
            )
        if self.costs:
            words += f" {COUNTED}."
        return words

    @property
    def head(self) -> str:
        return f"{self.name}: {self.note}" if self.note else ""

    def csv(self) -> str:
        """One line a router, k and language, in full precision."""
        rows: list[list[Any]] = []
        for (router, k), cells in self.lines.items():
            cost = [self.costs[router].get(name) for name in COST] if self.costs else []
            for column, cell in cells.items():
                _, floor = self.floors.get(column, (None, None))
                line = [router, k, column, cell.mean, cell.std, len(cell.values), floor, self.errors.get(column)]
                rows.append([*line, *cost])
        header = ["router", "k", "language", "mean", "std", "seeds", "floor", "standard error over items"]
        return Grid([*header, *(CSV_COSTS if self.costs else ())], rows).csv()
