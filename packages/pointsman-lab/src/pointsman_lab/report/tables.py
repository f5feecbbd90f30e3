"""The table of a comparison: routers x k over seeds, and paired differences to one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._grid import NONE, Grid, formatted
from pointsman_lab._shapes import MOST_PAIRS
from pointsman_lab._values import finite
from pointsman_lab.intervals import LEVEL
from pointsman_lab.report.cell import LEAST_SEEDS, Cell, Metric, Paired, by_pretraining, metric, significantly_best
from pointsman_lab.report.forms import Forms, joined
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.record import RunRecord, over_layers

COSTS = ("mflop", "active", "params")
OTHERS = ("entropy", "experts/token", "router params", *COSTS, "s/step", "seeds")  # titles after those of k
CSV_COSTS = ("FLOPs a token", "active parameters", "parameters")
ENTROPY = "Entropy: nats, of the router's full distribution, mean over tokens and layers at the largest k"
COUNTED = (
    "MFLOP, active: FLOPs a token and its parameters, counted, at the first k of training; params: all trainable ones"
)

COST = ("flops", "active", "total")
"""What evaluation.json says of the cost of a token."""


def cost_of(runs: Iterable[RunRecord]) -> Mapping[str, int]:
    """What a token costs at the first k of training, by `COST`, of the first run that says so; {} of none. "total" of a
    fine-tuning is what trains there: no frozen part, but the head."""
    done = (run.evaluation for run in runs if run.done)
    found = next((one for one in done if (one.get("cost") or {}).keys() >= set(COST)), {})
    tuned = "frozen" in (found.get("protocol") or {}) and found.get("parameters") is not None
    return {**found["cost"], "total": found["parameters"]} if tuned else found.get("cost", {})


def cost_cells(cost: Mapping[str, int]) -> list[str]:
    """The cells under `COSTS`."""
    return [f"{cost['flops'] / 1e6:.3g}", f"{cost['active']:,}", f"{cost['total']:,}"] if cost else [NONE] * len(COSTS)


@dataclass(frozen=True)
class Row:
    """One router of a comparison.

    Attributes:
        router: its spec.
        quality: k -> the metric over seeds.
        entropy: of the full distribution before mixing, in nats, mean over tokens and layers, at the largest k.
        router_parameters: trainable parameters of all routers; None for dense models.
        cost: of a token at the first k of training: "flops", "active" and "total" parameters; empty where not recorded.
        step_seconds: median training step.
        experts: k -> mean number of experts a token, where the evaluation recorded it.
        done, missing: seeds with and without an evaluation.
        ranges: k -> the ends of an audit's 95 % interval.
    """

    router: str
    quality: Mapping[int, Cell]
    entropy: Cell
    router_parameters: int | None
    step_seconds: Cell
    experts: Mapping[int, Cell]
    done: Sequence[int]
    missing: Sequence[int]
    ranges: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    cost: Mapping[str, int] = field(default_factory=dict)

    @property
    def experts_a_token(self) -> str:
        """At the largest k; at every k where at some k there are more than k."""
        each = [cell.text(2) for cell in self.experts.values()] or [NONE]
        more = any((cell.mean or 0) > k + 1e-6 for k, cell in self.experts.items())
        return " / ".join(each) if more else each[-1]


@dataclass(frozen=True)
class ComparisonTable(Forms):
    """Routers x k, with what they cost.

    Attributes:
        rows: in the comparison's order. top_k: all k of the rows, ascending.
        metric: of the cells. split: of the data.
        baseline: the row that is subtracted in paired differences.
        audit: whether the rows are audits of models, which have no seeds and no costs.
        names: router -> what the tables call it. columns: titles of those that the table shows; () = all.
        repeats: fine-tunings whose seeds have the same rest by it are of one run, which counts once; 0: none are.
    """

    rows: Sequence[Row]
    top_k: Sequence[int]
    metric: Metric
    baseline: str
    split: str = "test"
    audit: bool = False
    repeats: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path, *, baseline: str | None = None, split: str = "test") -> ComparisonTable:
        """The table of a comparison directory (or of a single run)."""
        return cls.of(read_comparison(path), baseline=baseline, split=split)

    @classmethod
    def of(cls, comparison: Comparison, *, baseline: str | None = None, split: str = "test") -> ComparisonTable:
        """The table of a comparison."""
        baseline = baseline or comparison.shown.get("baseline")
        if baseline is not None and baseline not in comparison.routers:
            raise RunError(f"baseline {baseline!r}: {did_you_mean(baseline, comparison.routers)}")
        results = [row for run in comparison.runs.values() for row in run.results(split).values()]
        names = {str(row.get("metric", "loss")) for row in results}
        if len(names) > 1:
            raise RunError(f"{comparison.path}: runs were evaluated by different metrics: {', '.join(sorted(names))}")
        if len(shown := {str(row.get("split", split)) for row in results}) > 1:
            raise RunError(f"{comparison.path}: runs were evaluated on different parts: {', '.join(sorted(shown))}")
        split = shown.pop() if shown else split
        rows = [_row(comparison, router, split) for router in comparison.routers]
        ks = sorted({k for row in rows for k in row.quality})
        if (cells := len(rows) * len(ks)) > MOST_PAIRS:
            raise RunError(f"{comparison.path}: rows times k is {cells:,}; at most {MOST_PAIRS:,} are shown")
        first = baseline or next(iter(comparison.routers), NONE)
        audit = bool(comparison.runs) and all(run.is_audit for run in comparison.runs.values())
        names_of = {row: " ".join(name.split()) for row, name in comparison.shown.get("names", {}).items()}
        measure = metric(names.pop() if names else "bits_per_character")
        table = cls(rows, ks, measure, first, split, audit, names=names_of)
        # one that was asked for may be gone: the k of the evaluation can change
        return replace(table, columns=[one for one in comparison.shown.get("columns", ()) if one in table.header[1:]])

    def label(self, router: str) -> str:
        """What the tables call a router."""
        return self.names.get(router, router)

    def quality(self, row: Row, top_k: int) -> Cell:
        """One cell; empty where the row has none."""
        return row.quality.get(top_k, Cell({}))

    def differences(self) -> dict[str, dict[int, Cell]]:
        """Every other router -> k -> it minus the baseline, over the seeds that both have (negative: smaller).

        A baseline without routers has one figure, which is subtracted at every k.
        """
        base = next((row for row in self.rows if row.router == self.baseline), None)
        if base is None or self.audit:  # audits have no seeds
            return {}
        own = {k: self.quality(base, k) for k in self.top_k}
        if base.router_parameters is None and len(base.quality) == 1:
            own = dict.fromkeys(self.top_k, next(iter(base.quality.values())))
        others = [row for row in self.rows if row is not base]
        return {row.router: {k: self.quality(row, k).minus(own[k]) for k in self.top_k} for row in others}

    def best(self, top_k: int) -> set[str]:
        """The row with the best mean at this k, if it is `significantly_best` from every other row."""
        cells = {row.router: self.quality(row, top_k) for row in self.rows}
        if self.repeats:
            cells = {router: Cell(by_pretraining(cell.values, self.repeats)) for router, cell in cells.items()}
        return significantly_best(cells, lower_is_better=self.metric.lower_is_better)

    @property
    def varies(self) -> bool:
        """Whether some row's tokens do not all get k experts, or not the largest k: a column then says how many."""
        most = max((k for row in self.rows for k in row.experts), default=0)
        of = ((k if k < max(row.experts) else most, one.mean) for row in self.rows for k, one in row.experts.items())
        return any(mean is not None and abs(mean - k) > 1e-6 for k, mean in of)

    def grid(self) -> Grid:
        """Routers x k as text, with what they cost; the best of each k in bold."""
        rows = [
            [
                row.router,
                *(self.quality(row, k).shown(self.metric) for k in self.top_k),
                row.entropy.text(3),
                *([row.experts_a_token] if self.varies else []),
                *([] if self.audit else self._costs(row)),
            ]
            for row in self.rows
        ]
        winners = [self.best(k) for k in self.top_k]
        best = {(i, j) for i, row in enumerate(self.rows) for j, won in enumerate(winners, 1) if row.router in won}
        grid = Grid(self.header, rows, best, self.caption).named(self.names)
        return grid.only(self.columns) if self.columns else grid

    @property
    def header(self) -> list[str]:
        """The titles of all columns."""
        gone = {*(() if self.varies else OTHERS[1:2]), *(OTHERS[2:] if self.audit else () if self.counted else COSTS)}
        return ["router", *self.titles, *(title for title in OTHERS if title not in gone)]

    @property
    def counted(self) -> bool:
        """Whether some row says what a token costs; records of earlier versions do not."""
        return any(row.cost for row in self.rows)

    def _costs(self, row: Row) -> list[str]:
        return [
            formatted(row.router_parameters, ","),
            *(cost_cells(row.cost) if self.counted else ()),
            formatted(row.step_seconds.mean, ".3g"),
            f"{len(row.done)}/{len(row.done) + len(row.missing)}",
        ]

    def paired(self) -> dict[str, dict[int, Paired]]:
        """`differences` in printed units, intervals corrected for their number; of fine-tunings one value a run."""
        pooled = partial(by_pretraining, repeat=self.repeats) if self.repeats else dict
        values = {
            router: {k: [value * self.metric.scale for value in pooled(cell.values).values()] for k, cell in of.items()}
            for router, of in self.differences().items()
        }
        count = max(1, sum(len(one) >= LEAST_SEEDS for of in values.values() for one in of.values()))
        return {router: {k: Paired(one, count) for k, one in of.items()} for router, of in values.items()}

    def difference_grid(self) -> Grid:
        """Paired differences as text, significant ones in bold; only rows that can be paired."""
        rows: list[list[str]] = []
        significant, paired = set(), self.paired()
        shown = {router: of for router, of in paired.items() if any(one.values for one in of.values())}
        for router, of in shown.items():
            significant |= {(len(rows), j) for j, one in enumerate(of.values(), 1) if one.sign and one.enough}
            rows.append([router, *(one.text(self.metric.decimals) for one in of.values())])
        intervals = {one.comparisons for of in paired.values() for one in of.values() if one.enough}
        each = [(cell, paired[router][k]) for router, of in self.differences().items() for k, cell in of.items()]
        pooled = any(len(one.values) < len(cell.values) for cell, one in each)
        caption = (
            f"Paired differences to {self.label(self.baseline)} in {self.metric.label} ({self.metric.direction}): same "
            f"seed and data order; {'fine-tunings of one pre-trained run count as one, their mean; ' * pooled}mean"
        )
        if intervals:
            caption += (
                f" ± half of the {LEVEL:.0%} confidence interval (Student's t), corrected for the {intervals.pop()} "
                "intervals of this table (Bonferroni); in brackets not corrected; none below three seeds. Bold: the "
                "interval excludes 0."
            )
        else:
            caption += ". None has three seeds, so none has an interval."
        return Grid(["router", *self.titles], rows, significant, caption).named(self.names)

    @property
    def titles(self) -> list[str]:
        """The titles of the columns of k."""
        return [f"k={k}" for k in self.top_k]

    @property
    def caption(self) -> str:
        if self.audit:
            return f"{self.metric.label} on the text ({self.metric.direction}). {ENTROPY}."
        told = {"entropy": ENTROPY, "router params": "router params: trainable ones"}
        told |= {**(dict.fromkeys(COSTS, COUNTED) if self.counted else {}), "s/step": "s/step: median training step"}
        words = "; ".join(dict.fromkeys(told[title] for title in told if title in (self.columns or told)))
        return (
            f"{self.metric.label} on the {self.split} split ({self.metric.direction}); mean ± sample standard "
            f"deviation over seeds. {words[:1].upper()}{words[1:]}{'. ' if words else ''}Bold: significantly different "
            "from every other row (95 % intervals of the paired differences, corrected for their number)."
        )

    @property
    def file(self) -> str:
        return "table"

    def shown_grids(self) -> list[Grid]:
        """Quality and cost, then the paired differences."""
        return [self.grid(), self.difference_grid()]

    def text(self) -> str:
        """Plain aligned text; below it the seeds that are missing."""
        told = [f"{self.label(of.router)}: seeds {', '.join(map(str, of.missing))}" for of in self.rows if of.missing]
        return joined(super().text().rstrip("\n"), f"Missing: {'; '.join(told)}" if told else "")

    def csv(self) -> str:
        """Comma-separated, full precision, one line a router."""
        per_k = [name for k in self.top_k for name in (f"k={k} mean", f"k={k} std", f"k={k} seeds")]
        tail = ["entropy mean", "entropy std", "router parameters", *(CSV_COSTS if self.counted else ())]
        rows = []
        for row in self.rows:
            line: list[Any] = [row.router, self.metric.name, self.split]
            for cell in (self.quality(row, k) for k in self.top_k):
                line += [cell.mean, cell.std, len(cell.values)]
            line += [row.entropy.mean, row.entropy.std, row.router_parameters]
            line += [*(row.cost.get(name) for name in COST if self.counted), row.step_seconds.mean]
            rows.append([*line, *(" ".join(map(str, seeds)) or None for seeds in (row.done, row.missing))])
        tail += ["step seconds", "seeds done", "seeds missing"]
        return Grid(["router", "metric", "split", *per_k, *tail], rows).csv()


