"""`pointsman finetune RUN`: fine-tunes a pre-trained run on a task."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError, Stopped
from pointsman_lab._files import within
from pointsman_lab.cli.options import Parser, choose_device, number_from, numbers, overrides, whole, words
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.registry import entries
from pointsman_lab.runs.paths import finetuned_path
from pointsman_lab.runs.record import RunRecord, read_run

if TYPE_CHECKING:
    from pointsman_lab.finetuning import Finetuning
    from pointsman_lab.report.forms import Forms
    from pointsman_lab.training.jobs import Hosts

EPILOG = """After an interruption the same command continues.
"""


def parser() -> Parser:
    flags = Parser("finetune", "Fine-tune a pre-trained run on a task.", EPILOG)
    flags.add("run RUN", "the pre-trained run's directory", type=Path)
    flags.add("--task NAME|PATH", "the task, also as PATH:text=COLUMN:label=COLUMN")
    flags.add("--steps", "optimizer steps", dest="task_steps")
    flags.add("--epochs N", "passes over the training split", type=number_from(0, name="epochs"), dest="task_epochs")
    flags.add("--seeds")
    flags.add("--top-k", "the k values of the evaluation (default: the run's)")
    flags.add("--eval-tokens", "tokens of the test split to score, in whole texts")
    add_task_settings(flags)
    flags.common("the run directory (default: RUN/finetune/TASK/seed-S; with several runs: a folder of them)")
    return flags


TASK_FLAGS = (
    "--task-routers", "--task-steps", "--task-epochs", "--task-set", "--task-seeds", "--task-top-k", "--freeze",
    "--balance", "--pooling", "--length", "--from-scratch", "--task-preset",
)  # fmt: skip
"""Flags of `compare` without effect unless `--task` is given."""


def add_task_settings(flags: Parser) -> None:
    """Flags of both `finetune` and `compare --task`."""
    flags.add("--task-top-k K", "k while fine-tuning (default: the task's)")
    flags.add("--task-preset NAME", "published settings of the task", default="")
    flags.add("--freeze ROLES", "parts that do not train: router,experts, or none", type=words)
    flags.add("--balance A,A", "weight of the balance loss; several: one run each", type=numbers())
    flags.add("--pooling HOW", "last, first or mean hidden state (default: the task's)")
    flags.add("--length N", "tokens of a text (default: the task's)", type=whole(2, "length"))
    flags.add("--from-scratch", "fresh weights instead of the pre-trained ones", action="store_true")


def add_compare_flags(flags: Parser) -> None:
    """--task and its flags, for `compare`."""
    flags.add("--task A,B", "fine-tune every row on these tasks; without --routers: rows that are trained", type=words)
    flags.add("--task-routers A,B", "fine-tune these rows only (default: all)", type=words)
    flags.add("--task-steps N", "steps of a fine-tuning (default: the paper's)", type=whole(1))
    told = "the same as passes over the training split"
    flags.add("--task-epochs N", told, type=number_from(0, name="epochs"))
    flags.add("--task-set KEY=VALUE", "any setting of the fine-tunings", action="append", default=[])
    flags.add("--task-seeds S", "fine-tunings of each run (default: 1)", type=whole(1, "seeds"), default=1)
    add_task_settings(flags)


def settings_of_comparison(values: argparse.Namespace) -> list[Finetuning]:
    """The settings of `compare --task`, one for each task and balance weight."""
    if values.task_steps and values.task_epochs:
        raise RunError("pointsman compare: --task-steps and --task-epochs exclude each other")
    return [one for task in values.task for one in settings_of(values, task, overrides(values.task_set))]


def fine_tune_comparison(values: argparse.Namespace, out: Path, device: str, hosts: Hosts | None = None) -> None:
    """`compare --task` after training: fine-tunes every run, prints and writes a table per task."""
    from pointsman_lab.finetuning import compare_tasks
    from pointsman_lab.finetuning.run import jobs_of
    from pointsman_lab.report.results import write_task_tables
    from pointsman_lab.runs.compact import write_record

    variants = settings_of_comparison(values)

    def write_tables() -> list[Forms]:
        return write_task_tables(out, [one.variant for one in variants])

    with Display() as display, stop_on_signals() as stop:
        compare_tasks(
            out, variants, routers=values.task_routers, repeats=values.task_seeds, device=device,
            jobs=1 if hosts else values.jobs or jobs_of(out, device, values.task_routers), hosts=hosts,
            progress=display, ended=write_tables, stop=stop,
        )  # fmt: skip
    tables = write_tables()
    write_record(out)
    print("\n".join(table.text() for table in tables))
    files = ", ".join(f"{table.file}.txt" for table in tables)
    print(f"saved: {files} in {out}, also .csv, .md, .tex", file=sys.stderr)


def settings_of(values: argparse.Namespace, task: str, changes: Mapping[str, Any]) -> list[Finetuning]:
    """The settings from the flags, and other ones, one for each balance weight."""
    from pointsman_lab.finetuning import Finetuning

    asked = {} if values.top_k is None else {"eval_top_k": values.top_k}
    return [
        Finetuning(
            task, steps=values.task_steps, epochs=values.task_epochs, train_top_k=values.task_top_k,
            freeze=tuple(values.freeze or ()), balance=balance, pooling=values.pooling, length=values.length,
            from_scratch=values.from_scratch, preset=values.task_preset, settings={**changes, **asked},
        )
        for balance in (values.balance or (None,))
    ]  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    if not values.task:
        known = ", ".join(name for entry in entries() for name in entry.learns)
        raise RunError(f"pointsman finetune: --task is missing: {known} or a file")
    if values.task_steps and values.task_epochs:
        raise RunError("pointsman finetune: --steps and --epochs exclude each other")
    device = choose_device(values.device)
    for entry in entries():
        if (code := entry.run("finetune", flags, values, device)) is not None:
            return code
    from pointsman_lab.finetuning import finetune
    from pointsman_lab.finetuning.run import open_task
    from pointsman_lab.report.results import tables_of
    from pointsman_lab.report.task_table import TaskTable
    from pointsman_lab.training.state import Interrupted

    changes: dict[str, Any] = dict(overrides(values.set))
    if values.eval_tokens is not None:
        changes["eval_tokens"] = values.eval_tokens
    variants = settings_of(values, values.task, changes)
    data = open_task(values.task)
    todo = [(settings, seed) for seed in range(values.seeds) for settings in variants]
    found: dict[str, list[RunRecord]] = {}
    with Display() as display, stop_on_signals() as stop:
        for place, (settings, seed) in enumerate(todo, 1):
            out = finetuned_path(values.run, settings.variant, seed)
            if values.out:
                out = values.out if len(todo) == 1 else within(values.out, settings.variant, f"seed-{seed}")
            display.title = f"{place}/{len(todo)} {settings.variant}, seed {seed}"
            try:
                result = finetune(
                    values.run, settings, seed=seed, out=out, data=data, device=device, progress=display, stop=stop
                )
            except Interrupted as saved:
                raise Stopped(f"stopped after step {saved.step} of {out}; saved: the same command continues") from None
            found.setdefault(settings.variant, []).append(read_run(result.out))
            print(f"run: {out}", file=sys.stderr)
    print(data.description, file=sys.stderr)
    for name, runs in found.items():
        print("\n".join(table.text() for table in tables_of(TaskTable.of_runs(name, runs), runs)), end="")
    return 0
