"""An exam: rows and tasks in a directory that grows; what is known comes from the record of all routers."""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, Stopped
from pointsman.routers.frame.registry import parse_spec
from pointsman_lab._files import alone, parse_json, place_of, read_json, write_whole
from pointsman_lab.exam.cell import VERSION, count, fill, is_whole, read_cell
from pointsman_lab.exam.scores import TASKS, Cells
from pointsman_lab.exam.student import ROWS
from pointsman_lab.exam.task import Task
from pointsman_lab.processes import out_of_memory
from pointsman_lab.progress import Progress, Stop, check_stop
from pointsman_lab.runs.compact import rounded
from pointsman_lab.runs.imports import check_imported, check_origin, import_named, named_before, origin_of, present
from pointsman_lab.training.jobs import Work, do_all

PLAN, RECORD = "exam.json", "record.jsonl"
ALWAYS = ("oracle", "plain", "dense", "hash", "thor")
"""Rows of every exam."""
SEEDS = 8
"""Of the record, and of the leaderboard's track."""


@dataclass(frozen=True)
class Plan:
    """What a directory holds or will hold."""

    rows: tuple[str, ...]
    tasks: tuple[str, ...]
    seeds: int
    imports: tuple[str, ...] = ()
    again: bool = False
    crashed: tuple[str, ...] = ()

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(task, row), row by row, those first that all scores need: whatever is done by then makes whole rows."""
        first = [row for row in ("oracle", "plain") if row in self.rows]
        return [(task, row) for row in dict.fromkeys([*first, *self.rows]) for task in self.tasks]


def record() -> dict[tuple[str, str], dict[str, Any]]:
    """The committed record of this version of the exam: (task, row) -> cell."""
    return read_record(resources.files("pointsman_lab.exam") / RECORD)


def read_record(file: Traversable) -> dict[tuple[str, str], dict[str, Any]]:
    """The cells of a record's file, if there is one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    entries = [parse_json(line) for line in lines]
    return {(one["task"], one["row"]): one for one in entries if one["version"] == VERSION}


