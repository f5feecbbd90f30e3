"""Schedules of k, the number of experts a token: k grows over a run, so that any k works at inference.

Sources: SMoE-Dropout (Chen et al. 2023) and HyperRouter (Do et al. 2023), which name a growing k; the formulas are
those of their released code. Their papers say 2 to N, their scripts N/2 to N.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from pointsman._errors import RunError, did_you_mean

Shape = Literal["linear", "cosine", "exponential", "multi-step"]
SHAPES: tuple[str, ...] = get_args(Shape)

_SIZE = re.compile(r"(\d+)|N(?:/(\d*[1-9]\d*))?")


@dataclass(frozen=True)
class TopKSchedule:
    """k as a pure function of the step, from `low` at step 0 to `high` at step `steps`.

    With t the step, T the number of steps, a = low, b = high, and rounding half to even:

    - linear: k = a + round((b - a) t / T)
    - cosine: k = b - round((b - a) cos(pi t / 2T))
    - exponential: k = b - round((b - a) 0.99^floor(t / floor(T / 300)))
    - multi-step: a, 2a, 4a, … up to b, each for an equal share of the run
    """

    low: int
    high: int
    steps: int
    shape: str = "linear"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise RunError(f"unknown k_schedule {self.shape!r}: {did_you_mean(self.shape, SHAPES)}")

    def __call__(self, step: int) -> int:
        """k of the training step with this number, counted from 0."""
        low, high, total = self.low, self.high, max(1, self.steps)
        step = min(max(step, 0), total)
        if low == high:
            return low
        if self.shape == "linear":
            k = low + round((high - low) * step / total)
        elif self.shape == "cosine":
            k = high - round((high - low) * math.cos(math.pi * step / (2 * total)))
        elif self.shape == "exponential":
            k = high - round((high - low) * 0.99 ** (step // max(1, total // 300)))
        else:
            stages = doublings(low, high)
            k = stages[min(len(stages) * step // total, len(stages) - 1)]
        return min(max(k, low), high)


def doublings(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low, … and high: the stages of the multi-step schedule, and a table's usual columns."""
    stages = []
    while low < high:
        stages.append(low)
        low *= 2
    return (*stages, high)


def parse_top_k(text: str, num_experts: int) -> tuple[int, int]:
    """The first and the last k that "2", "2:N" or "N/2:N" means with N = `num_experts`; N/2 is rounded down."""
    parts = str(text).strip().split(":")
    sizes: list[int] = []
    for part in parts:
        match = _SIZE.fullmatch(part.strip())
        if match is None or len(parts) > 2:
            raise RunError(f"train_top_k={text!r}: allowed are a number of experts or first:last, as 2, 2:N or N/2:N")
        sizes.append(int(match[1]) if match[1] else max(1, num_experts // int(match[2] or 1)))
    for size in sizes:
        if not 1 <= size <= num_experts:
            raise RunError(f"train_top_k={text!r}: k={size} is outside 1 to {num_experts} (N, the number of experts)")
    if sizes[0] > sizes[-1]:
        raise RunError(f"train_top_k={text!r}: the first k, {sizes[0]}, is above the last, {sizes[-1]}")
    return sizes[0], sizes[-1]
