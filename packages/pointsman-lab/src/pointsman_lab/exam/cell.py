"""A cell of the table: a row on a task. Rate and open options are chosen first, on seeds of their own."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman.routers.frame.registry import parse_spec
from pointsman_lab._files import place_of, read_json, within, write_whole
from pointsman_lab.exam.run import run
from pointsman_lab.exam.student import ROWS
from pointsman_lab.exam.task import Task
from pointsman_lab.runs.paths import slug

VERSION = 1
"""Of tasks and training: figures of another version are not compared."""

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
FIRST = RATES[3:8]
"""The five rates that every row tries. Where the best of them is the least or the largest, the next one is tried too,
until the best lies between two others."""
TUNING_SEEDS = (1000, 1001)
"""The first sees every choice, the second the best `KEPT` of them."""
KEPT = 2

OPEN = {
    "similarity": ("tau", ("0.1", "1", "8")),
    "hyperrouter": ("embed_dim", ("8", "32", "128")),
    "xmoe": ("routing_dim", ("4", "16", "full")),
    "loss-free": ("rate", ("0.001", "0.01")),
    "hash": ("kind", ("random", "balanced")),
    "top-p": ("tau", ("0.4", "0.8")),
    "stable": ("stage_one", ("50", "200")),
    "depths": ("share", ("0.125", "0.5", "1")),
}
"""Router or mixer -> the option that its paper leaves open, or that depends on the number of steps, and its choices.

The updates quantile and none of loss-free have no rate."""


def variants(row: str) -> list[str]:
    """The row with each choice of an open option; the row itself where there is none, or where it says which."""
    if row in ROWS:
        return [row]
    parsed = parse_spec(row)
    routers, plus, mixer = row.partition("+")
    scores, at, choice = routers.partition("@")
    for name, options, head, tail in (
        (parsed.mixer, parsed.mixer_options, row, ""),
        (parsed.choice, parsed.choice_options, routers, plus + mixer),
        (parsed.router, parsed.options, scores, at + choice + plus + mixer),
    ):
        if name in OPEN and OPEN[name][0] not in options and options.get("update") not in ("quantile", "none"):
            option, choices = OPEN[name]
            return [f"{head}:{option}={one}{tail}" for one in choices]
    return [row]


def path_of(out: Path, task: str, row: str) -> Path:
    return within(out, "cells", task, f"exam-{slug(row)}.json")


def read_cell(out: Path, task: str, row: str) -> dict[str, Any]:
    """What a directory has of a cell: tried [[spec, rate, seed, value]], chosen {spec, rate}, runs {seed: result}.

    Raises:
        RunError: its file is damaged, or that of another row.
    """
    cell = {"row": row, "tried": [], "runs": {}, **(read_json(file := path_of(out, task, row)) or {})}
    if cell["row"] != row:
        raise RunError(f"{file} is of row {cell['row']!r}, not of {row!r}: bring its own back, or remove it")
    return cell


def is_whole(cell: Mapping[str, Any], seeds: int) -> bool:
    return "refused" in cell or all(str(seed) in cell["runs"] for seed in range(seeds))


def count(row: str, seeds: int, cell: Mapping[str, Any]) -> tuple[int, int]:
    """How many runs a cell has, and how many it takes if the rates that were tried hold the best one between them."""
    tried = len(cell["tried"])
    rates = max(len(FIRST), len({rate for _, rate, _, _ in cell["tried"]}))
    tuning = tried if "chosen" in cell else rates + len(variants(row)) - 1 + KEPT
    return tried + len(cell["runs"]), tuning + max(seeds, len(cell["runs"]))


def fill(
    task: Task, row: str, seeds: int, out: Path, check: Callable[[], None], told: Callable[[Mapping[str, Any]], None],
    place: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Does what is missing of a cell; every run that ends is kept, one that is interrupted starts anew.

    Args:
        told: gets the cell after each run.
        place: `place_of` the directory as the command began.
    """
    cell, place = read_cell(out, task.name, row), place or place_of(out)

    def keep() -> None:
        if place and place_of(out) != place:
            raise RunError(f"{out} was removed or renamed while the exam trained; nothing more is saved")
        write_whole(path_of(out, task.name, row), json.dumps(cell) + "\n")
        told(cell)

    def done(spec: str, seed: int, rate: float) -> dict[str, Any]:
        try:
            return run(task, spec, seed, rate, check)
        except ValueError as error:
            task.world(0)  # raises where the task's data is missing, which is no fault of the row
            raise _RefusedError(" ".join(str(error).split())) from None
        except Exception as error:
            error.add_note(f"on the exam's task {task.name}: {spec}, seed {seed}; every run that ended is kept")
            raise

    def value(spec: str, rate: float, seed: int) -> float:
        for one in cell["tried"]:
            if one[:3] == [spec, rate, seed]:
                return math.inf if one[3] is None else float(one[3])
        found = done(spec, seed, rate)["value"]
        cell["tried"].append([spec, rate, seed, found])
        keep()
        return math.inf if found is None else float(found)

    try:
        if "chosen" not in cell:
            spec, rate = chosen(row, value)
            cell["chosen"] = {"spec": spec, "rate": rate}
        for seed in range(seeds):
            if str(seed) not in cell["runs"]:
                cell["runs"][str(seed)] = done(cell["chosen"]["spec"], seed, cell["chosen"]["rate"])
                keep()
    except _RefusedError as error:
        cell["refused"] = str(error)
        keep()


class _RefusedError(Exception):
    """The router cannot take the task; what the disk refuses is another matter."""


def chosen(row: str, value: Callable[[str, float, int], float]) -> tuple[str, float]:
    """The spec and the rate with the least mean value on the tuning seeds.

    Rates are tried with the first choice of an open option (`FIRST`), the other choices at the best of these rates; the
    best `KEPT` are tried on a second seed. A rate with no worse one on one of its sides is never kept.
    """
    first, *others = variants(row)
    tried = {rate: value(first, rate, TUNING_SEEDS[0]) for rate in FIRST}
    while True:
        best = min(tried, key=lambda rate: tried[rate])
        place = RATES.index(best)
        wanted = [rate for rate in RATES[max(place - 1, 0) : place + 2] if rate not in tried]
        if not wanted:
            break
        tried |= {rate: value(first, rate, TUNING_SEEDS[0]) for rate in wanted}
    inner = sorted(tried)[1:-1] if len(tried) > 2 else tried
    found = {(first, rate): tried[rate] for rate in sorted({*inner, best})}
    found |= {(spec, best): value(spec, best, TUNING_SEEDS[0]) for spec in others}
    kept = sorted(found, key=lambda one: found[one])[:KEPT]
    return min(kept, key=lambda one: found[one] + value(one[0], one[1], TUNING_SEEDS[1]))
