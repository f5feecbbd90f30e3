"""Makes everything below docs/results again from the records in it: tables, results.csv, pages, claims, trends, index.

python -m tools.results [FOLDER]        # default: docs/results; `make results`
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.report import series, write_report
from pointsman_lab.report.figures import save_lines
from pointsman_lab.report.results import write_tables, write_task_tables
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.runs.paths import COMPARISON
from pointsman_lab.tasks.attacks.table import attack_tables
from pointsman_lab.tasks.images.robust_table import robust_tables
from tools.results.claims import Page
from tools.results.load_table import LoadTable, measured_shares
from tools.results.prose import write_prose
from tools.results.trends import Trends

MAIN, ROWS = "enwik8-tiny", ("smoe", "smoe-dropout", "hyperrouter", "frozen-scaled", "frozen-temperature")
ROOT = Path(__file__).parents[2]
ROUTERS = ROOT / "benchmarks" / "results" / "routers" / "layer.json"  # python -m tools.bench --case routers


def make(folder: Path) -> None:
    """Writes the files of every grid in `folder`, then claims.md, trends.md and index.md."""
    for file in sorted(folder.glob(f"*/{COMPARISON}")):
        grid = file.parent
        write_tables(grid)
        comparison = read_comparison(grid)
        LoadTable.of(comparison, measured_shares(ROUTERS)).write(grid)
        write_task_tables(grid)
        for shifted in (*attack_tables(comparison), *robust_tables(comparison)):
            shifted.write(grid)
        print(write_report(grid, quotes=False), flush=True)
    if (main := folder / MAIN).is_dir():
        print(quality(main, folder / "pictures" / "quality.svg"))
    print(Page.read(folder).write(folder))
    print(Trends.read(folder).write(folder))
    if page := write_prose(folder):
        print(page)


def quality(grid: Path, picture: Path) -> Path:
    """The picture of the README: quality at every k of five rows."""
    table = ComparisonTable.of(replace(read_comparison(grid), routers=ROWS))
    return save_lines(picture, series.quality(table), "experts per token, k", table.metric.label, ks=table.top_k)


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "results")
    except (RunError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
