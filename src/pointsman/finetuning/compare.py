"""Fine-tuning every row of a comparison, and one table a task: paired differences, the paper's figures beside."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, Stopped, did_you_mean
from pointsman.diagnostics.monitor import RoutingMonitor
from pointsman.evaluation.compare import Watcher, alone, read_plan, run_path
from pointsman.finetuning.routing import consistency_of
from pointsman.finetuning.run import finetune, finetuned_path, open_task
from pointsman.finetuning.settings import Finetuning
from pointsman.ops.kernels import Kernels
from pointsman.report import formats
from pointsman.report.formats import NONE
from pointsman.report.published_mutual import PAPERS
from pointsman.report.runs import Comparison, Run, number, read_run
from pointsman.report.tables import ComparisonTable
from pointsman.training.progress import Interrupted, Progress, Stop

REPEAT = 1000
"""The fine-tuning seed of repeat j from pre-training seed s is s + 1000 j."""


def compare_tasks(
    out: Path,
    tasks: Sequence[Finetuning],
    *,
    repeats: int = 1,
    device: str = "cpu",
    progress: Progress,
    watcher: Watcher | None = None,
    written: Callable[[Path], None] | None = None,
    stop: Stop | None = None,
) -> list[TaskTable]:
    """Fine-tunes every router and seed of a comparison on these tasks; what is done is left as it is.

    One seed is fine-tuned for all tasks and routers before the next. Rows of one seed see the same batches in the same
    order and start from the same head. After each run the task's tables are written into `out`: task-NAME.txt, .csv,
    .md and .tex.

    Args:
        out: a comparison directory whose runs are trained.
        tasks: tasks with their settings.
        repeats: fine-tunings of each pre-trained run.
        watcher: told when a run begins and when it has its evaluation.
        written: told of the comparison's directory after tables were written.
        stop: asks to save and end.

    Raises:
        RunError: no comparison, another process works in it, or what `finetune` raises.
        Stopped: `stop` was set; everything is saved.
    """
    plan = read_plan(out)
    if plan is None:
        raise RunError(f"{out} holds no comparison: train its routers first")
    kernels = Kernels.from_dict(plan["kernels"]) if plan.get("kernels") else None
    loaded = {settings.task: open_task(settings.task) for settings in tasks}  # before anything is trained
    rows = [(settings, router) for settings in tasks for router in plan["routers"]]
    todo = [
        (settings, router, seed, seed + REPEAT * repeat)
        for repeat in range(repeats)
        for seed in plan["seeds"]
        for settings, router in rows
    ]
    with alone(out):
        for place, (settings, router, seed, own_seed) in enumerate(todo, 1):
            if watcher:
                watcher.begins(place, len(todo), f"{router} on {settings.variant}", own_seed)
            try:
                result = finetune(
                    run_path(out, router, seed),
                    settings.for_router(router),
                    seed=own_seed,
                    out=finetuned_path(run_path(out, router, seed), settings, own_seed),
                    task=loaded[settings.task],
                    device=device,
                    kernels=kernels,
                    progress=progress,
                    monitor=RoutingMonitor,
                    stop=stop,
                )
            except Interrupted as saved:
                raise Stopped(
                    f"stopped in {saved.out} after step {saved.step}; saved: the same command goes on"
                ) from None
            if watcher:
                watcher.ended(router, own_seed)
            if not result.already_finished:
                TaskTable.read(out, settings).write(out)
                if written:
                    written(out)
    tables = [TaskTable.read(out, settings) for settings in tasks]
    for table in tables:
        table.write(out)
    return tables


@dataclass(frozen=True)
class Published:
    """A paper's test accuracy, in percent as printed; `router` as the paper labels it."""

    router: str
    accuracy: float
    source: str