def _row(comparison: Comparison, router: str, split: str) -> Row:
    done = [run for run in comparison.of(router) if run.done]
    quality: dict[int, dict[int, float]] = {}
    experts: dict[int, dict[int, float]] = {}
    for run in done:
        for k, result in run.results(split).items():
            if (mean := over_layers(result, "experts_per_token")) is not None:
                experts.setdefault(k, {})[run.seed] = mean
            if (value := finite(result.get("value"))) is not None:
                quality.setdefault(k, {})[run.seed] = value
    largest = {run.seed: results[max(results)] for run in done if (results := run.results(split))}
    entropy = {seed: over_layers(result, "entropy") for seed, result in largest.items()}
    parameters = [value for run in done if (value := finite(run.evaluation.get("router_parameters"))) is not None]
    seconds = {run.seed: finite(run.evaluation.get("step_seconds")) for run in done}
    has_router = any(result.get("routers") for run in done for result in run.results(split).values())
    return Row(
        router=router,
        quality={k: Cell(values) for k, values in sorted(quality.items())},
        entropy=Cell({seed: value for seed, value in entropy.items() if value is not None}),
        router_parameters=int(parameters[0]) if parameters and has_router else None,
        cost=cost_of(done),
        step_seconds=Cell({seed: value for seed, value in seconds.items() if value is not None}),
        experts={k: Cell(values) for k, values in sorted(experts.items())},
        done=[run.seed for run in done],
        missing=[seed for seed in comparison.seeds if seed not in {run.seed for run in done}],
        ranges={
            k: (float(low), float(high))
            for run in done
            for k, result in run.results(split).items()
            if run.is_audit and (low := finite(result.get("low"))) and (high := finite(result.get("high")))
        },
    )
