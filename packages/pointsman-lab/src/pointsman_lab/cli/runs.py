"""Shared by `compare` and `train`: the flags of a training run, and its configuration."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pointsman._errors import RunError
from pointsman_lab._files import read_whole_json
from pointsman_lab.cli.options import Parser, overrides, words
from pointsman_lab.registry import entries, find_preset
from pointsman_lab.runs.imports import import_recorded, imports_of, present
from pointsman_lab.training.k_schedule import SHAPES

if TYPE_CHECKING:
    from pointsman_lab.training.config import RunConfig


def add_run_flags(flags: Parser) -> None:
    """--data, --preset, --steps, --train-top-k, --k-schedule, --top-k, --eval-tokens."""
    told = "stdlib, enwik8, text8, wikitext-2, wikitext-103, a file or folder; for encoders xtreme-text or "
    flags.add("--data", f"{told}multilingual:PATH, for images cifar10-10k (default: the preset's)")
    flags.add("--preset", "shape and settings: tiny (default), tiny-mlm, tiny-vit, small, …")
    flags.add("--steps", "optimizer steps (default: the preset's; tiny: 1600)")
    flags.add("--train-top-k K", "k in training: 2, 2:N (grows) or N/2:N")
    flags.add("--k-schedule NAME", f"how k grows: {', '.join(SHAPES)}")
    flags.add("--top-k", "the k values of the evaluation (default: 1, 2, 4, … N)")
    flags.add("--eval-tokens", "tokens of the test split to score (default: the preset's; tiny: 200000)")
    for entry in entries():
        entry.add_flags("train", flags)
    flags.add("--tensorboard", "write TensorBoard files as well", action="store_true")
    flags.add("--track NAME,…", "send the metrics to wandb, trackio or both", type=words)


def use_recorded_imports(values: argparse.Namespace, routers: Sequence[str]) -> None:
    """Adds to --import what the run, comparison or exam in --out records: the same command continues it without.

    ValueError where one of `routers` needs a recorded module that the user has never imported (`import_recorded`).
    """
    names = [] if values.out is None else recorded_imports(values.out)
    if names:
        for router in routers:
            import_recorded(router, [*values.imports, *names])
        values.imports = list(dict.fromkeys([*map(present, names), *values.imports]))


def recorded_imports(folder: Path) -> list[str]:
    """What the run, the comparison or the exam in `folder` was given with --import."""
    names = ("config.json", "comparison.json", "exam.json")
    run, comparison, exam = (read_whole_json(folder / name) or {} for name in names)
    return [*imports_of(run), *imports_of(comparison.get("settings", {})), *imports_of(exam)]


def counted_model(flags: Parser, values: argparse.Namespace, what: str, texts: Sequence[str]) -> tuple[RunConfig, int]:
    """The settings of a model that is only counted, by --preset, --set and --vocabulary, and its vocabulary.

    Args:
        what: what is counted, in errors.
        texts: flags without effect on models of images.
    """
    from pointsman_lab.recipes import preset

    changes = overrides(values.set)
    if unread := [key for key in changes if not key.startswith("model.") and key != "train_top_k"]:
        allowed = "allowed are model.* and train_top_k"
        raise RunError(f"{flags.prog}: --set {unread[0]} has no effect on a {what}: {allowed}")
    vocabulary = values.vocabulary or find_preset(values.preset).get("vocabulary", 204)
    config = preset(values.preset).with_overrides(changes).with_vocabulary(vocabulary)
    if not config.model.reads_tokens:
        flags.without_effect(values, texts, f"with --preset {values.preset}, which reads images")
    return config, vocabulary


def run_config(values: argparse.Namespace, router: str, seed: int = 0) -> RunConfig:
    """The configuration from the flags: preset, then flags, then --set."""
    from pointsman_lab.recipes import preset

    config = preset(values.preset or "tiny", router=router, data=values.data, steps=values.steps, seed=seed)
    return changed(config, values)


def changed(config: RunConfig, values: argparse.Namespace) -> RunConfig:
    """`config` with the changes of flags and --set."""
    of_tasks = [name for entry in entries() for name in entry.settings]
    named = ("train_top_k", "k_schedule", "eval_tokens", *of_tasks)
    given = {name: getattr(values, name, None) for name in named}
    given |= {"eval_top_k": values.top_k, "tensorboard": values.tensorboard or None}
    given |= {"imports": tuple(values.imports) or None, "track": tuple(values.track or ()) or None}
    changes = {name: value for name, value in given.items() if value is not None}
    told = overrides(values.set)
    if "imports" in told:
        raise RunError("--set imports has no effect: --import imports the routers of a module or a file")
    made = config.with_overrides({**changes, **told})
    if "final_learning_rate" in told and made.lr_schedule in ("constant", "inverse-sqrt"):
        raise RunError(f"--set final_learning_rate has no effect with lr_schedule={made.lr_schedule}; leave it out")
    grows, shape = made.top_k_schedule.low < made.top_k_schedule.high, told.get("k_schedule", values.k_schedule)
    if not grows and shape not in (None, "linear"):  # which a page's command may name, the default
        raise RunError(f"--k-schedule has no effect: k is {made.train_top_k} all along; --train-top-k 2:N lets it grow")
    if made.warmup_steps > made.steps and not getattr(values, "resume", False):
        never = f"warmup_steps={made.warmup_steps} is above steps={made.steps}: no step has the learning_rate"
        if "warmup_steps" in told:
            raise RunError(f"{never}; --set warmup_steps={made.steps // 10}")
        print(f"pointsman: {never}; --set warmup_steps=… sets it", file=sys.stderr)  # a recipe, tried for a few steps
    return made


def write_page(out: Path, *, explorer: bool = False) -> str:
    """Writes report.html; without the packages for it, says what to install. `explorer`: tells how to make one."""
    from pointsman_lab.report import write_report

    try:
        page = f"page: {write_report(out)}"
    except RunError as missing:
        if isinstance(missing.__cause__, OSError):  # the disk refuses it: an older page may be there
            raise
        return f"no page: {missing}"
    return f"{page}; with maps and a routing explorer: pointsman report {shlex.quote(str(out))}" if explorer else page
