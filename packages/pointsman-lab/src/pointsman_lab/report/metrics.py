"""Metrics: label, decimals, and which direction is better; and how uneven a layer's loads are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    )
}


def metric(name: str) -> Metric:
    """The metric of that name; an unknown one is shown as it is, lower counted as better."""
    return METRICS.get(name, Metric(name, name.replace("_", " ")))


def squared_variation(layer: Mapping[str, Any]) -> float | None:
    """Squared coefficient of variation of a layer's expert loads, 0 = even; None without loads."""
    load = [share or 0.0 for share in layer.get("load") or []]
    return statistics.pvariance(load) / statistics.fmean(load) ** 2 if load and sum(load) else None
