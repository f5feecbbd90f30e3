"""Runs the exam of all routers, and makes its record, which the package carries, and its page.

python -m tools.exam run DIR [RECORD]   # goes on with DIR, or from what the file RECORD has; stops and resumes anywhere
python -m tools.exam page DIR           # writes record and page from DIR
"""

from __future__ import annotations

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
from pointsman_lab._grid import NONE, Grid, wrapped
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.exam import exam
from pointsman_lab.exam.card import Card
from pointsman_lab.exam.cell import is_whole
from pointsman_lab.exam.exam import PLAN, RECORD, Plan, collect, examine, read_record, written_record
from pointsman_lab.exam.scores import QUICK, TASKS, Cells, accept, difference, mean_of_runs, tasks
from pointsman_lab.exam.student import ROWS
from pointsman_lab.report.cell import metric
from pointsman_lab.report.results import tidy
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.runs.paths import COMPARISON
from tools.results.evidence import tuned_rows

ROOT = Path(__file__).parents[1]
PAPERS = ("smoe", "hyperrouter", "xmoe", "smoe-dropout", "loss-free")
OF_PAPERS = {"hyperrouter": "HyperRouter", "xmoe": "X-MoE", "smoe+similarity": "Similarity-Inform",
             "smoe+attention": "Attention-Inform"}  # fmt: skip
SIGNS = {1: "ahead of", 0: "not significantly different from", -1: "behind"}
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
DRAWS = 2000
LEAST_ROUTERS = 5
ENOUGH_ROUTERS = 10
"""With fewer a bootstrap over routers has too short intervals, and the first line says nothing of prediction."""
CHANCE = (*ROWS, "hash", "thor")


def stages() -> list[tuple[Sequence[str], Sequence[str]]]:
    """(rows, tasks) in the order in which they are run: each makes a page that can be read."""
    every = [one.name for one in tasks(None)]
    others = [name for name in list_routers() if name not in FIRST]
    return [(FIRST, QUICK), (MIXED[:3], INFORMING[:1]), (FIRST, every), (MIXED, INFORMING), (COMPOSED, every),
            (others, every)]  # fmt: skip


def train(folder: Path, known: Path | None) -> None:
    """Does the runs of all stages that are missing in the folder and, if given, in a record's file."""
    cells = read_record(known) if known else {}
    with Display() as display, stop_on_signals() as stop:
        for rows, names in stages():
            plan = Plan(tuple(rows), tuple(names), SEEDS, again=True)
            examine(plan, folder, jobs=1, progress=display, ended=lambda: None, stop=stop, known=cells)


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
    predicts = [row for row in enough if row[5]]
    if not enough:
        first = (
            "Whether the exam predicts comparisons of trained models is not known yet: no comparison shares "
            f"{ENOUGH_ROUTERS} routers with it (the most is {max((row[4] for row in found), default=0)}). The rank "
            "correlations at the end of the page describe these few routers."
        )
    elif predicts:
        first = (
            f"{len(predicts)} of {len(enough)} pairs of a task and a comparison of trained models have a rank "
            "correlation whose interval is on one side of 0 (about one in twenty would by chance)."
        )
    else:
        first = (
            "No task's scores are shown to correlate with a comparison of trained models. What the exam is still good "
            "for: it says on which known structure a router fails, and why."
        )
    rules = {task: accept(cells, task, [row for row in rows if row not in CHANCE]) for task in tasks}
    verdicts = Grid(
        ["task", "floor", "oracle", "plain", "near the floor", "plain far", "the pair that differs most", "stays"],
        [
            [task, *(_number(rule.get(key)) for key in ("floor", "oracle", "plain")),
             *(_yes(task, rule[key]) for key in ("near", "apart")),
             " - ".join(rule["differ"]) if rule["differ"] else NONE, _yes(task, rule["accepted"], "a reference")]
            for task, rule in rules.items()
        ],
    )  # fmt: skip
    shown = [
        [task, name, f"{rho:+.2f}", f"{low:+.2f} to {high:+.2f}", str(count)]
        for task, name, rho, (low, high), count, _ in found
    ]
    ranks = Grid(["task", "comparison", "Spearman's rho", "95 %", "routers"], shown, labels=2)
    paragraphs = [f"### {task}\n\n{paragraph(cells, task, card.rows)}" for task in tasks]
    newer = " and ".join(f"`{name}`" for name in NEWER if name in {*tasks, *card.rows})
    later = f" ({LATER} for {newer})" if newer else ""
    return "\n\n".join(
        [
            "# The exam of all routers", first,
            "Made by `python -m tools.exam page DIR` from `python -m tools.exam run DIR`. [What it is](guide.md).",
            f"Its runs are of commit {COMMIT}{later}: {SEEDS} seeds a cell; a cell without a figure has not been run.",
            card.markdown().strip(),
            "Which of the papers' claims hold here: [claims](../results/claims.md), family exam. The list was written "
            "when the first scores had been seen.",
            "## Which tasks stay", verdicts.markdown(), "## What was learned", *paragraphs, *behind(cells),
            "## Does the exam predict?",
            "Rank correlation over routers of mean scores and mean figures (k = 2 where it was evaluated); the "
            f"interval is a bootstrap over routers, {DRAWS} draws, not corrected for the number of pairs.",
            ranks.markdown() if shown else "Too few routers are in both.",
        ]
    ) + "\n"  # fmt: skip


