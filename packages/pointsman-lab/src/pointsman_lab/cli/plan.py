"""`pointsman plan`: what the layouts of a training job make each GPU hold, gather and exchange."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import write_whole
from pointsman_lab.cli.options import Parser, k_list, whole
from pointsman_lab.cli.runs import counted_model

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
    flags.add("--gpus N,N,…", "numbers of GPUs (default: 8)", type=partial(k_list, name="gpus"), default=(8,))
    flags.add("--length N", "of a sequence (default: 4096, or the model's longest)", type=whole(1))
    flags.add("--parallel LAYOUT", "only this layout, e.g. experts=8,replicas=2")
    flags.add("--vocabulary V", "tokens (default: 204, of published shapes their own)", type=whole(1))
    flags.common("a folder for the table, as plan.txt and plan.csv", "a setting of the model")
    return flags


def run(words: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(words)
    from pointsman_lab.planning import Shape, plan

    asked, _ = counted_model(flags, values, "plan", ("--vocabulary", "--length"))
    config: Any = replace(asked.model, top_k=asked.top_k_schedule.high)
    longest = getattr(config, "max_length", None) if getattr(config, "positions", "") == "learned" else None
    longest = longest if config.reads_tokens else config.tokens
    length = values.length or min(LENGTH, longest or LENGTH)
    if longest and length > longest:
        raise RunError(f"pointsman plan: --length {length}: {values.preset} has positions for {longest} tokens")
    shape = Shape.of(config, values.preset)
    grid = plan(shape, values.gpus, values.parallel)
    head = (
        f"{values.preset}: {shape.parameters / 1e9:.3g} billion parameters, "
        f"{shape.active_parameters / 1e9:.3g} active, "
        f"{shape.flops(length) / 1e9:.3g} GFLOP a token of training in sequences of {length}"
    )
    text = "\n\n".join([head, grid.text(), NOTE])
    if values.out:
        write_whole(values.out / "plan.txt", text + "\n")
        write_whole(values.out / "plan.csv", grid.csv())
    print(text)
    return 0
