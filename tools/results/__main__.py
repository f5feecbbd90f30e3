"""Makes the pages of docs/results from the records: index, claims, trends with pictures, and a page a grid.

python -m tools.results [RECORDS PAGES]        # default: records docs/results; `make results`
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.report import series
from pointsman_lab.report.figures import save_lines
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import read_comparison
from tools.results.claims import Page
from tools.results.pages import Pages
from tools.results.trends import Trends

MAIN, ROWS = "enwik8-tiny-decoder", ("smoe", "smoe-dropout", "hyperrouter", "xmoe", "dense")
ROOT = Path(__file__).parents[2]


def make(records: Path, folder: Path) -> None:
    """Writes all pages of `records` into `folder`."""
    claims = Page.read(records)
    Pages(records, claims).write(folder)
    print(claims.write(folder))
    print(Trends.read(records).write(folder))
    if (records / MAIN).is_dir():
        table = ComparisonTable.of(replace(read_comparison(records / MAIN), routers=ROWS))
        picture = folder / "pictures" / "quality.svg"
        print(save_lines(picture, series.quality(table), "experts per token, k", table.metric.label, ks=table.top_k))


if __name__ == "__main__":
    try:
        records, pages = map(Path, sys.argv[1:]) if sys.argv[1:] else (ROOT / "records", ROOT / "docs" / "results")
        make(records, pages)
    except (RunError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
