"""XTREME's total table: routers x tasks, last the average over the seven tasks (Hu et al. 2020; X-MoE, Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pointsman._grid import Grid
from pointsman._values import finite
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.cells import average
from pointsman_lab.report.forms import Forms
from pointsman_lab.report.task_table import finetunings, variants
from pointsman_lab.runs.comparison import Comparison

COLUMNS: Mapping[str, tuple[str, str]] = {
    "POS F1": ("udpos", "f1_xtreme"),
    "NER F1": ("panx", "value"),
    "XQuAD F1": ("xquad", "value"),
    "XQuAD EM": ("xquad", "exact_match"),
    "MLQA F1": ("mlqa", "value"),
    "MLQA EM": ("mlqa", "exact_match"),
    "TyDiQA F1": ("tydiqa", "value"),
    "TyDiQA EM": ("tydiqa", "exact_match"),
    "XNLI": ("xnli", "value"),
    "PAWS-X": ("pawsx", "value"),
}
"""Column -> its task and the entry of a result that it shows, in the order of X-MoE's Table 1."""

AVERAGE = "average"
TASKS = tuple(dict.fromkeys(task for task, _ in COLUMNS.values()))


@dataclass(frozen=True)
class XtremeTable(Forms):
    """All tasks of fine-tunings with the same settings.

    Attributes:
        settings: what follows the task in the folders' names: "" or ",freeze=router+experts".
        lines: (router, k) -> column -> figures over seeds, as shares.
    """

    settings: str
    lines: Mapping[tuple[str, int], Mapping[str, Cell]]

    @classmethod
    def all(cls, comparison: Comparison) -> list[XtremeTable]:
        """One table for each choice of settings with which two tasks or more have been fine-tuned on."""
        found: dict[str, list[str]] = {}
        for variant in variants(comparison):
            task, comma, rest = variant.partition(",")
            if task in TASKS:
                found.setdefault(comma + rest, []).append(task)
        made = [cls.of(comparison, settings) for settings, tasks in found.items() if len(tasks) > 1]
        return [one for one in made if one.lines]

    @classmethod
    def of(cls, comparison: Comparison, settings: str = "") -> XtremeTable:
        """The table of the finished fine-tunings with these settings."""
        values: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
        for task in TASKS:
            shown = {column: entry for column, (own, entry) in COLUMNS.items() if own == task}
            for run in finetunings(comparison, task + settings):
                for k, result in run.results().items():
                    cells = values.setdefault((run.router, k), {})
                    for column, entry in shown.items():
                        if (value := finite(result.get(entry))) is not None:
                            cells.setdefault(column, {})[run.seed] = value
        order = {router: place for place, router in enumerate(comparison.routers)}
        lines = {}
        for key in sorted(values, key=lambda key: (order.get(key[0], len(order)), key[1])):
            cells = values[key]
            seeds = {seed for of in cells.values() for seed in of}
            means = {
                seed: mean
                for seed in sorted(seeds)
                if (mean := average([(t, cells.get(c, {}).get(seed)) for c, (t, _) in COLUMNS.items()])) is not None
            }
            lines[key] = {column: Cell(cells.get(column, {})) for column in COLUMNS} | {AVERAGE: Cell(means)}
        return cls(settings, lines)

    @property
    def file(self) -> str:
        return f"xtreme{self.settings}"

    @property
    def caption(self) -> str:
        """What the columns are."""
        return (
            "XTREME's tasks (%, higher is better): mean over languages, then mean ± sample standard deviation over "
            "seeds. POS F1 is f1_xtreme. average: over the seven tasks, a question task counts (F1 + EM) / 2; only "
            "of seeds that have all."
        )

    def grid(self) -> Grid:
        """Routers at every k x tasks."""
        rows = [
            [f"{router} k={k}", *(cell.text(1, 100.0) for cell in cells.values())]
            for (router, k), cells in self.lines.items()
        ]
        return Grid(["router", *COLUMNS, AVERAGE], rows, caption=self.caption)

    def difference_grid(self) -> Grid:
        """Paired differences to the first router at the same k."""
        first = next(iter(self.lines))[0]
        base = {k: cells for (router, k), cells in self.lines.items() if router == first}
        rows = []
        for (router, k), cells in self.lines.items():
            other = base.get(k) or next(iter(base.values()))  # a model without routers has one k
            if router != first:
                minus = [cell.minus(other[column]) for column, cell in cells.items()]
                rows.append([f"{router} k={k}", *(cell.text(1, 100.0, sign=True) for cell in minus)])
        caption = f"Paired differences to {first}, seed by seed: mean ± sample standard deviation."
        return Grid(["router", *COLUMNS, AVERAGE], rows, caption=caption)

    @property
    def head(self) -> str:
        return self.file

    def shown_grids(self) -> list[Grid]:
        """The table, then the paired differences."""
        return [self.grid(), self.difference_grid()]

    def csv(self) -> str:
        """One line a router, k and column, as shares in full precision."""
        rows: list[list[Any]] = [
            [router, k, column, cell.mean, cell.std, len(cell.values)]
            for (router, k), cells in self.lines.items()
            for column, cell in cells.items()
        ]
        return Grid(["router", "k", "column", "mean", "std", "seeds"], rows).csv()
