"""Our figures beside published ones, cell by cell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman._files import write_whole
from pointsman._grid import NONE, Grid
from pointsman._values import finite
from pointsman.lab.report.forms import Forms, joined
from pointsman.lab.report.metrics import Metric, metric
from pointsman.lab.report.published import COUNTED, OWN_METRICS, Column, Line, Paper, PublishedTable, open_paper
from pointsman.lab.report.settings import deviations, named
from pointsman.lab.report.tables import Cell
from pointsman.lab.report.task_table import pretrained_of
from pointsman.lab.report.xtreme_table import TASKS as XTREME_TASKS
from pointsman.lab.report.xtreme_table import average
from pointsman.lab.runs.comparison import read_comparison
from pointsman.lab.runs.paths import FINETUNE, finetuned_runs
from pointsman.lab.runs.record import RunRecord, read_object, read_run
from pointsman.routers.registry import has_one_k

COUNTED_SETTING = "counted from the model"


@dataclass(frozen=True)
class PaperComparison:
    """A published table with ours: setting -> (line, column) -> figures over seeds."""

    published: PublishedTable
    ours: Mapping[str, Mapping[tuple[int, int], Cell]]

    @property
    def metric(self) -> Metric:
        return OWN_METRICS.get(self.published.metric) or metric(self.published.metric)

    def cells(self) -> Iterator[tuple[Line, Column, float | None, dict[str, Cell]]]:
        """Every cell: its line and column, the published figure, and ours by setting."""
        for i, line in enumerate(self.published.lines):
            for j, column in enumerate(self.published.columns):
                ours = {setting: found[i, j] for setting, found in self.ours.items() if (i, j) in found}
                yield line, column, line.values[j], ours

    def grid(self) -> Grid:
        """For every line a row 'published', and one for each setting of ours that has a figure."""
        table, rows = self.published, []
        for i, line in enumerate(table.lines):
            rows.append([line.label, "published", *(self._printed(value) for value in line.values)])
            for setting, found in self.ours.items():
                cells = [found.get((i, j), Cell({})) for j in range(len(table.columns))]
                if any(cell.values for cell in cells):
                    rows.append(["", f"ours: {setting}", *(self._ours(cell) for cell in cells)])
            if not any((i, j) in found for found in self.ours.values() for j in range(len(line.values))):
                rows.append(["", "ours: not run", *([NONE] * len(line.values))])
        header = ["", "", *(column.name for column in table.columns)]
        return Grid(header, rows, caption=f"{table.number}: {table.title}", code=False, labels=2)

    def _printed(self, value: float | None) -> str:
        if value is None:
            return NONE
        own = len(repr(value).partition(".")[2])
        return f"{value:,.{max(own, self.published.decimals)}f}"

    def _ours(self, cell: Cell) -> str:
        if self.metric.decimals == 0 and cell.mean is not None:
            return f"{cell.mean:,.0f}"
        return cell.shown(self.metric)


@dataclass(frozen=True)
class PaperTables(Forms):
    """All tables of a paper with ours beside them."""

    paper: Paper
    tables: Sequence[PaperComparison]

    @property
    def file(self) -> str:
        return f"paper-{self.paper.name}"

    def text(self) -> str:
        """One table after another."""
        parts = [f"{self.paper.citation}\n{self.paper.link}", "Rows 'published' are the paper's figures, not ours."]
        for one in self.tables:
            grid = one.grid()
            parts.append("\n".join([grid.caption, grid.text(), *([one.published.note] if one.published.note else [])]))
        return joined(*parts)

    __str__ = text

    def markdown(self) -> str:
        """One table after another."""
        parts = [f"# {self.paper.citation}", f"<{self.paper.link}>"]
        parts.append("Rows *published* are the paper's figures, not ours.")
        for one in self.tables:
            grid = one.grid()
            parts += [f"## {grid.caption}", grid.markdown(), one.published.note]
        return joined(*parts)

    def csv(self) -> str:
        """One line a cell; '-' where a figure does not exist."""
        header = ["paper", "table", "row", "column", "metric", "published", "setting", "ours", "std", "seeds"]
        rows = []
        for one in self.tables:
            scale = one.metric.scale
            for line, column, value, ours in one.cells():
                lead = [self.paper.name, one.published.number, line.label, column.name, one.metric.label, value]
                for setting, cell in (ours or {NONE: Cell({})}).items():
                    mean = None if cell.mean is None else cell.mean * scale
                    std = None if cell.std is None else cell.std * scale
                    rows.append([*lead, setting, mean, std, len(cell.values)])
        return Grid(header, rows).csv()

    def latex(self) -> str:
        """A LaTeX table for each table, for the booktabs package."""
        return "\n".join(one.grid().latex() for one in self.tables)

    def write(self, directory: Path) -> list[Path]:
        """Writes paper-NAME.txt, .csv, .md, .tex and .html; returns their paths."""
        from pointsman.lab.report.page import render_paper

        page = write_whole(directory / f"{self.file}.html", render_paper(self))
        return [*super().write(directory), page]


def paper_tables(path: Path | Sequence[Path], name: str) -> PaperTables:
    """A paper's tables with the figures of run and comparison directories beside them.

    Args:
        path: one directory, or several.
        name: "hyperrouter", "x-moe", "mutual-inform", or a file in their format (`published`), called `*.toml`.

    Raises:
        RunError: an unknown paper (with the nearest name), a damaged file, or a path that holds no run.
    """
    paper = open_paper(name)
    paths = [path] if isinstance(path, str | Path) else path
    trained = [run for one in paths for run in read_comparison(Path(one)).runs.values()]
    runs = [run for run in trained if run.done]
    runs += [one for run in runs for one in finetuned(run)]
    tables = [PaperComparison(table, {**counted(table), **measured(table, runs)}) for table in paper.tables]
    return PaperTables(paper, tables)


def measured(table: PublishedTable, runs: Sequence[RunRecord]) -> dict[str, dict[tuple[int, int], Cell]]:
    """Our figures by setting: all runs that match a cell, over seeds."""
    values: dict[str, dict[tuple[int, int], dict[int, float]]] = {}
    for run in runs:
        for i, line in enumerate(table.lines):
            if not belongs(run, line, table.free):
                continue
            for j, column in enumerate(table.columns):
                found = figure(run, table, line, column)
                if found is not None:
                    values.setdefault(setting(run, table), {}).setdefault((i, j), {})[run.seed] = found
    for filled in values.values():
        filled |= averages(table, filled)
    return {name: {place: Cell(seeds) for place, seeds in found.items()} for name, found in values.items()}


def averages(
    table: PublishedTable, values: Mapping[tuple[int, int], Mapping[int, float]]
) -> dict[tuple[int, int], dict[int, float]]:
    """Figures for the columns of averages, of the seeds that have all other columns.

    Args:
        values: (line, column) -> seed -> figure.
    """
    found: dict[tuple[int, int], dict[int, float]] = {}
    of = [(j, column.task or column.name) for j, column in enumerate(table.columns) if column.quantity != "average"]
    for j in (j for j, column in enumerate(table.columns) if column.quantity == "average"):
        for i in range(len(table.lines)):
            for seed in {seed for (line, _), seeds in values.items() if line == i for seed in seeds}:
                mean = average([(task, values.get((i, column), {}).get(seed)) for column, task in of])
                if mean is not None:
                    found.setdefault((i, j), {})[seed] = mean
    return found


def figure(run: RunRecord, table: PublishedTable, line: Line, column: Column) -> float | None:
    """This run's figure for a cell; None unless data, split, k and quantity agree."""
    if column.shift is not None:
        return _shifted(run, column.shift, column.top_k or line.top_k)
    wanted = column.task if column.task is not None else table.data
    if not wanted or column.quantity in (*COUNTED, "average", "none"):
        return None
    rows = [row for row in rows_about(run, wanted) if column.task or row.get("split") == column.split]
    rows = [row for row in rows if (_is_papers_attack(row) if column.attacked else not row.get("attack"))]
    by_k = {int(k): row for row in reversed(rows) if (k := finite(row.get("top_k"))) is not None}
    if not by_k:
        return None
    row = by_k.get(_k_of(run, table, line, column) or max(by_k))
    if row is None:
        return None
    if column.language is not None:
        return finite((row.get("languages") or {}).get(column.language, {}).get("value"))
    if column.quantity == "entropy":
        layers = list((row.get("routers") or {}).values())
        place = column.layer or 0
        return finite(layers[place].get("entropy")) if place < len(layers) else None
    if column.quantity in ("exact_match", "f1_xtreme"):
        return finite(row.get(column.quantity))
    same = table.metric == row.get("metric") or (table.metric == "accuracy" and row.get("metric") == "f1")
    return finite(row.get("value")) if same else None


