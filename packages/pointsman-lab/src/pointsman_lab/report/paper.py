"""Our figures beside published ones, cell by cell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pointsman_lab._grid import NONE, Grid
from pointsman_lab.report.cell import Cell, Metric, metric
from pointsman_lab.report.cells import counted, finetuned, measured
from pointsman_lab.report.forms import Forms
from pointsman_lab.report.published import Column, Line, Paper, PublishedTable, open_paper
from pointsman_lab.runs.comparison import read_comparison


@dataclass(frozen=True)
class PaperComparison:
    """A published table with ours: setting -> (line, column) -> figures over seeds."""

    published: PublishedTable
    ours: Mapping[str, Mapping[tuple[int, int], Cell]]

    @property
    def metric(self) -> Metric:
        return metric(self.published.metric)

    def cells(self) -> Iterator[tuple[Line, Column, float | None, dict[str, Cell]]]:
        """Every cell: its line and column, the published figure, and ours by setting."""
        for i, line in enumerate(self.published.lines):
            for j, column in enumerate(self.published.columns):
                ours = {setting: found[i, j] for setting, found in self.ours.items() if (i, j) in found}
                yield line, column, line.values[j], ours

    def grid(self) -> Grid:
        """For every line a row 'published', and one for each setting of ours that has a figure."""
        table, rows = self.published, []
        for i, line in enumerate(table.lines):
            rows.append([line.label, "published", *(self._printed(value) for value in line.values)])
            for setting, found in self.ours.items():
                cells = [found.get((i, j), Cell({})) for j in range(len(table.columns))]
                if any(cell.values for cell in cells):
                    rows.append(["", f"ours: {setting}", *(self._ours(cell) for cell in cells)])
            if not any((i, j) in found for found in self.ours.values() for j in range(len(line.values))):
                needed = f"; needs {table.needs}" if table.needs else ""
                rows.append(["", f"ours: not run{needed}", *([NONE] * len(line.values))])
        header = ["", "", *(column.name for column in table.columns)]
        caption = ". ".join(filter(None, [f"{table.number}: {table.title}", self.note]))
        return Grid(header, rows, caption=caption, code=False, labels=2)

    @property
    def note(self) -> str:
        """The table's note; where some columns have figures of ours, what the others need."""
        filled = {j for found in self.ours.values() for (_, j), cell in found.items() if cell.values}
        empty = [column.name for j, column in enumerate(self.published.columns) if j not in filled]
        if not filled or not empty:
            return self.published.note
        needs = f"; they need {self.published.needs}" if self.published.needs else ""
        return " ".join(filter(None, [self.published.note, f"No figures of ours: {', '.join(empty)}{needs}."]))

    def _printed(self, value: float | None) -> str:
        if value is None:
            return NONE
        own = len(repr(value).partition(".")[2])
        return f"{value:,.{max(own, self.published.decimals)}f}"

    def _ours(self, cell: Cell) -> str:
        if self.metric.decimals == 0 and cell.mean is not None:
            return f"{cell.mean:,.0f}"
        return cell.shown(self.metric)


@dataclass(frozen=True)
class PaperTables(Forms):
    """All tables of a paper with ours beside them."""

    paper: Paper
    tables: Sequence[PaperComparison]

    @property
    def file(self) -> str:
        return f"paper-{self.paper.name}"

    @property
    def head(self) -> str:
        return f"{self.paper.citation}\n{self.paper.link}\n\nRows 'published' are the paper's figures, not ours."

    def shown_grids(self) -> list[Grid]:
        return [one.grid() for one in self.tables]

    def csv(self) -> str:
        """One line a cell; '-' where a figure does not exist."""
        header = ["paper", "table", "row", "column", "metric", "published", "setting", "ours", "std", "seeds"]
        rows = []
        for one in self.tables:
            scale = one.metric.scale
            for line, column, value, ours in one.cells():
                lead = [self.paper.name, one.published.number, line.label, column.name, one.metric.label, value]
                for setting, cell in (ours or {NONE: Cell({})}).items():
                    mean = None if cell.mean is None else cell.mean * scale
                    std = None if cell.std is None else cell.std * scale
                    rows.append([*lead, setting, mean, std, len(cell.values)])
        return Grid(header, rows).csv()


def paper_tables(path: Path | Sequence[Path], name: str) -> PaperTables:
    """The tables of "hyperrouter", "x-moe" or "mutual-inform" with the figures of run and comparison directories."""
    paper = open_paper(name)
    paths = [path] if isinstance(path, str | Path) else path
    trained = [run for one in paths for run in read_comparison(Path(one)).runs.values()]
    runs = [run for run in trained if run.done]
    runs += [one for run in runs for one in finetuned(run)]
    tables = [PaperComparison(table, {**counted(table), **measured(table, runs)}) for table in paper.tables]
    return PaperTables(paper, tables)
