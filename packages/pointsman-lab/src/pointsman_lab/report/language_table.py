"""A table by language: routers x languages, with mean, transfer gap, floors, and standard errors over items."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pointsman._grid import NONE, Grid
from pointsman._values import finite, mean_of
from pointsman_lab.report.cell import Cell, Metric, metric
from pointsman_lab.report.forms import Forms
from pointsman_lab.runs.record import RunRecord

AT_FLOOR = "°"
Figure = Callable[[Mapping[str, Any]], Any]
"""What a column shows of a result."""


@dataclass(frozen=True)
class Line:
    """A router at one k: column -> figures over seeds."""

    router: str
    top_k: int
    cells: Mapping[str, Cell]

    @property
    def label(self) -> str:
        return f"{self.router} k={self.top_k}"


@dataclass(frozen=True)
class LanguageTable(Forms):
    """Figures by language.

    Attributes:
        name: of its files. metric: of the cells. note: the protocol in words.
        columns: languages, then "mean" and what else there is.
        lines: routers at every k.
        floors: column -> (name, figure) of the best prediction without a model. errors: column -> standard error over
            items, mean over runs.
    """

    name: str
    metric: Metric
    note: str
    columns: Sequence[str]
    lines: Sequence[Line]
    floors: Mapping[str, tuple[str, float]]
    errors: Mapping[str, float]

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
        columns: dict[str, Figure] = {language: _of_language(language) for language in languages}
        columns["mean"] = lambda result: result.get("value")
        extra = ("transfer", "gap", "nats_per_character")
        columns |= {key: _of(key) for key in extra if any(result.get(key) is not None for _, _, result in rows)}
        places = dict.fromkeys((run.router, k) for run, k, _ in rows)
        lines = [
            Line(router, k, {column: _cell(rows, router, k, figure) for column, figure in columns.items()})
            for router, k in places
        ]
        floors = {
            language: (str(found["floor_name"]), float(found["floor"]))
            for language in languages
            if "floor" in (found := first["languages"][language])
        }
        if floors:
            names = dict.fromkeys(name for name, _ in floors.values())
            floors["mean"] = (", ".join(names), statistics.fmean(value for _, value in floors.values()))
        errors = {}
        for column in (*languages, "mean"):
            found = [result["languages"].get(column, {}) if column in languages else result for _, _, result in rows]
            if (error := mean_of(one.get("error") for one in found)) is not None:
                errors[column] = error
        return cls(name, metric(str(first["metric"])), note, list(columns), lines, floors, errors)

    @property
    def file(self) -> str:
        return self.name

    def at_floor(self, line: Line, column: str) -> bool:
        """Whether a figure is not above its floor by two standard errors."""
        mean, floor = line.cells[column].mean, self.floors.get(column)
        return floor is not None and mean is not None and mean - floor[1] < 2 * self.errors.get(column, 0.0)

    def grid(self) -> Grid:
        """Routers x languages as text, then floors and errors."""
        rows = [[line.label, *(self._text(line, column) for column in self.columns)] for line in self.lines]
        scale, decimals = self.metric.scale, self.metric.decimals
        if self.floors:
            shown = {column: f"{scale * value:.{decimals}f}" for column, (_, value) in self.floors.items()}
            rows.append(["floor", *(shown.get(column, NONE) for column in self.columns)])
        if self.errors:
            shown = {column: f"{scale * value:.{decimals}f}" for column, value in self.errors.items()}
            rows.append(["standard error over items", *(shown.get(column, NONE) for column in self.columns)])
        return Grid(["router", *self.columns], rows, caption=self.caption)

    def difference_grid(self) -> Grid:
        """Paired differences to the first router at the same k."""
        first = self.lines[0].router
        base = {line.top_k: line for line in self.lines if line.router == first}
        rows = []
        for line in self.lines:
            if line.router == first:
                continue
            other = base.get(line.top_k) or next(iter(base.values()))  # a model without routers has one k
            minus = [line.cells[column].minus(other.cells[column]) for column in self.columns]
            shown = [self._shown(cell, column, sign=True) for cell, column in zip(minus, self.columns, strict=True)]
            rows.append([line.label, *shown])
        caption = f"Paired differences to {first}, seed by seed: mean ± sample standard deviation."
        return Grid(["router", *self.columns], rows, caption=caption)

    def _shown(self, cell: Cell, column: str, *, sign: bool = False) -> str:
        return cell.text(4, sign=sign) if column == "nats_per_character" else cell.shown(self.metric, sign=sign)

    def _text(self, line: Line, column: str) -> str:
        mark = f" {AT_FLOOR}" if self.at_floor(line, column) else ""
        return self._shown(line.cells[column], column) + mark

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
        return words

    @property
    def head(self) -> str:
        return f"{self.name}: {self.note}" if self.note else ""

    def shown_grids(self) -> list[Grid]:
        """The table, then the paired differences."""
        return [self.grid(), self.difference_grid()]

    def csv(self) -> str:
        """One line a router, k and column, in full precision."""
        rows = [
            [line.router, line.top_k, column, cell.mean, cell.std, len(cell.values),
             self.floors.get(column, (None, None))[1], self.errors.get(column)]
            for line in self.lines
            for column, cell in line.cells.items()
        ]  # fmt: skip
        header = ["router", "k", "language", "mean", "std", "seeds", "floor", "standard error over items"]
        return Grid(header, rows).csv()


def _of_language(language: str) -> Figure:
    return lambda result: result["languages"].get(language, {}).get("value")


def _of(key: str) -> Figure:
    return lambda result: result.get(key)


def _cell(rows: Sequence[tuple[RunRecord, int, Mapping[str, Any]]], router: str, k: int, figure: Figure) -> Cell:
    return Cell(
        {
            run.seed: value
            for run, own, result in rows
            if (run.router, own) == (router, k) and (value := finite(figure(result))) is not None
        }
    )
