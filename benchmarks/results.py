"""Makes everything below docs/results again from the records in it: tables, results.csv, pages, claims, trends, index.

python benchmarks/results.py [FOLDER]        # default: docs/results; `make results`
"""

from __future__ import annotations

import sys
from pathlib import Path

from pointsman.cli.compare import write_tables
from pointsman.cli.finetune import write_task_tables
from pointsman.lab.report import attack_tables, write_report
from pointsman.lab.report.claims import Page
from pointsman.lab.report.load_table import LoadTable, measured_shares
from pointsman.lab.report.prose import write_prose
from pointsman.lab.report.robust_table import robust_tables
from pointsman.lab.report.trends import Trends
from pointsman.lab.runs.comparison import read_comparison
from pointsman.lab.runs.paths import COMPARISON

ROUTERS = Path(__file__).parent / "results" / "routers" / "layer.json"  # pointsman bench --case routers


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
    print(Page.read(folder).write(folder))
    print(Trends.read(folder).write(folder))
    if page := write_prose(folder):
        print(page)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "results")
