"""What a claim or a trend measures of a row, one figure a seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman_lab._values import finite
from pointsman_lab.report.cell import by_pretraining, squared_variation
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.report.task_table import TaskTable, consistency, finetunings, pretrained_of
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord
from pointsman_lab.tasks.attacks.table import attack_tables
from pointsman_lab.tasks.images.robust_table import figure_of, shifted_images

UNITS = {
    "quality": "", "nats": "nats", "entropy": "nats", "mixed entropy": "nats",
    "imbalance": "squared coefficient of variation", "attacked": "", "attack": "loss from clean", "accuracy": "points",
    "transfer": "points", "collapse": "RC", "fluctuation": "share of tokens", "set fluctuation": "share of tokens",
    "neighbours": "tokens", "collapse change": "RC", "own weight": "share", "effective experts": "experts",
    "information": "nats", "drop": "points", "outliers": "points", "moved": "share of patches",
    "consistency": "correlation",
}  # fmt: skip
"""Measure -> unit; "" = the grid's own."""

MARGINS = {
    "entropy": 0.05, "mixed entropy": 0.05, "imbalance": 0.1, "attack": 0.02, "accuracy": 1.0, "transfer": 1.0,
    "collapse": 0.5, "neighbours": 1.0, "own weight": 0.05, "effective experts": 0.25, "information": 0.05, "drop": 1.0,
    "outliers": 1.0, "moved": 0.01, "consistency": 0.05, "score": 0.05,
}  # fmt: skip
"""Measure -> the difference that counts as none, in its unit; of all others 0.01."""

AT_ONE_K = ("quality", "accuracy", "attack", "attacked")
"""Figures that a table has for each k."""


@dataclass(frozen=True)
class Measure:
    """One figure of a run.

    Attributes:
        name: of `UNITS`. quality: the table's metric at k. entropy, mixed entropy, imbalance (of the loads): means over
            layers at k, at the largest k where k is 0. attacked: quality with `rate` of the words attacked (0 = clean);
            attack: the same minus that without attack. nats: of masked language modelling, the mean over masked pieces,
            of languages weighted by their sampling shares. accuracy: of a fine-tuning, the mean over languages where
            there are several, and over the fine-tunings of a run; of one on English, transfer: the mean over the
            others. consistency: of the loads at k of fine-tunings of one run, over their pairs, a figure for each run.
            The others come from `pointsman diagnose RUN` and are means over layers: collapse (RC; collapse change: of
            the last checkpoint minus the first), fluctuation (share of tokens whose first expert changed since the
            checkpoint before; set fluctuation: whose set of experts), neighbours (their effective number), own weight
            (S[i, i]), effective experts (exp of the entropy of their loads) and information (mutual, of the expert and
            the token's id, less Miller and Madow's bias). Of image runs (`evaluate RUN --robust c` and `o`): drop
            (accuracy on clean images minus that on corrupted ones), outliers (their AUPR) and moved (the share of
            patches whose set of experts differs between clean and corrupted images).
        k: experts a token; 0 = the largest that was evaluated; figures that a table has for each k need one.
        attack, rate: name and rate of an attack.
        task: a fine-tuning, as its files are named.
    """

    name: str
    k: int = 0
    attack: str = "word-enwik8-test"
    rate: float = 0.1
    task: str = ""

    def of(self, comparison: Comparison, router: str) -> dict[int, float]:
        """seed -> the figure in printed units, for the seeds that have it."""
        if self.name in AT_ONE_K:
            cells = [self._cell(table, router) for table in self._tables(comparison)]
            if not cells or any(not cell for cell in cells):
                return {}
            last, first = cells[-1], cells[0]
            found = {seed: last[seed] - (first[seed] if len(cells) > 1 else 0.0) for seed in last if seed in first}
            return by_pretraining(found) if self.name == "accuracy" else found
        if self.name in ("nats", "transfer"):
            runs = comparison.runs.values() if self.name == "nats" else finetunings(comparison, self.task)
            results = {run.seed: self._result(run) for run in runs if run.router == router}
            scale = 1.0 if self.name == "nats" else 100.0
            values = {seed: finite(result.get(self.name)) for seed, result in results.items()}
            found = {seed: scale * value for seed, value in values.items() if value is not None}
            return found if self.name == "nats" else by_pretraining(found)
        if self.name == "consistency":
            return self._consistency(comparison, router)
        if self.name in SHIFTED:
            shifted = {run.seed: self._of_shifted(run) for run in comparison.of(router)}
            return {seed: value for seed, value in shifted.items() if value is not None}
        layers = {run.seed: self._of_layers(run) for run in comparison.of(router)}
        return {seed: statistics.fmean(values) for seed, values in layers.items() if values}

    def unit(self, comparison: Comparison | None) -> str:
        """The unit of the figures."""
        if UNITS[self.name] or comparison is None:
            return UNITS[self.name]
        label = ComparisonTable.of(comparison).metric.label
        return {"bits per character": "bits"}.get(label, label)

    @property
    def text(self) -> str:
        """What is measured, in words."""
        attack = f"{self.rate:.3g} of the words attacked"
        special = {"attack": attack, "attacked": f"quality with {attack}", "accuracy": self.task}
        special |= {"transfer": f"{self.task} without English", "consistency": f"consistency of {self.task}"}
        special |= {name: f"{name} ({record})" for name, (record, _, _) in SHIFTED.items()}
        return special.get(self.name, self.name) + (f", k = {self.k}" if self.k else "")

    def _consistency(self, comparison: Comparison, router: str) -> dict[int, float]:
        """By the seed of pre-training, which is that of the first fine-tuning."""
        runs: dict[Path, list[RunRecord]] = {}
        for run in finetunings(comparison, self.task):
            if run.router == router and run.done:
                runs.setdefault(pretrained_of(run.path), []).append(run)
        found = {
            min(run.seed for run in of): consistency([(run.path, run.evaluation) for run in of], top_k=self.k)
            for of in runs.values()
        }
        return {seed: value for seed, value in sorted(found.items()) if value is not None}

    def _of_layers(self, run: RunRecord) -> list[float]:
        if self.name in DIAGNOSED:
            values = DIAGNOSED[self.name](run.diagnostics)
        else:
            values = [self._of_layer(layer) for layer in (self._result(run).get("routers") or {}).values()]
        return [value for value in values if value is not None]

    def _result(self, run: RunRecord) -> Mapping[str, Any]:
        """What was evaluated at k; at the largest k where k is 0, and of a model without routers."""
        results = run.results()
        largest = results[max(results)] if results else {}
        return results.get(self.k) or (largest if not (self.k and largest.get("routers")) else {})

    def _of_shifted(self, run: RunRecord) -> float | None:
        name, column, scale = SHIFTED[self.name]
        if not (record := shifted_images(run, name)):
            return None
        value = figure_of(record, column, self.k or max(record["protocol"]["top_k"]))
        return None if value is None else scale * value

    def _of_layer(self, layer: Mapping[str, Any]) -> float | None:
        if self.name == "imbalance":
            return squared_variation(layer)
        if self.name == "mixed entropy":  # a router that mixes nothing selects by what it scored
            return finite(layer.get("mixed_entropy", layer.get("entropy")))
        return finite(layer.get(self.name))

    def _tables(self, comparison: Comparison) -> list[ComparisonTable]:
        """The tables whose cells count; of two the last minus the first."""
        if self.name == "quality":
            return [ComparisonTable.of(comparison)]
        if self.name == "accuracy":
            return [TaskTable.of(comparison, self.task).table]
        for attacked in attack_tables(comparison):
            if attacked.name == f"attack-{self.attack}":
                by_rate = {one.rate: one.table for one in attacked.conditions}
                if self.name == "attacked":
                    return [by_rate[self.rate]] if self.rate in by_rate else []
                return [by_rate[0], by_rate[self.rate]] if self.rate in by_rate and 0 in by_rate else []
        return []

    def _cell(self, table: ComparisonTable, router: str) -> dict[int, float]:
        for row in table.rows:
            if row.router == router:
                cell = table.quality(row, self.k)
                if row.router_parameters is None and not cell.values:  # a model without routers has one figure
                    cell = next(iter(row.quality.values()), cell)
                return {seed: value * table.metric.scale for seed, value in cell.values.items()}
        return {}


