"""`pointsman exam`: a report card of routers on tasks whose best routing is known."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pointsman._errors import RunError
from pointsman_lab.cli.options import Parser, whole, words
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.cli.runs import use_recorded_imports

if TYPE_CHECKING:
    from pointsman_lab.exam.exam import Plan

EPILOG = """examples:
  pointsman exam mine.py --quick          # its routers; 4 tasks, 2 seeds
  pointsman exam mine.py --out runs/exam  # all tasks, 8 seeds
  pointsman exam xmoe,loss-free:rate=0.01 --tasks clusters,zipf
  pointsman exam all --again              # every router, nothing is taken over

Oracle, plain, dense, hash and thor are rows of every exam. Rows that the
package's record knows are taken from it, unless --again trains them too.
Score: (plain - row) / (plain - oracle). After an interruption the same
command continues.
"""
QUICK_SEEDS = 2


def parser() -> Parser:
    flags = Parser("exam", "Examine routers on tasks whose best routing is known.", EPILOG)
    flags.add("routers ROUTERS|FILE.py", "specs (A,B,C), a file that registers some, or all")
    flags.add("--tasks A,B,C", "which tasks (default: all)", type=words)
    flags.add("--seeds", "how many seeds (default: 8)", default=8)
    flags.add("--quick", "4 tasks and 2 seeds: about two minutes", action="store_true")
    flags.add("--jobs N", "processes, one thread each (default: the cores)", type=whole(1))
    flags.add("--again", "train also what the record knows", action="store_true")
    flags.common("the exam's directory (default: runs/exam, or runs/exam-quick)", "")
    flags.only_cpu = "the exam runs on the CPU"
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    if values.quick:
        flags.without_effect(values, ["--tasks", "--seeds"], "with --quick, which has its own")
    from pointsman_lab.exam.card import Card, told_card
    from pointsman_lab.exam.exam import collect, examine
    from pointsman_lab.processes import available_cores

    out = values.out = values.out or Path("runs") / ("exam-quick" if values.quick else "exam")
    plan = plan_of(values)
    with Display() as display, stop_on_signals() as stop:
        whole_plan = examine(
            plan, out, jobs=values.jobs or available_cores(), progress=display, ended=lambda: None, stop=stop
        )
    card = Card(whole_plan.tasks, collect(whole_plan, out), whole_plan.rows)
    told = told_card(card, out)
    card.print()
    print(f"\n{told}", file=sys.stderr)
    if crashed := whole_plan.crashed:
        print(
            f"pointsman: a router crashed, see above: {', '.join(crashed)}; the same command tries again",
            file=sys.stderr,
        )
    return int(bool(crashed))


def plan_of(values: argparse.Namespace) -> Plan:
    """What the flags ask for."""
    from pointsman.routers.frame.registry import list_mixers, list_routers, parse_spec
    from pointsman_lab.exam.exam import ALWAYS, Plan
    from pointsman_lab.exam.scores import QUICK, tasks
    from pointsman_lab.exam.student import ROWS
    from pointsman_lab.runs.imports import import_named

    imports = list(values.imports)
    if values.routers.endswith(".py"):
        known, modules = set(list_routers()), set(sys.modules)
        imports.append(import_named(values.routers))
        rows, others = routers_of(imports[-1], known, modules)
        if not rows:
            specs = ",".join([*others, *(f"smoe+{name}" for name in list_mixers())])
            raise RunError(
                f"{values.routers} registers no router itself; name specs instead: --import {values.routers} {specs}"
            )
        if others:
            specs = ",".join(others)
            told = f"not examined, since modules that {values.routers} imports register them"
            print(f"pointsman: {told}: {specs} (--import {values.routers} {specs} does)", file=sys.stderr)
    elif values.routers == "all":
        rows = [*list_routers(), *MORE]
    else:
        try:
            rows = words(values.routers)
        except argparse.ArgumentTypeError as error:
            raise RunError(f"pointsman exam: {error}") from None
        use_recorded_imports(values, rows)
        imports = values.imports
        for row in set(rows) - set(ROWS):  # before the data of the tasks is read, which takes a minute
            parse_spec(row)
    named = tasks(list(QUICK) if values.quick else values.tasks)
    seeds = QUICK_SEEDS if values.quick else int(values.seeds)
    every = tuple(dict.fromkeys([*ALWAYS, *rows]))
    return Plan(every, tuple(one.name for one in named), seeds, tuple(imports), values.again)


def routers_of(file: str, known: set[str], modules: set[str]) -> tuple[list[str], list[str]]:
    """The routers of an imported file, and those of the modules that it imported.

    The others' are those of a new module that registers some: a module that only defines functions lends them to it.

    Args:
        file: its path.
        known, modules: the routers and the modules there were before its import.
    """
    from pointsman.routers.frame.registry import ROUTERS, list_routers

    rows, others = list[str](), list[str]()
    for name in list_routers():
        module = sys.modules.get((ROUTERS[name].choose or ROUTERS[name].build).__module__)
        if getattr(module, "__file__", "") == file:  # also where --import has named it before
            rows.append(name)
        elif name not in known:
            elsewhere = module is not None and module.__name__ not in modules and registers(module)
            (others if elsewhere else rows).append(name)
    return rows, others


def registers(module: ModuleType) -> bool:
    """Whether the text of a module registers routers."""
    try:
        return "register_router" in inspect.getsource(module)
    except (OSError, TypeError):  # it has no text
        return False


MORE = (
    "hyperrouter@loss-free",
    "xmoe@expert-choice",
    "smoe:balance=0.01", "smoe+similarity", "smoe+uniform", "smoe+shuffled", "loss-free+similarity",
    "xmoe+similarity", "loss-free:nulls=8", "smoe:gate=sigmoid",
)  # fmt: skip
"""Rows of `all` besides every router with its defaults."""
