"""Confidence intervals of paired differences: Student's t, corrected for the number of comparisons on a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pointsman._grid import NONE

LEVEL = 0.95
LEAST_SEEDS = 3  # below, an interval is not shown: with two seeds it says nothing


def student_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t with `df` degrees of freedom: the finite sums of Abramowitz and Stegun, 26.7.3-4."""
    angle = math.atan2(abs(t), math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (1.0, 1.0) if df % 2 == 0 else (cosine, cosine)
    for n in range(2 if df % 2 == 0 else 3, df, 2):
        term *= (n - 1) / n * cosine * cosine
        total += term
    within = sine * total if df % 2 == 0 else 2 / math.pi * (angle + (sine * total if df > 1 else 0.0))
    return 0.5 + math.copysign(within / 2, t)


def student_quantile(probability: float, df: int) -> float:
    """t with P(T <= t) = probability, for probabilities from 0.5; by bisection.

    Raises:
        ValueError: df below 1, or a probability outside [0.5, 1).
    """
    if df < 1 or not 0.5 <= probability < 1:
        raise ValueError(f"student_quantile({probability}, df={df}): allowed are 0.5 <= probability < 1 and df from 1")
    low, high = 0.0, 1.0
    while student_cdf(high, df) < probability:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < probability else (low, middle)
    return high


@dataclass(frozen=True)
class Paired:
    """Differences of two rows, seed by seed.

    Attributes:
        values: one a seed.
        comparisons: how many comparisons are made beside this one (Bonferroni): the level is 1 - 0.05 / comparisons.
    """

    values: Sequence[float]
    comparisons: int = 1

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def half(self) -> float | None:
        """Half the width of the corrected interval of the mean; None below two seeds."""
        return self.half_of(self.comparisons)

    def half_of(self, comparisons: int) -> float | None:
        """The same with another number of comparisons; 1 = not corrected."""
        n = len(self.values)
        if n < 2:
            return None
        t = student_quantile(1 - (1 - LEVEL) / (2 * comparisons), n - 1)
        return t * statistics.stdev(self.values) / math.sqrt(n)

    def text(self, decimals: int = 3) -> str:
        """`-0.123 ± 0.456 (0.078)`: mean, half of the corrected interval, half of the plain one; '-' without values."""
        if self.mean is None:
            return NONE
        half, plain = self.half, self.half_of(1)
        if len(self.values) < LEAST_SEEDS or half is None or plain is None:
            return f"{self.mean:+.{decimals}f}"
        return f"{self.mean:+.{decimals}f} ± {half:.{decimals}f} ({plain:.{decimals}f})"

    @property
    def sign(self) -> int | None:
        """-1 or 1 where the corrected interval is on one side of 0, 0 where it holds it; None below two seeds."""
        if self.mean is None or self.half is None:
            return None
        return 0 if abs(self.mean) <= self.half else int(math.copysign(1, self.mean))
