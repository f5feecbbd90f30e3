"""`pointsman train [RECIPE]`: one run, from flags or from a paper's recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pointsman._errors import RunError
from pointsman_lab.cli.options import Parser, choose_device, whole
from pointsman_lab.cli.progress import Display, stop_on_signals
from pointsman_lab.cli.ranks import add_rank_flags, joined, launched
from pointsman_lab.cli.runs import add_run_flags, changed, run_config, use_recorded_imports

if TYPE_CHECKING:
    from pointsman.parallel.layout import Layout
    from pointsman.ranks import Ranks
    from pointsman_lab.training.config import RunConfig

EPILOG = """examples:
  pointsman train --router hyperrouter --data enwik8 --out runs/hyper
  pointsman train hyperrouter-enwik8-small --out runs/paper
  pointsman train --router hyperrouter --data enwik8 --out runs/hyper --resume
  pointsman train --from models/olmoe --data notes.txt --router smoe+similarity
  pointsman train --data enwik8 --processes 8 --parallel experts=8
"""


def parser() -> Parser:
    flags = Parser("train", "Train one model.", EPILOG)
    flags.add("recipe RECIPE", "a paper's settings, e.g. hyperrouter-enwik8-small", nargs="?")
    flags.add("--router", "router spec (default: smoe, the recipe's, or the folder's)")
    told = "continue a Hugging Face model (Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, Dots1, GLM-4-MoE; with "
    flags.add("--from HF_FOLDER", f"{told}--preset xmoe-base XLM-R)", dest="start_from")
    flags.add("--seed S", "default: 0, of a recipe 1111", type=whole(0))
    flags.add("--checkpoint-every N", "steps between checkpoints", type=whole(1))
    flags.add("--resume", "continue from the last valid checkpoint", action="store_true")
    add_run_flags(flags)
    add_rank_flags(flags)
    flags.common("the run directory (default: runs/ROUTER-DATA-PRESET-seed-S)")
    return flags


def run(arguments: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(arguments)
    device = choose_device(values.device)

    def check(count: int, layout: Layout) -> None:
        from pointsman_lab.training.task import check_on_ranks

        check_on_ranks([_config(values)], count, layout)

    code = launched(flags, values, device, "train", arguments, check)
    if code is not None:
        return code
    with joined(values, device) as (ranks, layout, device):
        _train(values, device, ranks, layout)
    return 0


def _config(values: argparse.Namespace) -> RunConfig:
    """The settings from the recipe, the model to start from, or the preset, and from the flags."""
    use_recorded_imports(values, [values.router] if values.router else [])
    if values.recipe and values.start_from:
        raise RunError("pointsman train: --from brings its own model; leave the recipe out")
    if values.recipe:
        from pointsman.routers.frame.registry import BASELINES, list_mixers, list_routers
        from pointsman_lab.recipes import recipe
        from pointsman_lab.registry import presets

        if values.recipe in (*list_routers(), *list_mixers(), *BASELINES):
            raise RunError(f"pointsman train: {values.recipe!r} is no recipe but a router: --router {values.recipe}")
        if values.preset:
            raise RunError("pointsman train: a recipe brings its own preset; leave --preset out")
        if values.recipe in presets():
            raise RunError(f"pointsman train: {values.recipe!r} is no recipe but a preset: --preset {values.recipe}")
        config = recipe(values.recipe, router=values.router, seed=values.seed)
        overriding = {"data": values.data, "steps": values.steps}
        config = config.with_overrides({key: value for key, value in overriding.items() if value is not None})
        config = changed(config, values)
    elif values.start_from:
        from pointsman_lab.recipes import preset
        from pointsman_lab.registry import trains

        base = preset(values.preset or "tiny-decoder", data=values.data, steps=values.steps, seed=values.seed or 0)
        config = changed(trains(base.model.family).start(base, values.start_from, values.router), values)
    else:
        config = run_config(values, "smoe" if values.router is None else values.router, values.seed or 0)
    if values.checkpoint_every:
        config = config.with_overrides({"checkpoint_every": values.checkpoint_every})
    return config


def _train(values: argparse.Namespace, device: str, ranks: Ranks, layout: Layout | None) -> None:
    from pointsman_lab.report.results import text_of_results
    from pointsman_lab.runs.paths import slug
    from pointsman_lab.training.trainer import train

    config = _config(values)
    name = f"{slug(config.model.router)}-{slug(Path(config.data).name)}-{config.preset}-seed-{config.seed}"
    out = values.out or Path("runs") / name
    with Display() if ranks.first else nullcontext() as display, stop_on_signals(tell=ranks.first) as stop:
        result = train(
            config, out, resume=values.resume, device=device, progress=display, stop=stop, ranks=ranks, layout=layout
        )
    if ranks.first:
        print(text_of_results(result.evaluation["results"]))
        print(f"\nrun: {out}", file=sys.stderr)
