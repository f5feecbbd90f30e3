"""Makes the pages of docs/results from the records: index, claims, trends with pictures, and a page a grid.

python -m tools.results [RECORDS PAGES]        # default: records docs/results; `make results`
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab._files import write_whole
from pointsman_lab._grid import wrapped
from pointsman_lab.report import series
from pointsman_lab.report.figures import save_lines
from pointsman_lab.report.forms import joined
from pointsman_lab.report.paper import paper_tables
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import read_comparison
from tools.results.claims import Page
from tools.results.claims_file import CLAIMS, read_toml
from tools.results.pages import MADE, Pages
from tools.results.trends import Trends

MAIN, ROWS = "enwik8-tiny-decoder", ("smoe", "smoe-dropout", "hyperrouter", "xmoe", "dense")
ROOT = Path(__file__).parents[2]


def make(records: Path, folder: Path) -> None:
    """Writes all pages of `records` into `folder`."""
    claims = Page.read(records)
    Pages(records, claims).write(folder)
    print(claims.write(folder))
    print(Trends.read(records).write(folder))
    for paper, grids in read_toml(records / CLAIMS).get("papers", {}).items():
        if places := [records / grid for grid in grids if (records / grid).is_dir()]:
            content = joined(MADE, paper_tables(places, paper).markdown())
            print(write_whole(folder / f"paper-{paper}.md", wrapped(content)))
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
