"""Student's t, intervals of ratios of sums over blocks of text, and what is shown to stay within a margin."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

LEVEL = 0.95
LEAST_BLOCKS = 3  # below, an interval is not given


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


@cache
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


def half_width(error: float, blocks: int, comparisons: int = 1) -> float | None:
    """Half of the interval of a figure with this standard error, for so many comparisons together (Bonferroni)."""
    if blocks < LEAST_BLOCKS or not math.isfinite(error):
        return None
    return student_quantile(1 - (1 - LEVEL) / (2 * comparisons), blocks - 1) * error


def ratio(tops: Sequence[float], bottoms: Sequence[float], comparisons: int = 1) -> dict[str, Any]:
    """sum(tops) / sum(bottoms), blocks of text being the units that vary: {"mean", "error", "half", "blocks"}.

    The standard error is that of a ratio of sums: sqrt(n / (n - 1) sum (top - mean bottom)^2) / sum(bottoms). Tops that
    are differences of two settings on the same block give the error of a paired difference. `half` is half the width
    of the 95 % interval, corrected for the number of comparisons; None below three blocks.
    """
    used = [(top, bottom) for top, bottom in zip(tops, bottoms, strict=True) if bottom]
    total = sum(bottom for _, bottom in used)
    if not total:
        return {"mean": None, "error": None, "half": None, "blocks": 0}
    mean, count = sum(top for top, _ in used) / total, len(used)
    squares = sum((top - mean * bottom) ** 2 for top, bottom in used)
    error = math.sqrt(count / (count - 1) * squares) / total if count > 1 else None
    half = None if error is None else half_width(error, count, comparisons)
    return {"mean": mean, "error": error, "half": half, "blocks": count}


def smallest_within(prunings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of an audit's prunings the smallest model within the margin, of equal ones that of least loss; None without."""
    within = (one for one in prunings if one["within"])
    return min(within, key=lambda row: (row["kept"], row["share"]), default=None)
