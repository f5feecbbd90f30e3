"""`pointsman report RUN…`: the page, the figures, and a paper's tables beside ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pointsman.cli.options import Parser, words

EPILOG = """examples:
  pointsman report runs/quickstart
  pointsman report runs/a runs/b --out both.html
  pointsman report docs/results/enwik8-tiny --figures png,svg
  pointsman report docs/results/enwik8-tiny --paper hyperrouter
"""


def parser() -> Parser:
    flags = Parser("report", "Write the page of a run or a comparison.", EPILOG)
    flags.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories, or one comparison")
    flags.add_argument(
        "--baseline", metavar="SPEC", help="the row that differences are taken against (default: the first)"
    )
    flags.add_argument(
        "--paper", metavar="NAME", help="our figures beside the published ones: hyperrouter, x-moe, mutual-inform"
    )
    flags.add_argument("--figures", type=words, metavar="png,svg,pdf", help="static figures as well")
    flags.common("the page, or the folder for it (default: report.html in the first RUN)")
    return flags


def run(arguments: Sequence[str]) -> int:
    values = parser().read(arguments)
    from pointsman import report

    runs = values.runs if len(values.runs) > 1 else values.runs[0]
    if values.paper:
        print(report.paper_tables(runs, values.paper))
        return 0
    if values.figures:
        for figure in report.figures(runs, values.figures, values.out):
            print(figure)
    print(report.write_report(runs, values.out, baseline=values.baseline), file=sys.stdout)
    return 0
