"""Makes the pages of docs/results from the records: index, claims, trends with pictures, and a page a grid.

python -m tools.results [RECORDS PAGES]        # default: records docs/results; `make results`
"""

import math
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import read_json, write_whole
from pointsman_lab._grid import NONE, Grid, wrapped
from pointsman_lab.registry import entries
from pointsman_lab.report import series
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.figures import save_lines
from pointsman_lab.report.forms import Forms, joined
from pointsman_lab.report.language_table import LanguageTable
from pointsman_lab.report.results import tables_of
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.report.task_table import TaskTable, finetunings, variants
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.training.tune import CURVE, edges
from tools.results.claims import Page
from tools.results.claims_file import CLAIMS, read_toml
from tools.results.grids import tuned_rows
from tools.results.measures import DIAGNOSED, UNITS, Measure
from tools.results.trends import read_trends, write_trends

DENSE = "A dense row stands at the largest k, and so does its difference; the claims compare it at a k that they name."
MADE = "Made by `make results` from the records in `records/`; nothing here is typed by hand."


@dataclass(frozen=True)
class Pages:
    """The pages of a folder of records."""

    records: Path
    claims: Page

    def write(self, folder: Path) -> None:
        """Writes index.md, and a page for every grid of claims.toml that is there, if it is to have one."""
        values = read_toml(self.records / CLAIMS)
        lines = {}
        for name, grid in values["grids"].items():
            if not grid.get("page", True) or name not in self.claims.grids:
                continue
            comparison = self.claims.grids[name]
            seeds = [sum(run.done for run in comparison.of(router)) for router in comparison.routers]
            if min(seeds) < self.claims.seeds_of(grid.get("family", "")):  # nobody looks before all of them are there
                continue
            link, about = f"[{name}]({name}.md)", grid.get("about", "")
            lines[name] = [link, about, str(len(comparison.routers)), str(max(seeds))]
            print(write_whole(folder / f"{name}.md", self.grid(name, about, comparison, grid.get("again", ""))))
        print(write_whole(folder / "index.md", wrapped(self.index(values, lines))))

    def grid(self, name: str, about: str, comparison: Comparison, again: str = "") -> str:
        """Commands, quality with paired differences, loads, diagnoses, and what else was evaluated."""
        table = ComparisonTable.of(comparison)
        forms: list[Forms] = [table]
        runs = [run for router in comparison.routers for run in comparison.of(router)]
        forms += [one for one in [LanguageTable.of(runs, "languages")] if one]
        for task in variants(comparison):
            forms += tables_of(TaskTable.of(comparison, task), finetunings(comparison, task))
        forms += [one for entry in entries() for one in entry.tables(comparison)]
        loads = {f"k={k}": Measure("imbalance", k) for k in table.top_k}
        found = {f"{name} ({UNITS[name]})": Measure(name) for name in DIAGNOSED}
        parts = [f"# {name}", about, MADE, "\n".join(["```sh", *self.claims.shown_commands(name), "```"])]
        parts += tuning(self.records / name)
        parts += tuning(self.records / again, "tuning again", tuned_rows(comparison)) if again else []
        for form in forms:
            parts += [f"## {form.file}", form.markdown()]
            if form is table and any(row.router_parameters is None for row in table.rows):
                parts.append(DENSE)
        if shown := measured(comparison, loads):
            parts += ["## loads", "Squared coefficient of variation of the experts' loads, mean over layers.", shown]
        if shown := measured(comparison, found):
            parts += ["## diagnoses", "Means over layers (`pointsman diagnose`).", shown]
        return joined(*(part.strip() if part.startswith("```") else wrapped(part).strip() for part in parts))

    def index(self, values: Mapping[str, Any], lines: Mapping[str, Sequence[str]]) -> str:
        """The page that answers each question of claims.toml by the verdicts of its claims.

        Args:
            lines: of the grids that have a page: link, what, rows, seeds.
        """
        grids = Grid(("grid", "what", "rows", "seeds"), [*lines.values()], code=False, labels=2)
        parts = ["# Results", values["intro"], MADE, "## Verdicts", self.claims.counts().markdown()]
        for question in values["questions"]:
            of = [one for one in self.claims.tested if one.claim.question == question["name"]]
            rows = [
                [one.claim.claim, lines.get(one.claim.grid, [one.claim.grid])[0], one.figure, one.against_control,
                 one.marked + one.otherwise]
                for one in of
            ]  # fmt: skip
            answers = Grid(("claim", "grid", "difference", "control", "verdict"), rows, code=False, labels=5)
            parts += [f"## {question['title']}", question.get("note", ""), answers.markdown(),
                      f"![{question['alt']}](pictures/{question['picture']}.svg)"]  # fmt: skip
        what = "A grid is one paired comparison; its page has every table, "
        parts += ["## The grids", what + "`pointsman report records/GRID` draws its curves.", grids.markdown()]
        return joined(*(part.strip() for part in parts))