def published_for(task: str) -> list[Published]:
    """What the papers publish for a task; [] for a task that none has."""
    return [
        Published(line.label, value, f"{paper.name}, {table.number}")
        for paper in PAPERS.values()
        for table in paper.tables
        if table.metric == "accuracy"
        for place, column in enumerate(table.columns)
        if column.task == task
        for line in table.lines
        if (value := line.values[place]) is not None
    ]


@dataclass(frozen=True)
class TaskTable:
    """A task's accuracies: router x k over seeds, paired differences, published figures, and what routing did.

    Attributes:
        name: the task and what differs from the defaults, as in the folder names.
        table: our figures.
        published: the papers' figures for this task; none of ours.
        protocol: how our figures came about.
        routing: router -> {"top1", "sets": fluctuation from the pre-trained model, mean over layers and seeds;
            "consistency": of the loads between fine-tunings of one pre-trained run}.
    """

    name: str
    table: ComparisonTable
    published: Sequence[Published]
    protocol: Mapping[str, Any]
    routing: Mapping[str, Mapping[str, float | None]]

    @classmethod
    def read(cls, out: Path, settings: Finetuning, *, baseline: str | None = None) -> TaskTable:
        """The table of what a comparison directory holds of this task.

        Raises:
            RunError: no comparison, or an unknown baseline.
        """
        plan = read_plan(out)
        if plan is None:
            raise RunError(f"{out} holds no comparison")
        routers: list[str] = list(plan["routers"])
        if baseline is not None and baseline not in routers:
            raise RunError(f"baseline {baseline!r}: {did_you_mean(baseline, routers)}")
        found: dict[tuple[str, int], Run] = {}
        for router in routers:
            for seed in plan["seeds"]:
                for config in (run_path(out, router, seed) / "finetune" / settings.variant).glob("seed-*/config.json"):
                    run = read_run(config.parent)
                    found[router, run.seed] = run
        seeds = sorted({seed for _, seed in found}) or list(plan["seeds"])
        protocol = next((dict(run.evaluation["protocol"]) for run in found.values() if run.done), {})
        table = ComparisonTable.of(
            Comparison(out, plan["settings"], routers, seeds, found),
            baseline=baseline,
            split=protocol.get("split", "test"),
        )
        routing = {router: _routing([run for (of, _), run in found.items() if of == router]) for router in routers}
        task = settings.variant.split(",")[0]
        return cls(settings.variant, table, published_for(task), protocol, routing)

    @property
    def note(self) -> str:
        """The protocol in a few lines of words."""
        protocol = self.protocol
        if not protocol:
            return "nothing has been fine-tuned yet"
        start = "from scratch" if protocol["from_scratch"] else "from the pre-trained run"
        balance = protocol["balance"]
        words = [
            f"{protocol['task']}",
            f"{start}, {protocol['steps']:,} steps, trained with k = {protocol['trained_with_k']}",
            f"pooling: {protocol['pooling']}; length {protocol['length']}, cut: "
            + ", ".join(f"{split} {count:,}" for split, count in protocol["truncated"].items()),
            f"frozen: {', '.join(protocol['frozen']) or 'nothing'}; balance loss: "
            + ("as in pre-training" if balance is None else f"{balance:g}"),
        ]
        seeds = f"seeds: that of pre-training, plus {REPEAT} for each further fine-tuning of the same run"
        return "; ".join(words) + "; " + seeds

    def text(self) -> str:
        """Plain aligned text: ours, paired differences, routing, then the published figures, labelled."""
        parts = [f"{self.name}: {self.note}", "", self.table.text()]
        if lines := self._routing_lines():
            parts += [_ROUTING, "", *formats.aligned(lines), ""]
        if lines := self._published_lines():
            parts += [_PUBLISHED, "", *formats.aligned(lines), ""]
        return "\n".join(parts)

    def markdown(self) -> str:
        """The same in Markdown."""
        parts = [f"**{self.name}**: {self.note}", "", self.table.markdown()]
        differences = self.table.difference_cells()
        if differences:
            header = ["router", *(f"k={k}" for k in self.table.top_k)]
            parts += [self.table.difference_caption, "", *_markdown([header, *differences]), ""]
        if lines := self._routing_lines():
            parts += [_ROUTING, "", *_markdown(lines), ""]
        if lines := self._published_lines():
            parts += [_PUBLISHED, "", *_markdown(lines), ""]
        return "\n".join(parts)

    def csv(self) -> str:
        """Ours, one line a router; below, under a header of their own, the published figures (as shares, like ours)."""
        if not self.published:
            return self.table.csv()
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["published router", "accuracy", "source"])
        writer.writerows([one.router, f"{one.accuracy / 100:.4f}", one.source] for one in self.published)
        return f"{self.table.csv()}\n{out.getvalue()}"

    def latex(self) -> str:
        """Two LaTeX tables for the booktabs package: ours and the published figures."""
        lines = self._published_lines()
        if not lines:
            return self.table.latex()
        body = [" & ".join(map(formats.escape_latex, line)) + r" \\" for line in lines]
        published = "\n".join(
            [
                r"\begin{table}",
                r"  \centering",
                rf"  \caption{{{formats.escape_latex(_PUBLISHED)}}}",
                rf"  \begin{{tabular}}{{l{'r' * (len(lines[0]) - 1)}}}",
                r"    \toprule",
                f"    {body[0]}",
                r"    \midrule",
                *(f"    {line}" for line in body[1:]),
                r"    \bottomrule",
                r"  \end{tabular}",
                r"\end{table}",
                "",
            ]
        )
        return self.table.latex() + "\n" + published

    def write(self, directory: Path) -> list[Path]:
        """Writes task-NAME.txt, .csv, .md and .tex; returns their paths."""
        contents = {"txt": self.text(), "csv": self.csv(), "md": self.markdown(), "tex": self.latex()}
        return [
            formats.write_whole(directory / f"task-{self.name}.{suffix}", content)
            for suffix, content in contents.items()
        ]

    def _published_lines(self) -> list[list[str]]:
        rows = [[one.router, f"{one.accuracy:.2f}", one.source] for one in self.published]
        return [["router (published)", "accuracy (%)", "source"], *rows] if rows else []

    def _routing_lines(self) -> list[list[str]]:
        rows = [
            [router, *(NONE if values[key] is None else f"{values[key]:.3f}" for key in _ROUTING_KEYS)]
            for router, values in self.routing.items()
            if any(value is not None for value in values.values())
        ]
        return [["router", *_ROUTING_KEYS], *rows] if rows else []


