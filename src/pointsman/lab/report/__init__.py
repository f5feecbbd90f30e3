"""Tables, plots and one self-contained HTML page for a run or a comparison."""

from __future__ import annotations

from pointsman.lab.report.attack_table import AttackTable, attack_tables
from pointsman.lab.report.figures import figures
from pointsman.lab.report.page import write_report
from pointsman.lab.report.paper import paper_tables
from pointsman.lab.report.results import load_comparison
from pointsman.lab.report.tables import ComparisonTable
from pointsman.lab.report.task_table import TaskTable

__all__ = [
    "AttackTable",
    "ComparisonTable",
    "TaskTable",
    "attack_tables",
    "collect_samples",
    "figures",
    "load_comparison",
    "paper_tables",
    "write_report",
]


def __getattr__(name: str) -> object:
    if name == "collect_samples":  # needs torch
        from pointsman.lab.report.samples import collect_samples

        return collect_samples
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
