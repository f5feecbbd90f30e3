"""Tables, plots and one self-contained HTML page for a run or a comparison."""

from pointsman_lab.report.figures import figures
from pointsman_lab.report.page import write_report
from pointsman_lab.report.paper import paper_tables
from pointsman_lab.report.results import load_comparison
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.report.task_table import TaskTable

__all__ = [
    "ComparisonTable", "TaskTable", "collect_samples", "figures", "load_comparison", "paper_tables", "write_report",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "collect_samples":  # needs torch
        from pointsman_lab.report.samples import collect_samples

        return collect_samples
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
