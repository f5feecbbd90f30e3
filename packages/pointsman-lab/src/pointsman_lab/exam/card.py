"""The report card: the table in four forms and on a terminal, and one page with a heat map whose cells open."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import write_whole
from pointsman_lab._grid import NONE, Grid
from pointsman_lab._values import printable
from pointsman_lab.exam.scores import TASKS, Cells, mean_of_runs, regret, scores, values
from pointsman_lab.exam.student import ROWS
from pointsman_lab.report.cell import LEAST_SEEDS, Paired
from pointsman_lab.report.forms import Forms, check_jinja, fill

COLUMNS = ("task", "router", "seed", "value", "score", "regret", "ami", "experts_used", "experts_per_token", "rate",
           "tuned")  # fmt: skip
LEVELS = (0.2, 0.4, 0.6, 0.8, 0.95)
"""Scores at which the colour changes."""
SHADES = ("red", "dark_orange", "yellow", "green_yellow", "green", "bold green")
CELL = 11  # columns of a terminal, the longest plain name


class Card(Forms):
    """What an exam has found."""

    file = "exam"

    def __init__(self, tasks: Sequence[str], cells: Cells, rows: Sequence[str]) -> None:
        self.tasks, self.cells = tasks, cells
        self.rows = [row for row in rows if any((task, row) in cells for task in tasks)]

    def score(self, task: str, row: str) -> float | None:
        found = scores(self.cells, task, row)
        return statistics.fmean(found.values()) if found else None

    def text_of(self, task: str, row: str) -> str:
        """Mean score, and half of its interval from three seeds on; or why there is none."""
        if "refused" in self.cells.get((task, row), {}):
            return "refused"
        found = list(scores(self.cells, task, row).values())
        if not found:
            lost = sum(run["value"] is None for run in self.cells.get((task, row), {}).get("runs", {}).values())
            return f"{lost} diverged" if lost else NONE
        half = Paired(found).half
        told = f"{statistics.fmean(found):.2f}"
        return f"{told} ± {half:.2f}" if half is not None and len(found) >= LEAST_SEEDS else told

    def shown_grids(self) -> Sequence[Grid]:
        counts = {row: min(filter(None, (len(scores(self.cells, task, row)) for task in self.tasks)), default=0)
                  for row in self.rows}  # fmt: skip
        most = max(counts.values(), default=0)
        few = [f"{row} ({count} seeds)" for row, count in counts.items() if 0 < count < most]
        caption = "Score: (plain - row) / (plain - oracle), mean over seeds ± half of its 95 % interval." + (
            f" Of fewer than {most} seeds: {', '.join(few)}." if few else ""
        )
        rows = [[row, *(self.text_of(task, row) for task in self.tasks)] for row in self.rows]
        return [Grid(["router", *self.tasks], rows, caption=caption)]

    def csv(self) -> str:
        lines = []
        for task in self.tasks:
            for row in self.rows:
                cell = self.cells.get((task, row), {})
                found, above = scores(self.cells, task, row), regret(self.cells, task, row)
                choice = cell.get("chosen", {})
                for seed, value in values(self.cells, task, row).items():
                    figures = map(cell["runs"][str(seed)].get, ("ami", "used", "cost"))
                    told = [task, row, seed, value, found.get(seed), above.get(seed), *figures]
                    lines.append([*told, choice.get("rate"), choice.get("spec")])
        return Grid(COLUMNS, lines).csv()

    def print(self) -> None:
        """The table on a terminal, tasks by routers, in blocks that fit its width."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        first = max(map(len, self.tasks), default=0) + 2
        wide = max(1, (console.width - first - 2) // (CELL + 2))
        shown = [row for row in self.rows if row not in ("oracle", "plain")]
        for start in range(0, len(shown), wide):
            block = shown[start : start + wide]
            view = Table(box=None, padding=(0, 1), title=None if start else "score: 0 = one expert, 1 = the oracle")
            view.add_column("task", no_wrap=True)
            for row in block:
                view.add_column(Text(printable("\n".join(wrap(row, CELL)))), justify="right", width=CELL)
            for task in self.tasks:
                line = [(self.score(task, row), self.text_of(task, row).partition(" ±")[0]) for row in block]
                cells = [Text(text, "dim" if one is None else SHADES[level(one)]) for one, text in line]
                view.add_row(task, *cells)
            console.print(view)

    def details(self) -> list[dict[str, Any]]:
        """What a cell of the heat map opens, row by row."""
        return [
            {"row": row, "cells": [self._detail(f"c{i}-{j}", task, row) for j, task in enumerate(self.tasks)]}
            for i, row in enumerate(self.rows)
        ]

    def _detail(self, name: str, task: str, row: str) -> dict[str, Any]:
        cell = self.cells.get((task, row), {})
        runs = cell.get("runs", {})
        score = self.score(task, row)
        found, above = scores(self.cells, task, row), regret(self.cells, task, row)
        seeds = [
            [str(seed), *(_number(one) for one in (value, found.get(seed), above.get(seed)))]
            + [_number(runs[str(seed)].get(key)) for key in ("ami", "used", "cost")]
            for seed, value in values(self.cells, task, row).items()
        ]
        first: Mapping[str, Any] = next((run for run in runs.values() if "curve" in run), {})
        return {
            "id": name, "task": task, "row": row, "text": self.text_of(task, row), "seeds": seeds,
            "level": None if score is None else level(score), "refused": cell.get("refused"),
            "chosen": cell.get("chosen"), "curve": polyline(first.get("curve", [])),
            "confusion": shades(first.get("confusion", [])),
            "ami": _number(mean_of_runs(self.cells, task, row, "ami")),
            "diverged": sum(run["value"] is None for run in runs.values()),
        }  # fmt: skip


def level(score: float) -> int:
    """Which of six colours."""
    return sum(score >= one for one in LEVELS)


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def polyline(curve: Sequence[Sequence[float | None]]) -> Mapping[str, str]:
    """Points of an SVG polyline of [[step, value], ...], the values from 0 to the largest; empty without a curve."""
    known = [(at[0], at[1]) for at in curve if len(at) == 2 and at[0] is not None and at[1] is not None]
    if not known:
        return {}
    width, height = 240, 90
    last, top = max(known[-1][0], 1e-9), max(*(value for _, value in known), 1e-9)
    points = " ".join(f"{step / last * width:.1f},{height - max(value, 0) / top * height:.1f}" for step, value in known)
    return {"points": points, "top": f"{top:.3g}", "steps": f"{last:g}"}


def shades(confusion: Sequence[Sequence[int]]) -> list[list[tuple[int, str]]]:
    """Share of each cluster (row) at each expert (column): how dark, 0 to 100, and in words."""
    return [
        [(round(100 * one / max(sum(row), 1)), f"cluster {i}, {'no expert' if j == len(row) - 1 else f'expert {j}'}: "
          f"{one / max(sum(row), 1):.0%}") for j, one in enumerate(row)]
        for i, row in enumerate(confusion)
    ]  # fmt: skip


def write_card(card: Card, out: Path) -> Path:
    """Writes exam.txt, .csv, .md and .tex, and report.html; returns the page."""
    card.write(out)
    pages = [TASKS[task] for task in card.tasks]
    caption = card.shown_grids()[0].caption
    page = fill("exam.html.j2", tasks=pages, rows=card.details(), fixed=ROWS, caption=caption, levels=LEVELS)
    return write_whole(out / "report.html", page)


def told_card(card: Card, out: Path) -> str:
    """`write_card`, and "page: …" for the user; where jinja2 is not installed, the tables alone and "no page: …"."""
    try:
        check_jinja()
    except RunError as missing:
        card.write(out)
        return f"no page: {missing}"
    return f"page: {write_card(card, out)}"
