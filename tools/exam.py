"""Runs the exam of all routers, and makes its record, which the package carries, and its page.

python -m tools.exam run DIR [RECORD]   # goes on with DIR, or from what the file RECORD has; stops and resumes anywhere
python -m tools.exam page DIR           # writes record and page from DIR
"""

import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scipy.stats import rankdata

from pointsman import list_routers
from pointsman._errors import RunError, Stopped
from pointsman_lab._files import read_json, write_whole
from pointsman_lab._grid import Grid, wrapped
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.exam import exam
from pointsman_lab.exam.card import Card
from pointsman_lab.exam.cell import is_whole
from pointsman_lab.exam.exam import PLAN, RECORD, Plan, collect, examine, read_record, written_record
from pointsman_lab.exam.scores import QUICK, TASKS, Cells, difference, mean_of_runs, tasks
from pointsman_lab.exam.student import ROWS
from pointsman_lab.report.cell import metric
from pointsman_lab.report.results import tidy
from tools.results.grids import read_grids, tuned_rows

ROOT = Path(__file__).parents[1]
PAPERS = ("smoe", "hyperrouter", "xmoe", "smoe-dropout", "loss-free")
FIRST = ("oracle", "plain", "dense", *PAPERS, "hash", "smoe:balance=0.01", "thor")
MIXED = ("smoe+similarity", "smoe+uniform", "smoe+shuffled", "loss-free+similarity", "loss-free+uniform",
         "loss-free+shuffled", "smoe+attention")  # fmt: skip
INFORMING = ("neighbours", "neighbours-causal", "sources", "sources-switching")
"""Tasks on which a mixer claims something."""
COMPOSED = ("hyperrouter@loss-free", "xmoe@loss-free", "smoe-dropout@loss-free", "xmoe@expert-choice",
            "loss-free:nulls=8", "smoe:gate=sigmoid")  # fmt: skip
SEEDS = 8
COMMIT, LATER = "f13f6b7", "712334f"
NEWER = ("languages", "pooled")
"""A task and a row that were registered later: their runs are of commit `LATER`."""
REPAIRED = (
    "a64ec659 for `thor` where targets are classes, which was trained without its consistency term before, and for "
    "`relu`, `top-p`, `dselect` and `dynmoe` on `amount`, whose k was lowered from 4 and not from that of training"
)
DRAWS = 2000
LEAST_ROUTERS = 5
ENOUGH_ROUTERS = 10
"""With fewer a bootstrap over routers has too short intervals, and the first line does not count the pair."""
CHANCE = (*ROWS, "hash", "thor")


def stages() -> list[tuple[Sequence[str], Sequence[str]]]:
    """(rows, tasks) in the order in which they are run: each makes a page that can be read."""
    every = [one.name for one in tasks(None)]
    others = [name for name in list_routers() if name not in FIRST]
    return [(FIRST, QUICK), (MIXED[:3], INFORMING[:1]), (FIRST, every), (MIXED, INFORMING), (COMPOSED, every),
            (others, every)]  # fmt: skip


def train(folder: Path, known: Path | None) -> None:
    """Does the runs of all stages that are missing in the folder and, if given, in a record's file."""
    cells, crashed = read_record(known) if known else {}, list[str]()
    with Display() as display, stop_on_signals() as stop:
        for rows, names in stages():
            plan = Plan(tuple(rows), tuple(names), SEEDS, again=True)
            done = examine(plan, folder, jobs=1, progress=display, ended=lambda: None, stop=stop, known=cells)
            crashed += done.crashed
    if crashed:
        raise RunError(f"a router crashed: {', '.join(crashed)}")


def make(folder: Path, page: Path = ROOT / "docs" / "exam" / "index.md") -> None:
    """Writes record and page of what the record and a directory hold; cells without all seeds are left out."""
    plan = read_json(folder / PLAN)
    if plan is None:
        raise RunError(f"{folder} holds no exam")
    file = Path(exam.__file__).with_name(RECORD)
    found = {**read_record(file), **collect(Plan(tuple(plan["rows"]), tuple(TASKS), SEEDS, again=True), folder)}
    order = dict.fromkeys(row for rows, _ in stages() for row in rows)
    rows = list(dict.fromkeys([*order, *(row for _, row in found)]))
    cells = {place: found[place] for place in ((task, row) for row in rows for task in TASKS)
             if place in found and is_whole(found[place], SEEDS)}  # fmt: skip
    print(write_whole(file, written_record(cells)))
    cells = dict(read_record(file))  # the page says what anybody can make of the record, which rounds
    print(write_whole(page, wrapped(text(cells, list(TASKS), rows, results(ROOT / "records")))))


