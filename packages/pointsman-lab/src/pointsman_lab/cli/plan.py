"""`pointsman plan`: what the layouts of a training job make each GPU hold, gather and exchange."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError
from pointsman_lab.cli.options import Parser, k_list, overrides, whole

if TYPE_CHECKING:
    from pointsman_lab.planning import Shape

LENGTH = 4096
EPILOG = """examples:
  pointsman plan --preset olmoe-1b-7b --gpus 8,64
  pointsman plan --preset large --set model.num_experts=64 --gpus 8 --length 512
"""
NOTE = """Counts, a GPU. State: weights, gradients and Adam in float32; activations and buffers come on top.
Gathered: in a micro-batch, whatever its tokens. Exchanged: with even choices. No times."""


def parser() -> Parser:
    flags = Parser("plan", "Count what each GPU holds, gathers and exchanges, for every layout.", EPILOG)
    flags.add("--preset", "the model, e.g. olmoe-1b-7b", required=True)
    gpus = partial(k_list, name="gpus")
    flags.add("--gpus N,N,…", "numbers of GPUs (default: 8)", type=gpus, default=(8,))
    flags.add("--length N", "of a sequence (default: 4096, or the model's longest)", type=whole(1))
    flags.add("--parallel LAYOUT", "only this layout, e.g. experts=8,replicas=2")
    flags.add("--vocabulary V", "tokens (default: 204, of published shapes their own)", type=whole(1))
    flags.common("a folder for the table, as plan.txt and plan.csv", "a setting of the model")
    return flags


def run(words: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(words)
    from pointsman_lab._files import write_whole
    from pointsman_lab.planning import plan

    shape, length = _shape(values, flags)
    grid = plan(shape, values.gpus, values.parallel)
    head = (
        f"{values.preset}: {shape.parameters / 1e9:.3g} billion parameters, "
        f"{shape.active_parameters / 1e9:.3g} active, "
        f"{shape.flops(length) / 1e9:.3g} GFLOP a token of training in sequences of {length}"
    )
    text = "\n\n".join([head, grid.text(), NOTE])
    print(text)
    if values.out:
        write_whole(values.out / "plan.txt", text + "\n")
        write_whole(values.out / "plan.csv", grid.csv())
    return 0


def _shape(values: argparse.Namespace, flags: Parser) -> tuple[Shape, int]:
    """The model that the flags name, and the length of a sequence."""
    from pointsman_lab.planning import Shape
    from pointsman_lab.recipes import preset
    from pointsman_lab.registry import find_preset

    changes = overrides(values.set)
    if without := [key for key in changes if not key.startswith("model.") and key != "train_top_k"]:
        raise RunError(
            f"pointsman plan: --set {without[0]} has no effect on a plan: allowed are model.* and train_top_k"
        )
    asked = preset(values.preset).with_overrides(changes)
    vocabulary = values.vocabulary or find_preset(values.preset).get("vocabulary", 204)
    config: Any = replace(asked.with_vocabulary(vocabulary).model, top_k=asked.top_k_schedule.high)
    longest = getattr(config, "max_length", None) if getattr(config, "positions", "") == "learned" else None
    if not config.reads_tokens:
        flags.without_effect(values, ("--vocabulary", "--length"), f"with --preset {values.preset}, which reads images")
        longest = config.tokens
    length = values.length or min(LENGTH, longest or LENGTH)
    if longest and length > longest:
        raise RunError(f"pointsman plan: --length {length}: {values.preset} has positions for {longest} tokens")
    return Shape.of(config, values.preset), length
