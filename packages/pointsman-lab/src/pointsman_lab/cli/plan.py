"""`pointsman plan`: memory, step time and communication of a training job's layouts, before anyone pays for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.cli.options import Parser, check_device, k_list, overrides, whole

if TYPE_CHECKING:
    from pointsman_lab.planning.shapes import Shape

LENGTH, TOKENS = 4096, 16384
EPILOG = """examples:
  pointsman plan --model olmoe --machine h100 --gpus 8,16,32,64 --tokens 16384
  pointsman plan --preset large --set model.num_experts=64 --gpus 8 --tokens 16384 --length 512
  pointsman plan --compare
"""


def parser() -> Parser:
    flags = Parser("plan", "Estimate what training a mixture of experts on several GPUs will take.", EPILOG)
    flags.add_argument("--model", metavar="NAME", help="a published model, e.g. olmoe")
    flags.add_argument("--preset", help="a model of pointsman's, instead of --model")
    flags.add_argument("--machine", default="h100", metavar="NAME", help="h100, gb200 or gb300 (default: h100)")
    flags.add_argument("--gpus", type=k_list, default=(8,), metavar="N,N,…", help="numbers of GPUs (default: 8)")
    flags.add_argument(
        "--tokens", type=whole(1), metavar="N", help="of a micro-batch on a GPU (default: 16384, in whole sequences)"
    )
    flags.add_argument(
        "--length", type=whole(1), metavar="N", help="of a sequence (default: 4096, or the model's longest)"
    )
    flags.add_argument(
        "--accumulation", type=whole(1), default=1, metavar="N", help="micro-batches a step (default: 1)"
    )
    flags.add_argument("--parallel", metavar="LAYOUT", help="only this layout, e.g. experts=8,replicas=2")
    flags.add_argument(
        "--vocabulary", type=whole(1), metavar="V",
        help="tokens, with --preset (default: 204, of published shapes their own)",
    )  # fmt: skip
    flags.add_argument("--compare", action="store_true", help="the published runs beside what the planner says of them")
    flags.common("a folder for the table, as plan.txt and plan.csv", "a setting of the model, with --preset")
    return flags


def run(words: Sequence[str]) -> int:
    flags = parser()
    values = flags.read(words)
    if values.compare:
        sizes = ("--model", "--preset", "--gpus", "--tokens", "--length", "--accumulation", "--parallel", "--machine")
        flags.without_effect(values, (*sizes, "--set", "--vocabulary"), "with --compare")
    elif (values.model is None) == (values.preset is None):
        flags.error("allowed is one of --model and --preset")
    if values.model is not None:
        flags.without_effect(values, ("--set", "--vocabulary"), "without --preset")
    check_device(values.device)
    from pointsman._files import write_whole
    from pointsman_lab.planning.plan import Job, evidence_grid, outside, plan, plan_grid
    from pointsman_lab.planning.time import calibration

    if values.compare:
        grid, head = evidence_grid(), "Published training speeds, each predicted with constants fitted to the others."
    else:
        from pointsman_lab.planning.machines import machine

        shape, length = _shape(values, flags)
        job = Job(values.tokens or length * max(1, TOKENS // length), length, values.accumulation)
        grid = plan_grid(plan(shape, machine(values.machine), values.gpus, job, layout=values.parallel))
        head = (
            f"{shape.name}: {shape.parameters / 1e9:.3g} billion parameters, {shape.active_parameters / 1e9:.3g} "
            f"active, {shape.flops(length) / 1e9:.3g} GFLOP a token of training\n"
            f"{values.machine}: {machine(values.machine).title}{outside(shape)}"
        )
    text = "\n\n".join([head, grid.text(), fill(str(calibration()), 100)])
    print(text)
    if values.out:
        write_whole(values.out / "plan.txt", text + "\n")
        write_whole(values.out / "plan.csv", grid.csv())
    return 0


def _shape(values: argparse.Namespace, flags: Parser) -> tuple[Shape, int]:
    """The model that the flags name, and the length of a sequence."""
    from pointsman_lab.models.families import PUBLISHED_VOCABULARIES
    from pointsman_lab.planning.machines import shapes
    from pointsman_lab.planning.shapes import Shape
    from pointsman_lab.recipes import preset

    if values.model is not None:
        known = shapes()
        if values.model not in known:
            raise RunError(f"--model {values.model!r}: {did_you_mean(values.model, known)}")
        return known[values.model], values.length or LENGTH
    changes = overrides(values.set)
    if without := [key for key in changes if not key.startswith("model.") and key != "train_top_k"]:
        raise RunError(
            f"pointsman plan: --set {without[0]} has no effect on a plan: allowed are model.* and train_top_k"
        )
    asked = preset(values.preset).with_overrides(changes)
    vocabulary = values.vocabulary or PUBLISHED_VOCABULARIES.get(values.preset, 204)
    config: Any = replace(asked.with_vocabulary(vocabulary).model, top_k=asked.top_k_schedule.high)
    longest = getattr(config, "max_length", None) if getattr(config, "positions", "") == "learned" else None
    if not config.reads_tokens:
        flags.without_effect(values, ("--vocabulary", "--length"), f"with --preset {values.preset}, which reads images")
        longest = config.tokens
    length = values.length or min(LENGTH, longest or LENGTH)
    if longest and length > longest:
        raise RunError(f"pointsman plan: --length {length}: {values.preset} has positions for {longest} tokens")
    return Shape.of(config, values.preset), length