def _k_of(run: RunRecord, table: PublishedTable, line: Line, column: Column) -> int | None:
    """The k of a cell; None: the largest. -1, which no run has: it was trained with another k."""
    wanted = column.top_k or line.top_k
    told = str(run.config.get("train_top_k", ""))
    if not table.trained_k or not told.isdecimal():
        return wanted
    if has_one_k(run.router):
        return None
    return -1 if wanted and wanted != int(told) else int(told)


def _shifted(run: RunRecord, shift: str, top_k: int | None) -> float | None:
    """Accuracy of a run on images at this k: on its own test part ("clean") or on shifted images."""
    if run.family != "vit":
        return None
    if shift == "clean":
        return finite(run.results().get(top_k or 0, {}).get("value"))
    for file in sorted(run.path.glob(f"robust-{shift}*.json")):
        rows = [row for row in read_object(file).get("results", ()) if row.get("top_k") == top_k]
        values = [value for row in rows if (value := finite(row.get("value"))) is not None]
        if values:
            return math.fsum(values) / len(values)
    return None


def rows_about(run: RunRecord, wanted: str) -> list[Mapping[str, Any]]:
    """Results on a corpus or task: of evaluation.json, then of the files that `pointsman evaluate` wrote beside it."""
    found: list[Any] = list(run.evaluation.get("results", ())) if dataset(run) == wanted else []
    for file in (*sorted(run.path.glob("evaluation-*.json")), *sorted(run.path.glob("attacks-*.json"))):
        named = re.fullmatch(r"(?:evaluation|attacks-[a-z]+)-(.+)-(?:train|valid|test)", file.stem)
        if named and re.split("[,:]", named[1])[0] == wanted:
            found += read_object(file).get("results", ())
    return [row for row in found if isinstance(row, dict)]


