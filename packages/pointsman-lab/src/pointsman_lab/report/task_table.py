"""The fine-tunings of a comparison on one task: accuracy at every k, paired differences, change of the routing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman_lab._grid import Grid, formatted
from pointsman_lab._values import finite, mean_of
from pointsman_lab.report.forms import Forms, unlike
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.paths import REPEAT, finetuned_runs
from pointsman_lab.runs.record import RunRecord, read_run

ROUTING_KEYS = ("top1", "sets", "consistency")
ROUTING_TOP_K = 2
OF_ROUTERS = {"balance", "frozen", "trained_with_k"}
"""Parts of a protocol that say nothing of a row without a router."""
ROUTING = (
    "Routing: share of tokens whose first expert (top1) or set of experts (sets) at k = 2 differs from the pre-trained "
    "model's, mean over layers and seeds; consistency: correlation of the loads at k = 2 between fine-tunings of one "
    "pre-trained run, without the diagonal."
)


def variants(comparison: Comparison) -> list[str]:
    """The variants (task and changed settings, as their folders are called) that runs were fine-tuned on."""
    return sorted({path.parent.name for run in comparison.runs.values() for path in finetuned_runs(run.path)})


def finetunings(comparison: Comparison, variant: str) -> list[RunRecord]:
    """Fine-tunings of the comparison's runs.

    With several pre-training seeds s: only those that `compare --task` makes, whose own seeds are s + 1000 j.
    """
    several = len(comparison.seeds) > 1
    return [
        tuned
        for router in comparison.routers
        for run in comparison.of(router)
        for path in finetuned_runs(run.path, variant)
        if (tuned := read_run(path)).seed % REPEAT == run.seed or not several
    ]


@dataclass(frozen=True)
class TaskTable(Forms):
    """A task's accuracies: routers x k over seeds, paired differences, change of the routing.

    Attributes:
        name: the variant: the task and changed settings, as in the folder names.
        table: our figures.
        protocol: of our evaluations.
        routing: router -> `routing_of` its fine-tunings.
    """

    name: str
    table: ComparisonTable
    protocol: Mapping[str, Any]
    routing: Mapping[str, Mapping[str, float | None]]
    unlike: str = ""

    @classmethod
    def of(cls, comparison: Comparison, variant: str) -> TaskTable:
        """The table of this task in a comparison; its rows are the routers of which a fine-tuning has begun."""
        return cls._of(variant, finetunings(comparison, variant), comparison)

    @classmethod
    def of_runs(cls, variant: str, tuned: Sequence[RunRecord]) -> TaskTable:
        """The table of fine-tunings of one run."""
        seeds = [run.seed for run in tuned]
        return cls._of(variant, tuned, Comparison(tuned[0].path, {}, [tuned[0].router], seeds, {}))

    @classmethod
    def _of(cls, variant: str, tuned: Sequence[RunRecord], comparison: Comparison) -> TaskTable:
        found = {(run.router, run.seed): run for run in tuned}
        seeds = sorted({run.seed for run in tuned}) or list(comparison.seeds)
        begun = {run.router for run in tuned}
        routers = [router for router in comparison.routers if router in begun or not tuned]
        protocol = next((run.evaluation.get("protocol") or {"split": "test"} for run in tuned if run.done), {})
        of_tuned = Comparison(comparison.path, comparison.settings, routers, seeds, found)
        table = ComparisonTable.of(of_tuned, split=protocol.get("split", "test"))
        table = replace(table, repeats=REPEAT if len(comparison.seeds) > 1 else 1)
        done = [(run.results(), run.evaluation.get("protocol") or {}) for run in tuned if run.done]
        differing = unlike([one for results, one in done if any(row.get("routers") for row in results.values())])
        differing = differing or unlike([{key: one[key] for key in one.keys() - OF_ROUTERS} for _, one in done])
        routing = {router: routing_of([run for run in tuned if run.router == router]) for router in routers}
        return cls(variant, table, protocol, routing, differing)

    @property
    def note(self) -> str:
        """The protocol in words."""
        protocol = self.protocol
        if not protocol:
            return "nothing has been fine-tuned yet"
        with suppress(AttributeError, LookupError, TypeError, ValueError):  # of a stranger's file
            return self._words(protocol) + self.unlike
        return "the protocol is not recorded"

    @staticmethod
    def _words(protocol: Mapping[str, Any]) -> str:
        start = "from scratch" if protocol["from_scratch"] else "from the pre-trained run"
        balance = protocol["balance"]
        words = [
            f"{protocol['task']}",
            f"{start}, {protocol['steps']:,} steps, trained with k = {protocol['trained_with_k']}",
            *([f"scored: {protocol['scored']}"] if "scored" in protocol else []),
            f"pooling: {protocol['pooling']}; length {protocol['length']}, cut: "
            + ", ".join(f"{split} {count:,}" for split, count in protocol["truncated"].items()),
            f"frozen: {', '.join(protocol['frozen']) or 'nothing'}; balance loss: "
            + ("as in pre-training" if balance is None else f"{balance:g}"),
            "seeds: that of pre-training, plus 1000 for each further fine-tuning of the same run",
        ]
        return "; ".join(words)

    @property
    def file(self) -> str:
        return f"task-{self.name}"

    @property
    def head(self) -> str:
        return f"{self.name}: {self.note}"

    def shown_grids(self) -> list[Grid]:
        """Accuracies, paired differences, and how fine-tuning changed the routing."""
        rows = [
            [router, *(formatted(values[key]) for key in ROUTING_KEYS)]
            for router, values in self.routing.items()
            if any(value is not None for value in values.values())
        ]
        return [*self.table.shown_grids(), Grid(["router", *ROUTING_KEYS], rows, caption=ROUTING)]

    def csv(self) -> str:
        """Ours, one line a router."""
        return self.table.csv()


def routing_of(runs: Sequence[RunRecord]) -> dict[str, float | None]:
    """How fine-tuning changed the routing of one router.

    Returns:
        {"top1", "sets": share of tokens whose first expert, or set of experts, differs from the pre-trained model's,
        mean over layers and runs; "consistency": `consistency` of the runs}; None where it does not exist.
    """
    layers = [of for run in runs for of in run.evaluation.get("change_from_pretrained", {}).get("layers", {}).values()]
    found = {key: mean_of(layer.get(key) for layer in layers) for key in ("top1", "sets")}
    return {**found, "consistency": consistency([(run.path, run.evaluation) for run in runs if run.done])}


def consistency(records: Sequence[tuple[Path, Mapping[str, Any]]], top_k: int = ROUTING_TOP_K) -> float | None:
    """Inter-run consistency of the expert loads between fine-tunings of one pre-trained run, mean over layers and runs.

    Fine-tunings from scratch are left out: experts of different initial weights do not correspond.
    """
    groups: dict[Path, dict[str, list[list[float]]]] = {}
    for path, record in records:
        for row in () if record.get("protocol", {}).get("from_scratch") else record.get("results", ()):
            if row.get("top_k") == top_k:
                for layer, values in row.get("routers", {}).items():
                    loads = groups.setdefault(pretrained_of(path), {}).setdefault(layer, [])
                    loads.append([finite(share) or 0.0 for share in values.get("load") or ()])
    every = [loads for layers in groups.values() for loads in layers.values()]
    if all(len(loads) < 2 for loads in every):
        return None
    from pointsman.diagnostics.statistics import inter_run_consistency

    return mean_of(inter_run_consistency(loads)["without_diagonal"] for loads in every)


def pretrained_of(path: Path) -> Path:
    """A folder that fine-tunings of one pre-trained run share: RUN of RUN/finetune/VARIANT/seed-S.

    With `finetune RUN --out DIR`, which has one pre-trained run, a folder above DIR.
    """
    parents = list(Path(os.path.abspath(path)).parents)
    return parents[min(2, len(parents) - 1)]
