"""Layouts of a job with their memory, step time and communication: estimates, by the equations of `time`.

Memory of a GPU, in bytes: 16 a parameter that it holds (float32 weight, gradient, two Adam moments), the largest
group of weights that is gathered at a time and the one fetched ahead of it, what backward keeps of the activations,
the logits, and the buffers of the exchange for a GPU that gets half as many rows again as the mean.

Time adds to `Parts` what the layout needs: gathering weights and summing gradients of shards, hidden behind the
products of the same micro-batch as far as these last; the sum over replicas once a step; Adam.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pointsman._errors import RunError
from pointsman._grid import Grid
from pointsman.parallel.layout import Layout
from pointsman_lab.planning.machines import Machine, shapes
from pointsman_lab.planning.shapes import Shape
from pointsman_lab.planning.time import BYTES, Parts, calibration, distinct_ranks, parts

STATE = 16
"""Bytes a parameter that trains: weight, gradient and Adam's two moments in float32."""
ADAM_TRAFFIC = 28
"""Bytes a parameter that Adam reads and writes."""
BUSIEST = 1.5
"""Rows of the GPU with most rows over the mean, for the exchange's buffers."""
USABLE = 0.92
"""Part of a GPU's memory that a job can use; the rest is the driver's and lost to fragmentation."""


@dataclass(frozen=True)
class Job:
    """What each GPU does in a step.

    Attributes:
        tokens: of a micro-batch on a GPU. length: of a sequence. micro_batches: of a step.
    """

    tokens: int
    length: int = 4096
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.tokens % self.length:
            raise RunError(
                f"--tokens {self.tokens} is no whole number of sequences of {self.length} tokens; "
                f"allowed are multiples of --length, e.g. {max(1, self.tokens // self.length) * self.length}"
            )


@dataclass(frozen=True)
class Estimate:
    """What a layout costs.

    Attributes:
        layout: the division of the GPUs.
        memory: bytes a GPU. step: seconds. speed: tokens a second and GPU.
        exchange: part of the step that the exchange of tokens takes. waiting: part that waits for shards or replicas.
        recomputes: backward computes the activations anew, because they would not fit.
        fits: in the machine's memory.
    """

    layout: Layout
    memory: float
    step: float
    speed: float
    exchange: float
    waiting: float
    recomputes: bool
    fits: bool

    @property
    def note(self) -> str:
        """What a reader must know of this layout."""
        notes = ["recomputes activations"] if self.recomputes else []
        return ", ".join(notes if self.fits else ["does not fit"])