def _is_papers_attack(row: Mapping[str, Any]) -> bool:
    """Whether words were swapped at the default of `--attack-rate`; the paper does not state its rate."""
    attack = row.get("attack")
    return isinstance(attack, dict) and attack.get("kind") == "word" and attack.get("rate") == 0.025


def dataset(run: RunRecord) -> str:
    """The corpus or task of a run, without options and folders; "multilingual" of all multilingual text."""
    data = str(run.config.get("data", ""))
    name = data.partition(":")[0]
    return "multilingual" if name in ("multilingual", "xtreme-text") else Path(data).name.partition(":")[0]


def belongs(run: RunRecord, line: Line, free: Sequence[str] = ()) -> bool:
    """Whether a run matches a line: its router, and for a fine-tuned run freezing and balance loss, unless `free`."""
    if canonical(run.router) not in {canonical(spec) for spec in line.routers}:
        return False
    about = read_object(run.path / FINETUNE)
    if not about:
        return line.balance is None and not line.frozen
    if about.get("from_scratch"):
        return False
    if "frozen" not in free and ("router" in (about.get("freeze") or ())) != line.frozen:
        return False
    return "balance" in free or finite(about.get("balance")) == line.balance


def finetuned(run: RunRecord) -> list[RunRecord]:
    """The finished fine-tunings of a run, with a seed of their own for each pair of pre-training and fine-tuning."""
    found = [read_run(path) for path in finetuned_runs(run.path, having=FINETUNE)]
    return [replace(one, seed=10**9 * run.seed + one.seed) for one in found if one.done]


