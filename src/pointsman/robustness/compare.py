"""Every run of a comparison under attack, and the tables: clean, and at each rate with both counts of targets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._errors import RunError
from pointsman.evaluation.attacks import Attack
from pointsman.evaluation.compare import read_plan, run_path, slug
from pointsman.report import formats
from pointsman.report.runs import Comparison, Run, number, read_json
from pointsman.report.tables import ComparisonTable
from pointsman.robustness.runs import Budget, run_under_attack
from pointsman.training.checkpoint import write_whole
from pointsman.training.progress import Progress
from pointsman.training.run import load_run


def comparison_under_attack(
    out: Path,
    attacks: Sequence[Attack],
    *,
    data: str | None = None,
    split: str = "test",
    top_k: Sequence[int] | None = None,
    budget: Budget = "run",
    device: str = "cpu",
    progress: Progress,
    stop: Any = None,
) -> AttackTable:
    """Evaluates every trained run of a comparison under these attacks; what is done is not done again.

    Each run keeps its results in attacks-KIND-DATA-SPLIT.json. Arguments as of `run_under_attack`.

    Raises:
        RunError: no comparison, or a run without a checkpoint.
    """
    plan = read_plan(out)
    if plan is None:
        raise RunError(f"{out} holds no comparison")
    if not attacks or len({attack.kind for attack in attacks}) > 1:
        raise RunError("attacks of one kind are needed, at one rate or several")
    records: dict[tuple[str, int], Mapping[str, Any]] = {}
    todo = [(router, seed) for seed in plan["seeds"] for router in plan["routers"]]
    for place, (router, seed) in enumerate(todo, 1):
        path = run_path(out, router, seed)
        progress.note(f"{place}/{len(todo)} {router}, seed {seed}")
        run = load_run(path, device=device, note=progress.note)
        asked = {
            "attacks": [attack.to_dict() for attack in attacks],
            "data": data or run.config.data,
            "split": split,
            "top_k": list(top_k or run.config.eval_top_k),
            "budget": budget,
            "checkpoint": f"step-{run.step}",
        }
        file = path / f"attacks-{attacks[0].kind}-{slug(data or run.config.data)}-{split}.json"
        record = _read(file)
        if record.get("asked") != asked:
            found = run_under_attack(
                run, attacks, data=data, split=split, top_k=top_k, budget=budget, watch=progress, stop=stop
            )
            record = {**found, "asked": asked}
            write_whole(file, json.dumps(record, indent=2) + "\n")
        records[router, seed] = record
    return AttackTable.of(out, plan["routers"], plan["seeds"], attacks, records)


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except RunError:
        return {}  # damaged: it is made again


@dataclass(frozen=True)
class AttackTable:
    """Clean and attacked figures of a comparison.

    Attributes:
        name: for the files: attack, data and split.
        tables: condition in words -> router x k over seeds, with paired differences.
        routing: one line a router: share of the tokens that the attack left whose first expert changed, by rate.
        protocol: one line.
    """

    name: str
    tables: Mapping[str, ComparisonTable]
    routing: Sequence[Sequence[str]]
    protocol: str

    @classmethod
    def of(
        cls,
        out: Path,
        routers: Sequence[str],
        seeds: Sequence[int],
        attacks: Sequence[Attack],
        records: Mapping[tuple[str, int], Mapping[str, Any]],
    ) -> AttackTable:
        """The tables of these records ((router, seed) -> what `run_under_attack` gave)."""
        any_record = next(iter(records.values()))
        split = str(any_record["results"][0]["split"])
        conditions: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]] = {"clean": _clean}
        for attack in attacks:
            conditions[f"{attack}, all targets count"] = _attacked(attack, unmarked=False)
            conditions[f"{attack}, attacked targets left out"] = _attacked(attack, unmarked=True)
        tables = {}
        for condition, pick in conditions.items():
            runs = {
                (router, seed): Run(
                    out,
                    router,
                    seed,
                    {},
                    evaluation={"results": [row for one in record["results"] if (row := pick(one))]},
                )
                for (router, seed), record in records.items()
            }
            tables[condition] = ComparisonTable.of(Comparison(out, {}, routers, seeds, runs), split=split)
        lines = [["router", *(f"{100 * attack.rate:.3g} %" for attack in attacks)]]
        for router in routers:
            cells = [_moved([records[router, seed] for seed in seeds if (router, seed) in records], a) for a in attacks]
            lines.append([router, *("-" if cell is None else f"{cell:.3f}" for cell in cells)])
        protocol = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in any_record["protocol"].items())
        name = f"attack-{attacks[0].kind}-{any_record['name']}-{split}"
        return cls(name, tables, lines, protocol)

    def text(self) -> str:
        """Plain aligned text, a table a condition."""
        parts = [f"{condition}\n{table.text()}" for condition, table in self.tables.items()]
        return "\n".join([self.protocol, "", *parts, _ROUTING, "", *formats.aligned(self.routing), ""])

    def markdown(self) -> str:
        """The same in Markdown."""
        parts = [f"## {condition}\n\n{table.markdown()}" for condition, table in self.tables.items()]
        head, *rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in self.routing]
        rule = "|" + "---|" + "---:|" * (len(self.routing[0]) - 1)
        return "\n".join([self.protocol, "", *parts, _ROUTING, "", head, rule, *rows, ""])

    def csv(self) -> str:
        """Comma-separated, the condition first."""
        lines: list[str] = []
        for condition, table in self.tables.items():
            header, *rows = table.csv().splitlines()
            lines += [] if lines else [f"condition,{header}"]
            lines += [f'"{condition}",{row}' for row in rows]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """A LaTeX table a condition, for the booktabs package."""
        return "\n".join(f"% {condition}\n{table.latex()}" for condition, table in self.tables.items())

    def write(self, directory: Path) -> list[Path]:
        """Writes attack-KIND-DATA-SPLIT.txt, .csv, .md and .tex; returns their paths."""
        contents = {"txt": self.text(), "csv": self.csv(), "md": self.markdown(), "tex": self.latex()}
        return [formats.write_whole(directory / f"{self.name}.{end}", text) for end, text in contents.items()]


_ROUTING = (
    "Routing under attack: share of the tokens that the attack left whose first expert changed, at k = 2, mean over "
    "layers and seeds."
)


def _clean(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if row.get("attack") else row


def _attacked(attack: Attack, *, unmarked: bool) -> Callable[[Mapping[str, Any]], Mapping[str, Any] | None]:
    """The rows of this attack, as if they were clean ones: the report's tables pass over attacked ones."""

    def pick(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        found = row.get("attack") or {}
        if any(found.get(key) != value for key, value in attack.to_dict().items()):
            return None
        return {**row, **(row["unmarked"] if unmarked else {}), "attack": None}

    return pick


def _moved(records: Sequence[Mapping[str, Any]], attack: Attack) -> float | None:
    values = [
        value
        for record in records
        for change in record["routing"]
        if change["attack"] == attack.to_dict()
        for layer in change["layers"].values()
        if (value := number(layer.get("top1"))) is not None
    ]
    return statistics.fmean(values) if values else None