def text(cells: Cells, tasks: Sequence[str], rows: Sequence[str], measured: Mapping[str, Mapping[str, float]]) -> str:
    """The page as Markdown; `measured`: comparison -> router -> figure, more is better."""
    card = Card(tasks, cells, rows)
    found = correlations(card, measured)
    enough = [row for row in found if row[4] >= ENOUGH_ROUTERS]
    first = (
        f"{sum(row[5] for row in enough)} of {len(enough)} pairs of a task and a comparison of trained models, of "
        f"{ENOUGH_ROUTERS} routers or more, have a rank correlation whose interval is on one side of 0 (about one in "
        "twenty would by chance). Of fewer routers the intervals below are too short."
    )
    shown = [
        [task, name, f"{rho:+.2f}", f"{low:+.2f} to {high:+.2f}", str(count)]
        for task, name, rho, (low, high), count, _ in found
    ]
    ranks = Grid(["task", "comparison", "Spearman's rho", "95 %", "routers"], shown, labels=2)
    newer = " and ".join(f"`{name}`" for name in NEWER if name in {*tasks, *card.rows})
    later = f" ({LATER} for {newer}; {REPAIRED})" if newer else f" ({REPAIRED})"
    return "\n\n".join(
        [
            "# The exam of all routers", first,
            "Made by `python -m tools.exam page DIR` from `python -m tools.exam run DIR`. [What it is](guide.md).",
            f"Its runs are of commit {COMMIT}{later}: {SEEDS} seeds a cell; a cell without a figure has not been run.",
            card.markdown().strip(),
            "Which of the papers' claims hold here: [claims](../results/claims.md), family exam. The list was written "
            "when the first scores had been seen.",
            "## The best of each task", "\n".join(f"- {best(cells, task, card.rows)}" for task in tasks),
            "## Does the exam predict?",
            "Rank correlation over routers of mean scores and mean figures (k = 2 where it was evaluated); the "
            f"interval is a bootstrap over routers, {DRAWS} draws, not corrected for the number of pairs.",
            ranks.markdown() if shown else "Too few routers are in both.",
        ]
    ) + "\n"  # fmt: skip


def best(cells: Cells, task: str, rows: Sequence[str]) -> str:
    """The best router of a task, and which others are not significantly worse."""
    card = Card([task], cells, rows)
    means = {row: score for row in rows if row not in CHANCE and (score := card.score(task, row)) is not None}
    if not means:
        return f"`{task}`: no router has been examined."
    first, *others = sorted(means, key=lambda row: -means[row])
    agreement = mean_of_runs(cells, task, first, "ami")
    signs = {row: difference(cells, task, first, row, len(others)).sign for row in others}
    level = ", ".join(f"`{row}`" for row, sign in signs.items() if sign == 0)
    told = f"`{task}`: `{first}` with {card.text_of(task, first)}"
    told += "" if agreement is None else f" (mutual information {agreement:.3f})"
    told += f". Not significantly different: {level}" if level else ""
    return f"{told}. Worse: {sum(sign == 1 for sign in signs.values())} of the {len(others)} others."


def results(folder: Path) -> dict[str, dict[str, float]]:
    """Comparison -> router -> mean figure on the test split, more is better."""
    found: dict[str, dict[str, float]] = {}
    for name, grid in sorted(read_grids(folder)[1].items()):
        rows = [row for row in tidy(grid) if row["value"] is not None]
        values: dict[str, list[float]] = {}
        names = {spec: row for row, spec in tuned_rows(grid).items()}  # the router's own rate is no other router
        ks = {row["k"] for row in rows}
        for row in rows:
            if row["k"] == 2 or 2 not in ks:
                sign = -1 if metric(row["metric"]).lower_is_better else 1
                values.setdefault(names.get(row["router"], row["router"]), []).append(sign * row["value"])
        found[name] = {router: statistics.fmean(one) for router, one in values.items()}
    return found


Correlation = tuple[str, str, float, tuple[float, float], int, bool]
"""task, comparison, rho, its interval, routers, whether the interval is on one side of 0."""


def correlations(card: Card, measured: Mapping[str, Mapping[str, float]]) -> list[Correlation]:
    """Each task with each comparison that has enough routers of the exam."""
    rows = [row for row in card.rows if row not in CHANCE]
    found: list[Correlation] = []
    for task in card.tasks:
        scores = {row: score for row in rows if (score := card.score(task, row)) is not None}
        for name, figures in measured.items():
            both = sorted(scores.keys() & figures.keys())
            if len(both) < LEAST_ROUTERS:
                continue
            pairs = [(scores[row], figures[row]) for row in both]
            draw = random.Random(f"{task} {name}")
            drawn = sorted(spearman(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
            low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS) - 1]
            found.append((task, name, spearman(pairs), (low, high), len(both), low > 0 or high < 0))
    return found


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 where one side is constant."""
    first, second = (ranks - ranks.mean() for ranks in rankdata(pairs, axis=0).T)
    spread = math.sqrt(first @ first * (second @ second))
    return float(first @ second) / spread if spread else 0.0


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case [*_, word] if word in ("-h", "--help"):
                print(__doc__)
            case ["run", directory, *known] if len(known) < 2:
                train(Path(directory), Path(known[0]) if known else None)
            case ["page", directory]:
                make(Path(directory))
            case _:
                raise RunError(str(__doc__))
    except (RunError, Stopped) as error:
        print(error, file=sys.stderr)
        sys.exit(130 if isinstance(error, Stopped) else 2)
