"""One figure of a table: its metric, its values over seeds, paired differences and their confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pointsman_lab._grid import NONE
from pointsman_lab._values import finite
from pointsman_lab.intervals import LEVEL, student_quantile
from pointsman_lab.runs.paths import REPEAT

LEAST_SEEDS = 3  # below, an interval is not shown: with two seeds it says nothing


@dataclass(frozen=True)
class Metric:
    """A quality measure.

    Attributes:
        name: as in evaluation.json. label: in tables. lower_is_better: the direction.
        decimals: printed. scale: factor from the stored to the printed value.
    """

    name: str
    label: str
    lower_is_better: bool = True
    decimals: int = 3
    scale: float = 1.0

    @property
    def direction(self) -> str:
        return "lower is better" if self.lower_is_better else "higher is better"


METRICS = {
    metric.name: metric
    for metric in (
        Metric("bits_per_character", "bits per character"),
        Metric("bits_per_byte", "bits per byte"),
        Metric("perplexity", "perplexity", decimals=2),
        Metric("loss", "loss (nats)", decimals=4),
        Metric("nats", "loss (nats)", decimals=4),
        Metric("accuracy", "accuracy (%)", lower_is_better=False, decimals=2, scale=100.0),
        Metric("f1", "F1 (%)", lower_is_better=False, decimals=2, scale=100.0),
        Metric("bleu", "BLEU", lower_is_better=False, decimals=2),
        # of published tables alone
        Metric("entropy", "entropy", decimals=4),
        Metric("flops", "FLOPs (1e10)", decimals=3),
        Metric("parameters", "parameters", decimals=0),
        Metric("ratio", "ratio"),
        Metric("imbalance", "squared coefficient of variation"),
    )
}


def metric(name: str) -> Metric:
    """The metric of that name; an unknown one is shown as it is, lower counted as better."""
    return METRICS.get(name, Metric(name, name.replace("_", " ")))


def squared_variation(layer: Mapping[str, Any]) -> float | None:
    """Squared coefficient of variation of a layer's expert loads, 0 = even; None without loads."""
    load = [finite(share) or 0.0 for share in layer.get("load") or [0.0]]
    even = statistics.fmean(load) ** 2
    return statistics.pvariance(load) / even if even else None


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
    def enough(self) -> bool:
        """Whether there are seeds enough for an interval to be shown."""
        return len(self.values) >= LEAST_SEEDS

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
        if not self.enough or half is None or plain is None:
            return f"{self.mean:+z.{decimals}f}"
        return f"{self.mean:+z.{decimals}f} ± {half:.{decimals}f} ({plain:.{decimals}f})"

    @property
    def sign(self) -> int | None:
        """-1 or 1 where the corrected interval is on one side of 0, 0 where it holds it; None below two seeds."""
        if self.mean is None or self.half is None:
            return None
        return 0 if abs(self.mean) <= self.half else int(math.copysign(1, self.mean))


@dataclass(frozen=True)
class Cell:
    """One quantity over seeds."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None below two seeds."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    def text(self, decimals: int, scale: float = 1.0, *, sign: bool = False) -> str:
        """`mean ± std` with this many decimals, the mean alone for one seed, '-' for none."""
        if self.mean is None:
            return NONE
        mean = f"{self.mean * scale:{'+' if sign else ''}z.{decimals}f}"
        return mean if self.std is None else f"{mean} ± {self.std * scale:.{decimals}f}"

    def shown(self, metric: Metric, *, sign: bool = False) -> str:
        """`text` in the metric's units and with its decimals."""
        return self.text(metric.decimals, metric.scale, sign=sign)

    def minus(self, other: Cell) -> Cell:
        """The differences to another cell, over the seeds that both have."""
        return Cell({seed: own - other.values[seed] for seed, own in self.values.items() if seed in other.values})


def by_pretraining(values: Mapping[int, float], repeat: int = REPEAT) -> dict[int, float]:
    """Seed of a pre-trained run -> the mean over its fine-tunings, whose seeds are s + 1000 j (`repeat` 1: all)."""
    seeds = dict.fromkeys(seed % repeat for seed in values)
    return {one: statistics.fmean(value for seed, value in values.items() if seed % repeat == one) for one in seeds}


def significantly_best(cells: Mapping[str, Cell], *, lower_is_better: bool) -> set[str]:
    """The one with the best mean, if it is significantly different from each other one; else none.

    By paired 95 % intervals, corrected for their number, of three seeds or more.
    """
    better = -1 if lower_is_better else 1
    known = {name: cell for name, cell in cells.items() if cell.mean is not None}
    first, *others = sorted(known, key=lambda name: better * (known[name].mean or 0.0), reverse=True) or [""]
    differences = [Paired(list(known[first].minus(known[other]).values.values()), len(others)) for other in others]
    enough = all(len(one.values) >= LEAST_SEEDS for one in differences)
    return {first} if differences and enough and all(one.sign == better for one in differences) else set()