def _diagnosed(part: str, key: str) -> Callable[[Mapping[str, Any]], list[float | None]]:
    """layer -> part -> key of diagnostics.json."""
    return lambda found: [finite((layer.get(part) or {}).get(key)) for layer in (found.get("layers") or {}).values()]


def _last_change(key: str) -> Callable[[Mapping[str, Any]], list[float | None]]:
    """layer -> fluctuation -> key of the last earlier checkpoint of diagnostics.json."""

    def values(found: Mapping[str, Any]) -> list[float | None]:
        layers = history[-1]["layers"].values() if (history := found.get("history")) else ()
        return [finite((layer.get("fluctuation") or {}).get(key)) for layer in layers]

    return values


def _collapse_change(found: Mapping[str, Any]) -> list[float | None]:
    if not (history := found.get("history")):  # which has the earlier checkpoints alone
        return []
    first, last = (
        {name: finite((layer.get("collapse") or {}).get("value")) for name, layer in of["layers"].items()}
        for of in (history[0], found)
    )
    ends = [(first.get(name), value) for name, value in last.items()]
    return [None if one is None or two is None else two - one for one, two in ends]


DIAGNOSED = {
    "collapse": _diagnosed("collapse", "value"),
    "collapse change": _collapse_change,
    "fluctuation": _last_change("top1"),
    "set fluctuation": _last_change("sets"),
    "neighbours": _diagnosed("mixing", "effective_mean"),
    "own weight": _diagnosed("mixing", "own_mean"),
    "effective experts": _diagnosed("load", "effective"),
    "information": _diagnosed("specialisation", "corrected"),
}
"""Measure -> its values in diagnostics.json, one a layer."""

SHIFTED = {
    "drop": ("robust-c", "drop", 100.0),
    "outliers": ("robust-o", "AUPR", 100.0),
    "moved": ("robust-c", "set moved", 1.0),
}
"""Measure -> its record without ".json", a column of `robust_tables`, and a scale."""
