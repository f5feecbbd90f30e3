"""Which run of ours belongs to which cell of a published table, and its figure."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._values import finite
from pointsman_lab.registry import OLDEST, entries, trains
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.commands import deviations, named
from pointsman_lab.report.published import COUNTED, Column, Line, PublishedTable
from pointsman_lab.report.task_table import pretrained_of
from pointsman_lab.runs.paths import FINETUNE, finetuned_runs
from pointsman_lab.runs.record import RunRecord, read_object, read_run
from pointsman_lab.training.settings import without_effect

XMOE = "finetune-xmoe"
COUNTED_SETTING = "counted from the model"
Figures = dict[tuple[int, int], dict[int, float]]
"""(line, column) of a table -> seed -> figure."""


def measured(table: PublishedTable, runs: Sequence[RunRecord]) -> dict[str, dict[tuple[int, int], Cell]]:
    """Our figures by setting: all runs that match a cell, over seeds. Of several routers of one line each is named."""
    values: dict[str, Figures] = {}
    taken: dict[tuple[str, int, int, int], Path] = {}
    lines = list(enumerate(table.lines))
    placed = [(run, setting(run, table), i) for run in runs for i, line in lines if belongs(run, line, table.free)]
    routers: dict[tuple[str, int], set[str]] = {}
    for run, told, i in placed:
        routers.setdefault((told, i), set()).add(canonical(run.router))
    for run, told, i in placed:
        told = told if len(routers[told, i]) == 1 else f"{told}, {run.router}"
        for j, column in enumerate(table.columns):
            found = figure(run, table, table.lines[i], column)
            if found is None:
                continue
            if (other := taken.setdefault((told, i, j, run.seed), run.path)) != run.path:
                raise RunError(f"{other} and {run.path}: both are seed {run.seed} of {told}; name one of them")
            values.setdefault(told, {}).setdefault((i, j), {})[run.seed] = found
    for filled in values.values():
        filled |= averages(table, filled)
    return {name: {place: Cell(seeds) for place, seeds in found.items()} for name, found in values.items()}


def averages(table: PublishedTable, values: Figures) -> Figures:
    """Figures for the columns of averages, of the seeds that have all other columns."""
    found: Figures = {}
    of = [(j, column.task or column.name) for j, column in enumerate(table.columns) if column.quantity != "average"]
    for j in (j for j, column in enumerate(table.columns) if column.quantity == "average"):
        for i in range(len(table.lines)):
            for seed in {seed for (line, _), seeds in values.items() if line == i for seed in seeds}:
                mean = average([(task, values.get((i, column), {}).get(seed)) for column, task in of])
                if mean is not None:
                    found.setdefault((i, j), {})[seed] = mean
    return found


def average(figures: Sequence[tuple[str, float | None]]) -> float | None:
    """The mean over tasks of each task's mean, from (task, figure) of each column: questions count (F1 + EM) / 2."""
    tasks: dict[str, list[float]] = {}
    for task, figure in figures:
        if figure is None:
            return None
        tasks.setdefault(task, []).append(figure)
    return statistics.fmean(map(statistics.fmean, tasks.values())) if tasks else None


def figure(run: RunRecord, table: PublishedTable, line: Line, column: Column) -> float | None:
    """This run's figure for a cell; None unless data, split, k and quantity agree."""
    if column.shift is not None:
        return trains(run.family or OLDEST).published(run, column, column.top_k or line.top_k)
    wanted = column.task if column.task is not None else table.data
    if not wanted or column.quantity in (*COUNTED, "average", "none"):
        return None
    if re.search("XNLI-dev|dev reported", str(run.evaluation.get("protocol", {}).get("task"))):
        return None  # of an earlier version, whose `xnli` and `panx` read development sets
    if column.task is None and dataset(run) != wanted:  # evaluated on it alone
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
    from pointsman.routers.frame.registry import has_one_k  # torch, which few tables need

    if has_one_k(run.router):
        return None
    return -1 if wanted and wanted != int(told) else int(told)


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
    kind, _, rest = data.partition(":")
    if kind in ("multilingual", "xtreme-text"):
        return "multilingual"
    return Path(rest if kind in ("parallel", "wmt") else data).name.partition(":")[0]


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
    """A run's preset, steps and other changed settings in words, and whether they are the paper's."""
    preset, steps = str(run.config.get("preset") or "own settings"), run.steps
    if (run.path / FINETUNE).is_file():
        preset = run.path.parent.name
        tasks = {column.task for column in table.columns if column.task}
        if len(tasks) > 1 and any(tasks <= set(entry.together) for entry in entries()):  # a row for all tasks
            return _setting_of_all_tasks(run, table)
    told = preset if steps is None else f"{preset}, {steps:,} steps"
    if data := trains(run.family or OLDEST).data_of(run):
        told = f"{told}, {data}"
    changed = changed_settings(run, preset)
    if preset in table.presets and (table.steps is None or steps == table.steps) and changed == {}:
        return told
    told = ", ".join([told, *(f"{key}={value}" for key, value in (changed or {}).items() if key != "steps")])
    return f"{told} (not the paper's setting)"


def _setting_of_all_tasks(run: RunRecord, table: PublishedTable) -> str:
    """Pre-training and fine-tuning in words, without the task; freezing and balance only where no line says them."""
    before = read_run(pretrained_of(run.path))
    words = run.path.parent.name.partition(",")[2].split(",")
    said = {"freeze" for line in table.lines if line.frozen}
    said |= {"balance" for line in table.lines if line.balance is not None}
    words = [word for word in words if word and word.partition("=")[0] not in said]
    told = ", ".join([str(before.config.get("preset") or "own settings"), f"{before.steps or 0:,} steps", "fine-tuned"])
    papers = XMOE in words and changed_settings(before, "xmoe-base") == {} and _is_papers_fine_tuning(run, table)
    told = " ".join([told, *words])
    return told if papers else f"{told} (not the paper's setting)"


def _is_papers_fine_tuning(run: RunRecord, table: PublishedTable) -> bool:
    """Whether a fine-tuning has the languages of its column, and the steps and other settings of X-MoE's preset."""
    from pointsman_lab.finetuning.settings import Finetuning  # torch, which few tables need

    languages = {column.languages for column in table.columns if column.task == dataset(run)}
    scored = {len(row.get("languages") or ()) for row in run.evaluation.get("results", ())}
    told = str(run.evaluation.get("protocol", {}).get("task"))
    rows = re.search(r"\(en ([\d,]+); .* of which ([\d,]+) for validation; reported", told)
    if not scored or not scored <= languages or rows is None or run.steps is None:
        return False
    every, held = (int(number.replace(",", "")) for number in rows.groups())
    usual = Finetuning(dataset(run), preset=XMOE).defaults
    wanted = {"batch_size": usual.batch_size, "segment_length": usual.length, **usual.settings(run.steps, XMOE)}
    steps = round(usual.epochs * -(-(every - held) // usual.batch_size))
    return run.steps == steps and wanted.items() <= run.config.items()


def changed_settings(run: RunRecord, preset: str) -> dict[str, Any] | None:
    """The settings of a run that are not the preset's or recipe's, except router, seed, data and evaluation.

    None where there is no preset or recipe of that name.
    """
    expected = named(preset, router=run.router)
    if expected is None:
        return None
    free = {"model.router", "seed", "data", "preset"} | without_effect(run.family or OLDEST)
    return {key: value for key, value in deviations(run.config, expected).items() if key not in free}


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
    from pointsman_lab.models.cost import cost_row
    from pointsman_lab.recipes import preset

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