def written_record(cells: Cells) -> str:
    """`record`'s file: four digits, and of curves and confusions those of the first seed."""

    def entry(task: str, row: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        runs = {seed: {key: value for key, value in run.items() if seed == "0" or key not in ("curve", "confusion")}
                for seed, run in cell["runs"].items()}  # fmt: skip
        kept = {key: cell[key] for key in ("tried", "chosen", "refused") if key in cell}
        return {"version": VERSION, "task": task, "row": row, **kept, "runs": runs}

    entries = [rounded(entry(*place, cell)) for place, cell in cells.items()]
    return "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in entries)


def merged(plan: Plan, out: Path) -> Plan:
    """The plan together with what the directory holds already.

    Raises:
        RunError: it holds something else, or an exam of another version.
    """
    before = read_json(out / PLAN)
    if before is None:
        if out.exists() and any(not entry.name.startswith(".") for entry in out.iterdir()):
            raise RunError(f"{out} is not empty and holds no exam; choose another --out")
        return plan
    if before["version"] != VERSION:
        raise RunError(f"{out} holds version {before['version']} of the exam, this is {VERSION}; choose another --out")
    for row in plan.rows:
        check_origin(out, before.get("origins", {}).get(row), row)
    return replace(
        plan,
        rows=tuple(dict.fromkeys([*before["rows"], *plan.rows])),
        tasks=tuple(name for name in TASKS if name in {*before["tasks"], *plan.tasks}),
        seeds=max(before["seeds"], plan.seeds),
        imports=tuple(dict.fromkeys([*map(present, before.get("imports", ())), *plan.imports])),
    )


def plan_in(out: Path) -> Plan:
    """The plan of an exam's directory.

    Raises:
        RunError: it holds an exam of another version, or tasks that are not here.
    """
    found = read_json(out / PLAN) or {}
    if found.get("version") != VERSION or not set(found["tasks"]) <= TASKS.keys():
        raise RunError(f"{out} holds version {found.get('version')} of the exam or other tasks, this is {VERSION}")
    return Plan(tuple(found["rows"]), tuple(found["tasks"]), found["seeds"], tuple(found.get("imports", ())))


def examine(
    plan: Plan,
    out: Path,
    *,
    jobs: int,
    progress: Progress,
    ended: Callable[[], None],
    stop: Stop | None = None,
    known: Cells | None = None,
) -> Plan:
    """Trains what is missing; returns the plan of the whole directory, with the cells in which a router crashed.

    Args:
        jobs: how many cells at a time, each in one thread; any number gives the same bits.
        ended: called after each cell.
        known: cells that are not trained; by default those of the record, unless the plan says `again`.

    Raises:
        RunError: the directory holds something else, or another process works in it.
        Stopped: `stop` was set; every run that ended is kept.
    """
    for row in plan.rows:
        if row not in ROWS:
            parse_spec(row)
    check_imported([row for row in plan.rows if row not in ROWS], Task.dim, Task.experts)
    merged(plan, out)  # where it is refused, nothing is written
    with alone(out):
        whole = merged(plan, out)
        before = read_json(out / PLAN) or {"rows": [], "origins": {}}
        origins = {row: origin for row in plan.rows if (origin := origin_of(row))}
        origins |= before.get("origins", {})
        values = {"version": VERSION, "rows": whole.rows, "tasks": whole.tasks, "seeds": whole.seeds}
        write_whole(out / PLAN, json.dumps({**values, "imports": whole.imports, "origins": origins}, indent=2) + "\n")
        if known is None:
            known = {} if plan.again else record()
        todo = [
            place for place in plan.cells
            if not is_whole(read_cell(out, *place), plan.seeds)
            and not (place in known and is_whole(known[place], plan.seeds))
        ]  # fmt: skip

        titles = [f"{number}/{len(todo)} {' '.join(place)}" for number, place in enumerate(todo, 1)]
        setup = partial(worker, out, plan.seeds, named_before(plan.imports), place_of(out))
        do_all(todo, titles, setup, setup, jobs, progress=progress, ended=lambda _: ended(), stop=stop)
        crashed = [" ".join(place) for place in todo if not is_whole(read_cell(out, *place), plan.seeds)]
    return replace(whole, crashed=tuple(crashed))


def worker(out: Path, seeds: int, imports: Sequence[str], held: tuple[int, int] | None) -> Work:
    """What does a cell in a process of its own, in the directory whose `place_of` is `held`."""
    for name in imports:
        import_named(name)

    origins = (read_json(out / PLAN) or {}).get("origins", {})

    def work(place: tuple[str, str], progress: Progress, stop: Stop | None) -> None:
        task, row = place
        check_origin(out, origins.get(row), row)  # its file may have changed since the command read it

        def check() -> None:
            try:
                check_stop(stop)
            except Stopped:
                raise Stopped("stopped; every run that ended is kept: the same command goes on") from None

        shown = 0

        def told(cell: Mapping[str, Any]) -> None:
            nonlocal shown
            done, total = count(row, seeds, cell)
            if total != shown:
                progress.phase("runs", shown := total, done)
            progress.advance(done, {})

        told(read_cell(out, task, row))
        try:
            fill(TASKS[task], row, seeds, out, check, told, held)
        except (Stopped, ValueError, OSError, ImportError):
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            for line in traceback.format_exc().splitlines():
                progress.note(line)

    return work


def collect(plan: Plan, out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The cells that have runs: of the directory, and where it has none, of the record."""
    known = {} if plan.again else record()
    found = {}
    for place in plan.cells:
        cell = read_cell(out, *place)
        if "refused" not in cell and not is_whole(cell, plan.seeds):
            cell = max(cell, known.get(place, cell), key=lambda one: len(one["runs"]))
        if cell["runs"] or "refused" in cell:
            found[place] = cell
    return found