_PUBLISHED = "Published figures, not ours: larger models, pre-trained far longer."
_ROUTING_KEYS = ("top1", "sets", "consistency")
_ROUTING = (
    "Routing: share of tokens whose first expert (top1) or set of experts (sets) at k = 2 differs from the pre-trained "
    "model's, mean over layers and seeds; consistency: correlation of the loads between fine-tunings of one "
    "pre-trained run, without the diagonal."
)


def _routing(runs: Sequence[Run]) -> dict[str, float | None]:
    changes: dict[str, list[float]] = {"top1": [], "sets": []}
    records: dict[int, list[Mapping[str, Any]]] = {}
    for run in runs:
        if not run.done:
            continue
        records.setdefault(run.seed % REPEAT, []).append(run.evaluation)
        for layer in run.evaluation.get("change_from_pretrained", {}).get("layers", {}).values():
            for key, values in changes.items():
                if (value := number(layer.get(key))) is not None:
                    values.append(value)
    agreed = [
        value
        for group in records.values()
        if len(group) > 1
        for layer in consistency_of(group).values()
        if (value := layer["without_diagonal"]) is not None
    ]
    found: dict[str, list[float]] = {**changes, "consistency": agreed}
    return {key: statistics.fmean(values) if values else None for key, values in found.items()}


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    marked = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *([f"`{line[0]}`", *line[1:]] for line in lines[1:])]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in marked]