def paragraph(cells: Cells, task: str, rows: Sequence[str]) -> str:
    """A task's question, and what its figures say."""
    card = Card([task], cells, rows)
    means = {row: score for row in rows if row not in CHANCE and (score := card.score(task, row)) is not None}
    said = [TASKS[task].asks]
    if not means:
        return " ".join([*said, "No router has been examined."])
    order = sorted(means, key=lambda row: -means[row])
    best, others = order[0], order[1:]
    agreement = mean_of_runs(cells, task, best, "ami")
    said.append(f"The best is `{best}` with {card.text_of(task, best)} (mutual information {_number(agreement)}).")
    level = [row for row in others if difference(cells, task, best, row, len(others)).sign == 0]
    worse = [row for row in others if difference(cells, task, best, row, len(others)).sign == 1]
    if level:
        said.append(f"Not significantly different: {', '.join(f'`{row}`' for row in level)}.")
    if worse:
        said.append(
            f"Worse: {len(worse)} of the {len(others)} others; the worst is `{worse[-1]}` with "
            f"{card.text_of(task, worse[-1])}."
        )
    told = []
    for row in [one for one in OF_PAPERS if one in means and "smoe" in means]:
        place = SIGNS[difference(cells, task, row, "smoe", len(OF_PAPERS)).sign or 0]
        told.append(f"{OF_PAPERS[row]} is {place} it ({card.text_of(task, row)})")
    if told:
        said.append(f"`smoe` has {card.text_of(task, 'smoe')}: {', '.join(told)}.")
    for row, what in (("dense", "the dense layer"), ("thor", "chance (`thor`)")):
        if card.score(task, row) is not None:
            said.append(f"{what[0].upper()}{what[1:]} has {card.text_of(task, row)}.")
    below = [row for row in order if means[row] < 0]
    if 2 * len(below) > len(order):
        said.append(f"Worse than one expert: {len(below)} of {len(order)}.")
    elif below:
        said.append(f"Worse than one expert: {', '.join(f'`{row}`' for row in below)}.")
    refused = [row for row in rows if "refused" in cells.get((task, row), {})]
    if refused:
        said.append(f"Cannot take the task: {', '.join(f'`{row}`' for row in refused)}.")
    return " ".join(said)


def behind(cells: Cells) -> list[str]:
    """Why two published routers are behind one expert on most tasks."""
    if not cells.keys() >= {("clusters", "relu"), ("clusters", "soft")}:
        return []
    curve = dict(cells["clusters", "relu"]["runs"]["0"]["curve"])
    best, last = min(curve, key=lambda step: curve[step]), max(curve)
    return [
        "### Two rows that are behind one expert",
        f"`relu` learns `clusters` at first: after {best} of {last} steps {curve[best]:.2f} of the variance is not "
        "explained (seed 0). Then its penalty, which grows until a token has one expert, takes this away: "
        f"{curve[last]:.2f} at the end. `soft` gives each expert weighted means of tokens, and here every token "
        "needs a map of its own vector.",
    ]


def results(folder: Path) -> dict[str, dict[str, float]]:
    """Comparison -> router -> mean figure on the test split, more is better."""
    found: dict[str, dict[str, float]] = {}
    for grid in sorted(folder.glob(f"*/{COMPARISON}")):
        rows = [row for row in tidy(read_comparison(grid.parent)) if row["value"] is not None]
        values: dict[str, list[float]] = {}
        names = {spec: row for row, spec in tuned_rows(grid.parent).items()}  # the router's own rate is no other router
        ks = {row["k"] for row in rows}
        for row in rows:
            if row["k"] == 2 or 2 not in ks:
                sign = -1 if metric(row["metric"]).lower_is_better else 1
                values.setdefault(names.get(row["router"], row["router"]), []).append(sign * row["value"])
        found[grid.parent.name] = {router: statistics.fmean(one) for router, one in values.items()}
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


def _yes(task: str, holds: bool, reference: str = NONE) -> str:
    """A verdict of the rule, which says nothing of a task whose best routing is not known."""
    return ("yes" if holds else "no") if TASKS[task].known else reference


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


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