def tuning(folder: Path, title: str = "tuning", rows: Container[str] | None = None) -> list[str]:
    """What `compare --tune` chose for each row of a grid, with its figures, and where that is an edge of what it tried.

    Args:
        folder: has the tuning's own tuning.json beside the record, if the grid was tuned.
        rows: which are shown, as they were asked for; the default is all.
    """
    told = read_json(folder / CURVE)
    if told is None:
        return []
    lines, notes = [], []
    for row, values in told["curve"].items():
        if rows is not None and row not in rows:
            continue
        curve = {text: [math.inf if one is None else one for one in each] for text, each in values.items()}
        rounds = max(map(len, curve.values()))
        ended = [one for one in curve if len(curve[one]) == rounds and math.isfinite(curve[one][-1])]
        best, *others = sorted(ended, key=lambda one: curve[one][-1])
        figures = ", ".join(f"{abs(one):.3f}" for one in curve[best])
        second = f"{others[0]} ({abs(curve[others[0]][-1]):.3f})" if others else NONE
        lines.append([row, str(len(curve)), best, figures, second])
        notes += [f"`{row}`: {one}." for one in edges(curve, best).splitlines() if one]
    header = ("row", "choices", "chosen", "its figure after each round", "the next (last round)")
    first, *more = told["seeds"]
    last = f" (last round: {first} to {more[-1]})" if more else ""
    what = f"Seed {first}{last}, validation text, k = {told['k']}: after each round the better of a row's choices."
    return [f"## {title}", what, Grid(header, lines, labels=1).markdown(), *notes]


def measured(comparison: Comparison, columns: Mapping[str, Measure]) -> str:
    """A Markdown table, mean ± sample standard deviation; rows and columns without figures are left out, "": all."""
    cells = {
        (router, title): cell for router in comparison.routers for title, measure in columns.items()
        if (cell := Cell(measure.of(comparison, router))).values
    }  # fmt: skip
    titles = [title for title in columns if any(of == title for _, of in cells)]
    routers = [router for router in comparison.routers if any(of == router for of, _ in cells)]
    rows = [[router, *(cells.get((router, title), Cell({})).text(3) for title in titles)] for router in routers]
    return Grid(("row", *titles), rows, labels=1).markdown() if rows else ""


MAIN, ROWS = "main-growing", ("smoe", "smoe-dropout", "hyperrouter", "xmoe", "dense-matched", "dense")
ROOT = Path(__file__).parents[2]


def make(records: Path, folder: Path) -> None:
    claims = Page.read(records)
    Pages(records, claims).write(folder)
    print(claims.write(folder))
    print(write_trends(read_trends(records), folder))
    if MAIN in claims.grids and (folder / f"{MAIN}.md").is_file():
        specs = tuned_rows(claims.grids[MAIN])
        rows = tuple(specs.get(row, row) for row in ROWS)
        table = ComparisonTable.of(replace(claims.grids[MAIN], routers=rows))
        picture = folder / "pictures" / "quality.svg"
        print(save_lines(picture, series.quality(table), "experts per token, k", table.metric.label, ks=table.top_k))


if __name__ == "__main__":
    try:
        records, pages = map(Path, sys.argv[1:]) if sys.argv[1:] else (ROOT / "records", ROOT / "docs" / "results")
        make(records, pages)
    except (RunError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
