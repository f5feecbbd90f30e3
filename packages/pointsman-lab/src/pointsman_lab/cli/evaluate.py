"""`pointsman evaluate RUN`: evaluates a run at every k."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import check_writable, within, write_whole
from pointsman_lab.cli.options import Parser, choose_device, overrides
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.registry import entries
from pointsman_lab.runs.paths import slug
from pointsman_lab.runs.record import RunRecord, read_object

if TYPE_CHECKING:
    from pointsman_lab.progress import Stop
    from pointsman_lab.training.run import Run
    from pointsman_lab.training.task import Task

EPILOG = """examples:
  pointsman evaluate runs/hyper --top-k 1,2,4,8
  pointsman evaluate runs/hyper --data wikitext-2 --split valid
"""


SETTINGS = ("eval_batch_size", "eval_segment_length", "eval_memory_length", "precision")


def parser() -> Parser:
    flags = Parser("evaluate", "Evaluate a run at any k, on its own or other data.", EPILOG)
    flags.add("run RUN", "a run directory, a fine-tuned one too", type=Path)
    flags.add("--data", "other data, in the run's vocabulary (default: the run's)")
    flags.add("--split", "default: the one that the run reports, mostly test", choices=("valid", "test"))
    flags.add("--top-k", "default: those of the run")
    flags.add("--eval-tokens", "tokens to score (default: as the run's settings say)")
    told = "write what the official scorer of the task reads, into predictions/"
    flags.add("--predictions", told, choices=("official",))
    for entry in entries():
        entry.add_flags("evaluate", flags)
    told = "where evaluation-DATA-SPLIT.json goes (default: the run directory)"
    flags.common(told, settings="how to evaluate: " + ", ".join(SETTINGS))
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    device = choose_device(values.device)
    if values.out is not None or values.run.is_dir():
        check_writable(values.out or values.run)
    for entry in entries():
        if (code := entry.run("evaluate", flags, values, device)) is not None:
            return code
    changes = overrides(values.set)
    for key in changes:
        if key not in SETTINGS:
            raise RunError(f"pointsman evaluate: --set {key}: {did_you_mean(key, SETTINGS)}")
    from pointsman_lab.finetuning.run import finetuned_task, is_finetuned, open_run
    from pointsman_lab.report.language_table import LanguageTable
    from pointsman_lab.report.results import text_of_results

    finetuned = is_finetuned(values.run)
    for flag in ("data", "set") if finetuned else ():
        if getattr(values, flag):
            raise RunError(f"pointsman evaluate: --{flag} has no effect on fine-tuned runs; leave it out")
    with Display() as display, stop_on_signals() as stop:
        saved = open_run(values.run, device=device, note=display.note)
        task = finetuned_task(saved) if finetuned else saved.task(values.data, display.data)
        record, file = evaluated(saved, task, values, changes, display, stop)
    if finetuned and "languages" in record["results"][0]:
        own = RunRecord(values.run, saved.config.model.router, saved.config.seed, {}, evaluation=record)
        table = LanguageTable.of([own], f"xtreme-{task.name}", split=record["results"][0]["split"])
        assert table is not None, "every result has languages"
        print(table.text(), end="")
    else:
        print(text_of_results(record["results"]))
    print(f"\n{record['protocol'].get('data', task.name)}\nsaved: {file}", file=sys.stderr)
    return 0


def evaluated(
    saved: Run, task: Task, values: argparse.Namespace, changes: Mapping[str, Any], display: Display, stop: Stop
) -> tuple[dict[str, Any], Path]:
    """The record of a task's evaluation by the flags, and its file."""
    from pointsman.ops.kernels import using
    from pointsman.routers.frame.registry import has_one_k
    from pointsman_lab.evaluation.passes import EvaluationContext
    from pointsman_lab.training.kernels import autocast
    from pointsman_lab.training.task import shown_k

    given = {} if values.eval_tokens is None else {"eval_tokens": values.eval_tokens}
    config = saved.config.with_overrides({**changes, **given})
    if values.predictions and not task.scorer:
        raise RunError(f"--predictions official: no official scorer reads predictions of {task.name}; leave it out")
    split = values.split or task.reported_split(config)
    folder = values.out or values.run
    file = folder / f"evaluation-{slug(task.name)}-{split}.json"
    data = task.fingerprint if task.whole else None  # parts that are not read may be missing
    if file.exists() and data and (read_object(file).get("data") or data) != data:
        raise RunError(f"{file} is of other data of the name {task.name}: give --out another folder, or remove it")
    task.keeps = bool(values.predictions)
    context = EvaluationContext(autocast(config, next(saved.model.parameters()).device), display, stop)
    with using(saved.config.kernels):
        results = task.evaluate(saved.model, config, split, values.top_k or config.eval_top_k, context)
    if left := {*(values.top_k or ())} - (found := {one["top_k"] for one in results}):
        told = f"--top-k {','.join(map(str, sorted(left)))} has no effect"
        display.note(f"pointsman: {told}: {config.model.router} has one k, {min(found)}")
    protocol = {**task.protocol(config), **task.description()}
    if "split" in protocol:
        protocol["split"] = split
    record = {"format": 1, "checkpoint": f"step-{saved.step}", "data": data, "protocol": protocol}
    record["results"] = results
    if values.predictions:
        one, k = has_one_k(config.model.router), shown_k(config, {result["top_k"] for result in results})
        at = () if one or k == config.top_k_schedule.high else (f"k{k}",)  # those at the k of training stay
        for name, content in task.result_files(config).items():
            first, *rest = name.split("/")
            place = within(folder, first, *at, *rest)
            print(f"for {task.scorer}: {write_whole(place, content)}", file=sys.stderr)
    return record, write_whole(file, json.dumps(record, indent=2) + "\n")
