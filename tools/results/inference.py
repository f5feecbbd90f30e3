"""From paired differences to verdicts: moderated t, Holm, Benjamini-Hochberg, equivalence, and what a design can see.

A family is a small named set of claims that are judged together. Within it:

- Each claim has n paired differences, one a seed. Their variance is moderated (Smyth 2004, limma): with few seeds a
  variance is a poor estimate, so it is drawn towards what all claims of the same measure show,
  s~^2 = (d0 s0^2 + d s^2) / (d0 + d); t = mean sqrt(n) / s~ has d0 + d degrees of freedom, but never more than all
  claims of the measure have together, as in limma.
- Two-sided p-values of a primary family are corrected by Holm's method (the chance of any false difference is at most
  5 %), those of an exploratory one by Benjamini and Hochberg's (at most 5 % of its verdicts are expected to be false).
- A claim that is not decided so is tested for equivalence: two one-sided tests (Schuirmann 1987) against a margin that
  the claim states, corrected in the same way.
- A claim of equality holds where it is equivalent, and does not hold where the difference is significantly larger than
  the margin, which is then what p is of.
- What is left is undecided. Beside it stands the smallest difference that the design would have seen with a power of
  about 80 % (of a claim of equality the smallest margin), and how many more seeds would make that the margin.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special, stats

ALPHA, POWER = 0.05, 0.8
MOST_SEEDS = 1_000


@dataclass(frozen=True)
class Prior:
    """What the variances of many comparisons have in common: s^2 ~ s0^2 F(d, d0).

    Attributes:
        variance: s0^2.
        freedom: d0, in degrees of freedom; infinite where the variances differ by chance alone, 0 = no prior.
        pooled: the degrees of freedom of all these variances together; no test has more (limma).
    """

    variance: float = 0.0
    freedom: float = 0.0
    pooled: float = math.inf

    @classmethod
    def of(cls, variances: Sequence[float], freedoms: Sequence[int]) -> Prior:
        """The prior by the moments of log s^2 (Smyth 2004, section 6.2); none below three variances above 0."""
        kept = [(v, d) for v, d in zip(variances, freedoms, strict=True) if v > 0 and d > 0]
        if len(kept) < 3:
            return cls()
        s2, d = (np.array(column, dtype=float) for column in zip(*kept, strict=True))
        e = np.log(s2) - special.digamma(d / 2) + np.log(d / 2)
        excess = float(e.var(ddof=1) - special.polygamma(1, d / 2).mean())
        if excess <= 0:  # the mean is the best estimate then, as in limma since 2017
            return cls(float(s2.mean()), math.inf, float(d.sum()))
        half = inverse_trigamma(excess)
        return cls(math.exp(float(e.mean() + special.digamma(half) - math.log(half))), 2 * half, float(d.sum()))

    def moderate(self, variance: float, freedom: int) -> tuple[float, float]:
        """(s~^2, its degrees of freedom)."""
        if math.isinf(self.freedom):
            return self.variance, self.pooled
        total = self.freedom + freedom
        return (self.freedom * self.variance + freedom * variance) / total, min(total, self.pooled)


def inverse_trigamma(value: float) -> float:
    """x > 0 with trigamma(x) = value > 0."""
    low, high = 1e-8, 1.0
    while special.polygamma(1, high) > value:
        high *= 2
    return float(optimize.brentq(lambda x: special.polygamma(1, x) - value, low, high))


@dataclass(frozen=True)
class Judged:
    """One claim's differences and what follows from them.

    Attributes:
        values: row minus base, one a seed.
        margin: differences within plus and minus this count as none.
        prior: of the variances of its measure.
        expected: "less" or "more" than the base, or "equal".
        p, p_equal: of a difference (where equality is claimed, of one beyond the margin), and of equivalence; corrected
            for the family once `judge` has seen it.
        alpha: the level that the claim would have to itself if every claim of the family were as hard: 5 % divided by
            their number (Holm's first step).
    """

    values: Sequence[float]
    margin: float
    prior: Prior = Prior()
    expected: str = "less"
    p: float = math.nan
    p_equal: float = math.nan
    alpha: float = ALPHA

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def spread(self) -> tuple[float, float]:
        """(s~, its degrees of freedom)."""
        variance, freedom = self.prior.moderate(float(np.var(self.values, ddof=1)), len(self.values) - 1)
        return math.sqrt(variance), freedom

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.spread[0] / math.sqrt(len(self.values))

    @property
    def half(self) -> float:
        """Half of the 95 % interval of this claim alone."""
        return float(stats.t.ppf(1 - ALPHA / 2, self.spread[1])) * self.error

    def tested(self) -> Judged:
        """With the p-values of this claim alone."""
        freedom, error, size = self.spread[1], self.error, abs(self.mean)
        none = self.margin if self.expected == "equal" else 0.0  # the largest size that counts as no difference
        if error == 0:
            return replace(self, p=float(size <= none), p_equal=float(size >= self.margin))
        limits = np.array([size - none, size + none, self.margin - size])
        beyond, below, equal = stats.t.sf(limits / error, freedom)
        return replace(self, p=float(beyond + below), p_equal=float(equal))

    @property
    def smallest(self) -> float:
        """The smallest difference (margin, where equality is claimed) that is seen with a power of 80 % at `alpha`."""
        return self._smallest(len(self.values))

    def _smallest(self, seeds: int) -> float:
        seen = smallest_margin if self.expected == "equal" else smallest_effect
        return seen(self.spread[0], seeds, self.spread[1] + seeds - len(self.values), self.alpha)

    @property
    def more_seeds(self) -> int:
        """More seeds that make the smallest difference that is seen the margin at this spread; at most `MOST_SEEDS`."""
        seeds = range(len(self.values), len(self.values) + MOST_SEEDS)
        return bisect_left(seeds, True, key=lambda number: self._smallest(number) <= self.margin)

    @property
    def verdict(self) -> str:
        """holds, does not hold, equivalent, or undecided."""
        if self.expected == "equal" and self.p_equal < ALPHA:
            return "holds"
        if self.p < ALPHA:
            return "holds" if self.expected == ("less" if self.mean < 0 else "more") else "does not hold"
        return "equivalent" if self.p_equal < ALPHA else "undecided"


def smallest_margin(spread: float, seeds: int, freedom: float, alpha: float) -> float:
    """The margin within which two one-sided tests at `alpha` show exact equality with a power of about 80 %."""
    return float(stats.t.ppf(1 - alpha, freedom) + stats.t.ppf((1 + POWER) / 2, freedom)) * spread / math.sqrt(seeds)


def smallest_effect(spread: float, seeds: int, freedom: float, alpha: float) -> float:
    """The mean difference that a two-sided t-test at `alpha` sees with a power of 80 %, by the noncentral t."""
    limit = float(stats.t.ppf(1 - alpha / 2, freedom))
    if math.isinf(freedom):
        shift = limit + float(stats.norm.ppf(POWER))
    else:
        shift = float(optimize.brentq(lambda nc: stats.nct.sf(limit, freedom, nc) - POWER, 0, 2 * limit + 10))
    return shift * spread / math.sqrt(seeds)


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected by Holm's method (1979): the i-th smallest of m times m - i + 1, in ascending order."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(np.asarray(p)[order] * np.arange(len(p), 0, -1)).clip(max=1)
    return [float(value) for value in corrected[np.argsort(order)]]


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """p-values corrected by the method of Benjamini and Hochberg (1995)."""
    return [float(value) for value in stats.false_discovery_control(p)]


CORRECTIONS = {"primary": holm, "exploratory": benjamini_hochberg}


def judge(tests: Sequence[Judged], kind: str, planned: int = 0) -> list[Judged]:
    """The tests of one family with corrected p-values.

    Args:
        kind: "primary" (Holm) or "exploratory" (Benjamini-Hochberg).
        planned: how many claims the family has, if those without runs count, too.
    """
    if not tests:
        return []
    missing = [1.0] * (planned - len(tests))
    single = [test.tested() for test in tests]
    correct = CORRECTIONS[kind]
    different, equal = (correct([getattr(one, name) for one in single] + missing) for name in ("p", "p_equal"))
    alpha = ALPHA / (len(single) + len(missing))
    return [
        replace(one, p=p, p_equal=p_equal, alpha=alpha)
        for one, p, p_equal in zip(single, different, equal, strict=False)  # without those that are missing
    ]
