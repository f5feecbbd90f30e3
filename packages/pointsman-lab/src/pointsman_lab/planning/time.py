"""The time that a GPU takes for a token, from the shape of a model, a machine and three fitted constants.

    time = [F / (e peak) + c X + g M / memory speed] * bubble

F are the operations of training (`Shape.flops`), X the time of the experts' exchange at line rate, M the bytes that
are read and written beside the products: 60 d a layer and 12 h + 8 d a chosen expert, in bfloat16. e is the part of
the peak that products reach, c how much longer an exchange takes than at line rate, g how often M moves.
The constants are fitted to the published runs, on the logarithm of time; each run is also predicted with constants
that were fitted without it. That error is printed with every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb

import numpy as np

from pointsman_lab.planning.machines import Machine, PublishedRun, machine, runs, shapes
from pointsman_lab.planning.shapes import Shape

BYTES = 2
"""Of a number that is exchanged or kept: bfloat16."""

START = (0.5, 1.0, 2.0)
"""Where the fit of (e, c, g) begins."""


@dataclass(frozen=True)
class Parts:
    """What a token costs a GPU before the constants are applied, in seconds.

    Attributes:
        products: at the machine's peak. exchange: at line rate. memory: at the memory's speed.
        bubble: factor for a pipeline's idle time.
    """

    products: float
    exchange: float
    memory: float
    bubble: float = 1.0

    def seconds(self, constants: Sequence[float]) -> float:
        """The time with these (e, c, g)."""
        efficiency, slower, moves = constants
        return (self.products / efficiency + slower * self.exchange + moves * self.memory) * self.bubble


def distinct_ranks(ranks: int, experts: int, top_k: int) -> float:
    """Ranks that a token's k experts lie on, in the mean over even choices: R (1 - C(E - E/R, k) / C(E, k))."""
    return ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))


def exchange_bytes(shape: Shape, ranks: int) -> float:
    """Bytes a token that leave a GPU in forward and backward: 4 D (R - 1) / R d in each sparse layer."""
    visited = distinct_ranks(ranks, shape.experts, shape.top_k)
    return 4 * visited * (ranks - 1) / ranks * shape.dim * BYTES * shape.sparse_layers


def parts(shape: Shape, on: Machine, ranks: int, length: int, bubble: float = 1.0) -> Parts:
    """The parts of a token's time, with each layer's experts divided over `ranks` GPUs.

    Within a domain an exchange sends to ranks; beyond it a token goes once to each other node, and the slower of the
    two links counts.
    """
    exchange = exchange_bytes(shape, ranks) / on.fast_link
    if ranks > on.domain:
        nodes = -(-ranks // on.domain)
        visited = min(distinct_ranks(nodes, shape.experts, shape.top_k), shape.nodes_per_token or nodes)
        between = 4 * visited * (nodes - 1) / nodes * shape.dim * BYTES * shape.sparse_layers
        exchange = max(exchange, between / on.slow_link)
    moved = 60 * shape.dim * shape.layers + (12 * shape.hidden_dim + 8 * shape.dim) * shape.top_k * shape.sparse_layers
    return Parts(shape.flops(length) / on.flops, exchange, moved * BYTES / on.memory_speed, bubble)


def fit(examples: Sequence[tuple[Parts, float]]) -> tuple[float, float, float]:
    """The constants (e, c, g) with the least squared error of log time: Gauss-Newton on their logarithms.

    Args:
        examples: parts, and the seconds a token that were measured.
    """

    def errors(logs: np.ndarray) -> np.ndarray:
        constants = tuple(np.exp(logs))
        return np.array([np.log(part.seconds(constants) / seconds) for part, seconds in examples])

    at, damping = np.log(np.array(START)), 1e-3
    now = errors(at)
    for _ in range(200):
        slope = np.stack([(errors(at + step) - now) / 1e-6 for step in 1e-6 * np.eye(len(at))], axis=1)
        move = -np.linalg.solve(slope.T @ slope + damping * np.eye(len(at)), slope.T @ now)
        tried = at + np.clip(move, -0.5, 0.5)
        tried[0] = min(tried[0], np.log(0.95))  # no product runs at the peak
        new = errors(tried)
        if new @ new < now @ now:
            at, now, damping = tried, new, damping / 3
        else:
            damping *= 4
        if np.abs(move).max() < 1e-10:
            break
    efficiency, slower, moves = np.exp(at)
    return float(efficiency), float(slower), float(moves)


@dataclass(frozen=True)
class Calibration:
    """The fitted constants and how wrong they are.

    Attributes:
        constants: (e, c, g), fitted to all runs.
        runs: the published runs.
        left_out: for each of them, predicted over published time - 1, with constants fitted to the others.
    """

    constants: tuple[float, float, float]
    runs: Sequence[PublishedRun]
    left_out: Sequence[float]

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return float(np.median(np.abs(self.left_out)))

    @property
    def worst_error(self) -> float:
        """Largest of the absolute errors."""
        return float(np.abs(self.left_out).max())

    def __str__(self) -> str:
        efficiency, slower, moves = self.constants
        return (
            f"Estimates. Error against {len(self.runs)} published runs, each predicted without itself: "
            f"{self.median_error:.0%} in the median, {self.worst_error:.0%} at worst. Products at {efficiency:.0%} of "
            f"the peak, exchange {slower:.2f} times as long as at line rate, memory traffic {moves:.2f} times the "
            "count; even loads."
        )


@cache
def calibration() -> Calibration:
    """The constants from `published.toml`."""
    known, published = shapes(), runs()
    examples = [
        (parts(known[run.model], machine(run.machine), run.experts, run.length, run.bubble), 1 / run.speed)
        for run in published
    ]
    errors = []
    for place, (part, seconds) in enumerate(examples):
        errors.append(part.seconds(fit(examples[:place] + examples[place + 1 :])) / seconds - 1)
    return Calibration(fit(examples), published, errors)
