"""Tables, plots and one self-contained HTML page for a run or a comparison."""

from pointsman.report.page import write_report
from pointsman.report.tables import ComparisonTable

__all__ = ["ComparisonTable", "write_report"]
