"""Paired differences of a comparison with corrected confidence intervals, in all four forms."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman._grid import Grid
from pointsman_lab.report.forms import Forms, joined
from pointsman_lab.report.intervals import LEAST_SEEDS, LEVEL, Paired
from pointsman_lab.report.tables import ComparisonTable


@dataclass(frozen=True)
class Differences(Forms):
    """Every row minus the baseline, at every k: mean ± half of the interval, corrected for all cells of the table."""

    table: ComparisonTable

    @property
    def file(self) -> str:
        return "differences"

    @property
    def comparisons(self) -> int:
        """What intervals are corrected for: the differences that have one, of at least three seeds; 1 without any."""
        return max(1, self._intervals)

    @property
    def caption(self) -> str:
        metric = self.table.metric
        what = f"Paired differences to {self.table.baseline} in {metric.label} ({metric.direction}): mean"
        if not self._intervals:
            return f"{what}. None has three seeds, so none has an interval."
        return (
            f"{what} ± half of the {LEVEL:.0%} confidence interval (Student's t), corrected for the {self.comparisons} "
            "intervals of this table (Bonferroni); in brackets not corrected; none below three seeds. Bold: the "
            "interval excludes 0."
        )

    @property
    def _intervals(self) -> int:
        cells = [cell for of in self.table.differences().values() for cell in of.values()]
        return sum(len(cell.values) >= LEAST_SEEDS for cell in cells)

    def grid(self) -> Grid:
        """The differences as text."""
        metric, rows, told = self.table.metric, [], set()
        for i, (router, of) in enumerate(self.table.differences().items()):
            cells = []
            for j, cell in enumerate(of.values(), 1):
                paired = Paired([value * metric.scale for value in cell.values.values()], self.comparisons)
                cells.append(paired.text(metric.decimals))
                told |= {(i, j)} if paired.sign and len(paired.values) >= LEAST_SEEDS else set()
            rows.append([router, *cells])
        return Grid(["router", *self.table.titles], rows, told, self.caption)

    def shown_grids(self) -> list[Grid]:
        return [self.grid()]

    def csv(self) -> str:
        """One line a router and k, full precision."""
        header = ["router", "baseline", "k", "seeds", "metric", "mean", "std", "half", "corrected half"]
        rows = []
        for router, of in self.table.differences().items():
            for k, cell in of.items():
                paired = Paired(list(cell.values.values()), self.comparisons)
                figures = [paired.mean, cell.std, paired.half_of(1), paired.half]
                rows.append([router, self.table.baseline, k, len(paired.values), self.table.metric.name, *figures])
        return Grid(header, rows).csv()

    def markdown(self) -> str:
        """A Markdown table."""
        return joined(self.grid().markdown(), self.caption)

    def latex(self) -> str:
        """A LaTeX table for the booktabs package."""
        return self.grid().latex(["Router", *(f"${title}$" for title in self.table.titles)])
