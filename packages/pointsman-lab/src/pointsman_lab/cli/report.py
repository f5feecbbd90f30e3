"""`pointsman report RUN…`: the page, the figures, and a paper's tables with our results."""

from collections.abc import Sequence
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab.cli.options import Parser, note, words
from pointsman_lab.cli.runs import recorded_imports
from pointsman_lab.runs.imports import import_remembered
from pointsman_lab.runs.paths import COMPARISON, is_page

EPILOG = """examples:
  pointsman report runs/quickstart
  pointsman report runs/a runs/b --out both.html
  pointsman report records/enwik8-tiny --figures png,svg
  pointsman report records/enwik8-tiny --paper hyperrouter
"""


def parser() -> Parser:
    flags = Parser("report", "Write the page of a run or a comparison.", EPILOG)
    flags.add("runs RUN", "run directories, or one comparison", type=Path, nargs="+")
    flags.add("--paper NAME", "our figures beside published ones: hyperrouter, x-moe, mutual-inform")
    flags.add("--figures png,svg,pdf", "static figures as well", type=words)
    told = "the map of tokens (default: pca); none opens no checkpoint"
    flags.add("--map", told, default="pca", choices=("pca", "none"))
    flags.common("the page, or the folder for it (default: report.html in the first RUN)", settings="", folder=None)
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    if values.paper:
        flags.without_effect(values, ("--figures", "--map"), "with --paper, which writes tables")
        if values.out and is_page(values.out):
            raise RunError(f"pointsman report: --out {values.out}: --paper writes into a folder")
    from pointsman_lab import report
    from pointsman_lab.report.figures import check_formats
    from pointsman_lab.training.compare import check_runs

    if values.figures:
        check_formats(values.figures)  # before the page, which may take a while
    # the page says which routers draw random numbers
    import_remembered([name for folder in values.runs for name in recorded_imports(folder)])
    runs = values.runs if len(values.runs) > 1 else values.runs[0]

    for folder in (one for one in values.runs if (one / COMPARISON).is_file()):
        try:
            check_runs(folder)
        except RunError as error:
            note(f"not one comparison: {error}")
    if values.paper:
        tables = report.paper_tables(values.runs, values.paper)
        print(tables.text())
        for file in tables.write(values.out or values.runs[0]):
            note(str(file))
        return 0
    page = report.write_report(runs, values.out, samples=values.map != "none", note=note)
    for figure in report.figures(runs, values.figures, values.out) if values.figures else ():
        note(str(figure))
    print(page)
    return 0
