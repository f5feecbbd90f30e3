"""XTREME's total table: routers x tasks, last the average over the seven tasks (Hu et al. 2020; X-MoE, Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pointsman._values import finite
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.cells import average
from pointsman_lab.report.language_table import LineTable
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
class XtremeTable(LineTable):
    """All tasks of fine-tunings with the same settings."""

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
        """The table of the finished fine-tunings with these settings.

        Args:
            settings: what follows the task in the folders' names: "" or ",freeze=router+experts".
        """
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
        return cls(f"xtreme{settings}", [*COLUMNS, AVERAGE], lines)

    @property
    def caption(self) -> str:
        return (
            "XTREME's tasks (%, higher is better): mean over languages, then mean ± sample standard deviation over "
            "seeds. POS F1 is f1_xtreme. average: over the seven tasks, a question task counts (F1 + EM) / 2; only "
            "of seeds that have all."
        )

    def shown(self, cell: Cell, column: str, *, sign: bool = False) -> str:
        return cell.text(1, 100.0, sign=sign)