def memory(shape: Shape, layout: Layout, job: Job, *, recompute: bool) -> float:
    """Bytes that a GPU needs."""
    own = shape.dense_parameters / layout.shards
    own += shape.sparse_layers * shape.expert_parameters / (layout.experts * layout.expert_shards)
    group = BYTES * shape.expert_parameters / layout.experts
    embeddings = 4 * (1 if shape.tied else 2) * shape.vocabulary * shape.dim
    inner = shape.matrices * shape.hidden_dim
    sparse = BYTES * shape.top_k * (2 * shape.dim + inner) + BYTES * shape.matrices * shape.shared_hidden_dim
    dense = BYTES * shape.matrices * shape.dense_hidden_dim
    attention = BYTES * (4 * shape.dim + shape.attention // max(1, shape.dim))
    layer = attention + max(sparse + 4 * shape.experts, dense)
    kept = shape.layers * shape.dim * BYTES + layer if recompute else shape.layers * layer
    visited = distinct_ranks(layout.experts, shape.experts, shape.top_k)
    buffers = 2 * BUSIEST * visited * shape.dim * BYTES if layout.experts > 1 else 0
    logits = (4 + BYTES) * shape.vocabulary
    return STATE * own + 2 * group + embeddings + job.tokens * (kept + buffers + logits)


def estimate(shape: Shape, machine: Machine, layout: Layout, job: Job) -> Estimate:
    """The cost of one layout; activations are computed anew in backward only where they would not fit.

    Raises:
        RunError: the experts of a layer cannot be divided so.
    """
    layout.check_experts(shape.experts)
    limit = USABLE * machine.memory
    recompute = memory(shape, layout, job, recompute=False) > limit
    needed = memory(shape, layout, job, recompute=recompute)
    whole = parts(shape, machine, layout.experts, job.length)
    if recompute:  # the forward pass a second time: a third of the products, half of the exchange
        whole = Parts(whole.products * 4 / 3, whole.exchange * 3 / 2, whole.memory * 4 / 3)
    constants = calibration().constants
    compute = job.tokens * replace(whole, exchange=0.0).seconds(constants)
    exchange = job.tokens * whole.seconds(constants) - compute
    shards = max(0.0, _gathers(shape, machine, layout, recompute) - compute)
    own = shape.dense_parameters / layout.shards
    own += shape.sparse_layers * shape.expert_parameters / (layout.experts * layout.expert_shards)
    copies = 2 * 4 * own * (layout.replicas - 1) / layout.replicas
    once = copies / (machine.fast_link if layout.world <= machine.domain else machine.slow_link)
    step = job.micro_batches * (compute + exchange + shards) + once + ADAM_TRAFFIC * own / machine.memory_speed
    waiting = (job.micro_batches * shards + once) / step
    speed = job.tokens * job.micro_batches / step
    share = job.micro_batches * exchange / step
    return Estimate(layout, needed, step, speed, share, waiting, recompute, needed <= limit)


def _gathers(shape: Shape, machine: Machine, layout: Layout, recompute: bool) -> float:
    """Seconds of a micro-batch in which weights are gathered, twice, and gradients summed; experts in bfloat16."""
    expert = BYTES * shape.sparse_layers * shape.expert_parameters / layout.experts
    dense = 4 * shape.dense_parameters
    sent = expert * (1 - 1 / layout.expert_shards) + dense * (1 - 1 / layout.shards)
    return 3 * sent / (machine.fast_link if layout.shards <= machine.domain else machine.slow_link)


def layouts(world: int, experts: int) -> Iterator[Layout]:
    """Every division of `world` ranks for layers of this many experts."""
    for replicas in range(1, world + 1):
        for over in range(1, min(world // replicas, experts) + 1):
            if world % replicas == 0 and world // replicas % over == 0 and experts % over == 0:
                yield Layout(world, over, replicas)


def plan(
    shape: Shape, machine: Machine, gpus: Sequence[int], job: Job, *, layout: str | None = None, most: int = 3
) -> list[Estimate]:
    """For each number of GPUs the fastest layouts that fit; the smallest one where none does.

    Args:
        shape: the model. machine: the GPU.
        gpus: numbers of GPUs.
        job: what each does in a step.
        layout: only this one, as `Layout.parse` reads it.
        most: layouts for each number of GPUs.

    Raises:
        RunError: a layout that does not divide the GPUs or the experts.
    """
    found = []
    for world in gpus:
        tried = [Layout.parse(layout, world)] if layout is not None else layouts(world, shape.experts)
        costs = [estimate(shape, machine, one, job) for one in tried]
        fitting = sorted((cost for cost in costs if cost.fits), key=lambda cost: cost.step)
        found += fitting[:most] or [min(costs, key=lambda cost: cost.memory)]
    return found


def outside(shape: Shape) -> str:
    """A remark on a model much narrower or wider than the published ones; "" within their range."""
    known = shapes()
    widths = [known[run.model].dim for run in calibration().runs]
    if min(widths) <= shape.dim <= max(widths):
        return ""
    return (
        f"\ndim {shape.dim} lies outside the published runs ({min(widths)} to {max(widths)}): errors may be larger "
        "than those below"
    )


def plan_grid(estimates: Sequence[Estimate]) -> Grid:
    """The plan as a table."""
    header = ["GPUs", "layout", "GB a GPU", "step, s", "tokens/s/GPU", "exchange", "waiting", "note"]
    rows = [
        [
            str(one.layout.world),
            str(one.layout),
            f"{one.memory / 1e9:.1f}",
            f"{one.step:.3g}",
            f"{one.speed:,.0f}",
            f"{one.exchange:.0%}",
            f"{one.waiting:.0%}",
            one.note or "-",
        ]
        for one in estimates
    ]
    return Grid(header, rows, code=False, labels=2)


def evidence_grid() -> Grid:
    """The published runs beside what the planner says of each with constants fitted to the others."""
    found = calibration()
    rows = []
    for run, error in zip(found.runs, found.left_out, strict=True):
        layout = f"experts={run.experts}" + (f", pipeline={run.pipeline}" if run.pipeline > 1 else "")
        source = run.source + (f" ({run.assumed} assumed)" if run.assumed else "")
        rows.append(
            [
                run.model,
                f"{run.gpus} {run.machine}",
                layout,
                f"{run.speed:,.0f}",
                f"{run.speed / (1 + error):,.0f}",
                f"{error:+.0%}",
                source,
            ]
        )
    header = ["model", "GPUs", "layout", "tokens/s/GPU", "predicted", "error of time", "source"]
    return Grid(header, rows, code=False)