def setting(run: RunRecord, table: PublishedTable) -> str:
    """A run's preset and steps in words, and whether they are the paper's."""
    preset, steps = str(run.config.get("preset") or "own settings"), run.steps
    if (run.path / FINETUNE).is_file():
        preset = run.path.parent.name
        tasks = {column.task for column in table.columns if column.task}
        if len(tasks) > 1 and tasks <= set(XTREME_TASKS):  # a row for all tasks
            return _setting_of_all_tasks(run, table)
    told = preset if steps is None else f"{preset}, {steps:,} steps"
    if run.family == "vit":
        told = f"{told}, {dataset(run)}"
    elif dataset(run) == "multilingual":
        told = f"{told}, {Path(str(run.config['data'])).name.partition(':')[0]}"
    if preset in table.presets and (table.steps is None or steps == table.steps) and _has_settings_of(run, preset):
        return told
    return f"{told} (not the paper's setting)"


def _setting_of_all_tasks(run: RunRecord, table: PublishedTable) -> str:
    """Pre-training and fine-tuning in words, without the task; freezing and balance only where no line says them."""
    before = read_run(pretrained_of(run.path))
    words = run.path.parent.name.partition(",")[2].split(",")
    words = [word for word in words if word and word.partition("=")[0] not in _said_by(table)]
    told = ", ".join([str(before.config.get("preset") or "own settings"), f"{before.steps or 0:,} steps", "fine-tuned"])
    papers = "finetune-xmoe" in words and _has_settings_of(before, "xmoe-base")
    told = " ".join([told, *words])
    return told if papers else f"{told} (not the paper's setting)"


def _said_by(table: PublishedTable) -> set[str]:
    """Words of a variant that the table's lines stand for."""
    said = {"freeze"} if any(line.frozen for line in table.lines) else set()
    return said | ({"balance"} if any(line.balance is not None for line in table.lines) else set())


def _has_settings_of(run: RunRecord, preset: str) -> bool:
    """Whether a run's settings are the preset's or recipe's, except router, seed, data and evaluation."""
    from pointsman.lab.training.config import NO_EFFECT_ON_TRAINING

    expected = named(preset, router=run.router)
    if expected is None:
        return False
    free = {"model.router", "seed", "data", "preset"} | NO_EFFECT_ON_TRAINING
    return not deviations(run.config, expected).keys() - free


def canonical(spec: str) -> str:
    """A spec with sorted options and normalized numbers, so that equal routers have equal specs."""
    name, plus, mixer = spec.strip().partition("+")
    return _part(name) + plus + _part(mixer)


def _part(text: str) -> str:
    name, *options = text.split(":")
    return ":".join([name, *sorted(map(_option, options))])


def _option(option: str) -> str:
    key, _, value = option.partition("=")
    try:
        return f"{key}={float(value):.9g}"
    except ValueError:
        return f"{key}={value.lower()}"


def counted(table: PublishedTable) -> dict[str, dict[tuple[int, int], Cell]]:
    """Figures that follow from the model alone: FLOPs and parameters of HyperRouter's small model (V = 204)."""
    if not any(column.quantity in COUNTED for column in table.columns):
        return {}
    from pointsman.lab.models.cost import cost_row
    from pointsman.lab.recipes import preset

    cells: dict[tuple[int, int], Cell] = {}
    for i, line in enumerate(table.lines):
        config = preset("small", router=line.routers[0], data="enwik8").with_vocabulary(204).model
        ks = [column.top_k for column in table.columns if column.top_k]
        row = cost_row(config, ks)
        for j, column in enumerate(table.columns):
            value: float | None
            if column.quantity == "flops":
                flops = row.flops.get(column.top_k or 0)
                value = None if flops is None else flops / 1e10
            elif column.quantity == "fixed_a_layer":
                value = row.fixed_a_layer if line.routers == ("hyperrouter",) else None
            else:
                value = getattr(row.parameters, column.quantity) or None
            if value is not None and math.isfinite(value) and (line.values[j] is not None):
                cells[i, j] = Cell({0: float(value)})
    return {COUNTED_SETTING: cells}
