"""`pointsman evaluate … --attack`: text attacks on language models, classifiers and whole comparisons."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError
from pointsman_lab.cli.options import aligned
from pointsman_lab.cli.progress import Display, stop_on_signals

if TYPE_CHECKING:
    from pointsman_lab.tasks.attacks.runs import Budget


def run_attacks(values: argparse.Namespace, device: str) -> int:
    """Evaluates a run, a fine-tuned run or every run of a comparison on clean and attacked texts; prints and saves.

    Without `--attack`, a fine-tuned run is evaluated on clean texts only.
    """
    from pointsman_lab.finetuning.run import is_finetuned
    from pointsman_lab.runs.compact import write_record
    from pointsman_lab.runs.comparison import read_comparison, read_plan
    from pointsman_lab.tasks.attacks.compare import comparison_under_attack
    from pointsman_lab.tasks.attacks.table import attack_tables

    with Display() as display, stop_on_signals() as stop:
        if not is_finetuned(values.run) and read_plan(values.run) is not None:
            name = comparison_under_attack(
                values.run, attacks_of(values), variant=values.task, data=values.data, split=values.split,
                top_k=values.top_k, budget=budget_of(values), device=device, progress=display, stop=stop,
            )  # fmt: skip
            wanted = "-".join([name.replace("attacks-", "attack-", 1), *([values.task] if values.task else [])])
            [table] = [one for one in attack_tables(read_comparison(values.run)) if one.name == wanted]
            paths = table.write(values.out or values.run)
            write_record(values.run)
            print(table.text())
            print(f"saved: {paths[0]}", file=sys.stderr)
            return 0
        if values.task:
            raise RunError(f"--task {values.task}: {values.run} is not a comparison; name the fine-tuned run")
        record, name = _one(values, device, display, stop)
    from pointsman._files import write_whole

    file = (values.out or values.run) / f"{name}.json"
    write_whole(file, json.dumps(record, indent=2) + "\n")
    print(result_table(record["results"]))
    print(f"\n{record['protocol'].get('data', '')}\nsaved: {file}", file=sys.stderr)
    return 0


def _one(values: argparse.Namespace, device: str, display: Display, stop: Any) -> tuple[dict[str, Any], str]:
    """The record of one run, and its file's name."""
    from pointsman_lab.finetuning.run import is_finetuned, load_finetuned
    from pointsman_lab.tasks.attacks.runs import finetuned_under_attack, run_under_attack
    from pointsman_lab.tasks.classification.task import texts_of
    from pointsman_lab.training.run import load_run

    if is_finetuned(values.run):
        if values.data:
            raise RunError(f"--data: {values.run} is a fine-tuned run, which is always evaluated on its task")
        saved = load_finetuned(values.run, device=device, note=display.note)
        record = finetuned_under_attack(
            saved, attacks_of(values) if values.attack else [], split=values.split, top_k=values.top_k,
            budget=budget_of(values), watch=display, stop=stop,
        )  # fmt: skip
        name = f"attacks-{values.attack}" if values.attack else "evaluation-task"
        return record, name + (f"-{values.split}" if values.split and values.split != texts_of(saved).reported else "")
    run, split = load_run(values.run, device=device, note=display.note), values.split or "test"
    record = run_under_attack(
        run, attacks_of(values), data=values.data, split=split, top_k=values.top_k, budget=budget_of(values),
        watch=display, stop=stop, data_progress=display.data,
    )  # fmt: skip
    return record, f"attacks-{values.attack}-{record['name']}-{split}"


def attacks_of(values: argparse.Namespace) -> list[Any]:
    """One attack for each rate."""
    from pointsman_lab.tasks.attacks.attacks import Attack

    return [Attack(values.attack, rate, values.attack_seed) for rate in values.attack_rate]


def budget_of(values: argparse.Namespace) -> Budget:
    """The number of tokens to score; None: all; "run": as in the run's settings."""
    tokens: int | str | None = values.eval_tokens
    return "run" if tokens is None else tokens if isinstance(tokens, int) else None


def result_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Results on clean and attacked texts at every k; for language models also without attacked tokens as targets."""
    columns = sorted({row["top_k"] for row in results})
    metric = str(results[0]["metric"])
    groups: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in results:
        attack = row.get("attack")
        name = f"{attack['kind']} {attack['rate']:g}" if attack else "clean"
        groups.setdefault(name, {})[row["top_k"]] = row
        if "unmarked" in row:
            groups.setdefault(f"{name}, attacked targets left out", {})[row["top_k"]] = row["unmarked"]
    lines = [[metric.replace("_", " "), *(f"k={k}" for k in columns)]]
    for name, row_of in groups.items():
        lines.append([name, *(_figure(row_of.get(k), metric) for k in columns)])
    return aligned(lines)


def _figure(row: Mapping[str, Any] | None, metric: str) -> str:
    if row is None or row["value"] is None:
        return "-"
    return f"{100 * row['value']:.2f} %" if metric == "accuracy" else f"{row['value']:.4f}"
