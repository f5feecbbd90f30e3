"""What a claim or a trend measures of a row, one figure a seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman_lab._values import finite, mean_of
from pointsman_lab.report.cell import by_pretraining, squared_variation
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.report.task_table import TaskTable, consistency, finetunings, pretrained_of
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord
from pointsman_lab.tasks.attacks.table import attack_tables
from pointsman_lab.tasks.images.robust_table import figures, shifted_images

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
        if self.name not in ("consistency", "transfer"):
            return self._figures(comparison.of(router))
        tuned = [run for run in finetunings(comparison, self.task) if run.router == router]
        return self._consistency(tuned) if self.name == "consistency" else by_pretraining(self._figures(tuned))

    def unit(self, comparison: Comparison | None) -> str:
        if UNITS[self.name] or comparison is None:
            return UNITS[self.name]
        label = ComparisonTable.of(comparison).metric.label
        return {"bits per character": "bits"}.get(label, label)

    @property
    def text(self) -> str:
        attack = f"{self.rate:.3g} of the words attacked"
        special = {"attack": attack, "attacked": f"quality with {attack}", "accuracy": self.task}
        special |= {"transfer": f"{self.task} without English", "consistency": f"consistency of {self.task}"}
        special |= {name: f"{name} ({record})" for name, (record, _, _) in SHIFTED.items()}
        return special.get(self.name, self.name) + (f", k = {self.k}" if self.k else "")

    def _consistency(self, tuned: Sequence[RunRecord]) -> dict[int, float]:
        """By the seed of pre-training, which is that of the first fine-tuning."""
        runs: dict[Path, list[RunRecord]] = {}
        for run in tuned:
            if run.done:
                runs.setdefault(pretrained_of(run.path), []).append(run)
        records = {min(run.seed for run in of): [(run.path, run.evaluation) for run in of] for of in runs.values()}
        found = {seed: consistency(of, top_k=self.k) for seed, of in records.items()}
        return {seed: value for seed, value in sorted(found.items()) if value is not None}

    def _figures(self, runs: Sequence[RunRecord]) -> dict[int, float]:
        values = {run.seed: self._of_run(run) for run in runs}
        return {seed: value for seed, value in values.items() if value is not None}

    def _of_run(self, run: RunRecord) -> float | None:
        scale = 100.0 if self.name == "transfer" else 1.0
        if self.name in ("nats", "transfer"):
            value = finite(self._result(run).get(self.name))
        elif self.name in SHIFTED:
            name, column, scale = SHIFTED[self.name]
            record = shifted_images(run, name)
            value = figures(record, self.k or max(record["protocol"]["top_k"])).get(column) if record else None
        elif self.name in DIAGNOSED:
            value = mean_of(DIAGNOSED[self.name](run.diagnostics).values())
        else:
            value = mean_of(map(self._of_layer, (self._result(run).get("routers") or {}).values()))
        return None if value is None else scale * value

    def _result(self, run: RunRecord) -> Mapping[str, Any]:
        """What was evaluated at k; at the largest k where k is 0, and of a model without routers."""
        results = run.results()
        largest = results[max(results)] if results else {}
        return results.get(self.k) or (largest if not (self.k and largest.get("routers")) else {})

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


Layers = Mapping[str, float | None]


def _diagnosed(part: str, key: str, at: int | None = None) -> Callable[[Mapping[str, Any]], Layers]:
    """Layer -> part -> key of diagnostics.json, or of one of the earlier checkpoints in it."""

    def values(found: Mapping[str, Any]) -> Layers:
        if at is not None:
            found = history[at] if (history := found.get("history")) else {}
        return {name: finite((of.get(part) or {}).get(key)) for name, of in (found.get("layers") or {}).items()}

    return values


def _collapse_change(found: Mapping[str, Any]) -> Layers:
    first, last = (_diagnosed("collapse", "value", at)(found) for at in (0, None))
    ends = {name: (first.get(name), value) for name, value in last.items()}
    return {name: None if one is None or two is None else two - one for name, (one, two) in ends.items()}


DIAGNOSED = {
    "collapse": _diagnosed("collapse", "value"),
    "collapse change": _collapse_change,
    "fluctuation": _diagnosed("fluctuation", "top1", -1),
    "set fluctuation": _diagnosed("fluctuation", "sets", -1),
    "neighbours": _diagnosed("mixing", "effective_mean"),
    "own weight": _diagnosed("mixing", "own_mean"),
    "effective experts": _diagnosed("load", "effective"),
    "information": _diagnosed("specialisation", "corrected"),
}
"""Measure -> its values in diagnostics.json by layer."""

SHIFTED = {
    "drop": ("robust-c", "drop", 100.0),
    "outliers": ("robust-o", "AUPR", 100.0),
    "moved": ("robust-c", "set moved", 1.0),
}
"""Measure -> its record without ".json", a column of `robust_tables`, and a scale."""
