"""An attack, and a comparison under it: clean figures, figures at every attack rate, and the change of the routing.

Attacked tokens count as targets. Records of earlier versions have figures without them, which are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._grid import Grid, formatted
from pointsman_lab._shapes import check_shape
from pointsman_lab._values import mean_of
from pointsman_lab.report.forms import Forms, protocol_line, unlike
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.record import RunRecord, read_object

ATTACKED = {"rate!": float, "seed!": int, "word!": str}
Row = Mapping[str, Any]
Pick = Callable[[Row], Row | None]

ROUTING = (
    "Routing under attack: share of the tokens outside the attack whose first expert changed, at k = 2 (of a router "
    "with one k: at that), mean over layers and seeds."
)


@dataclass(frozen=True)
class Attack:
    """An attack on a text: each chosen word becomes `word`.

    Attributes:
        rate: share of words, rounded to a whole number over all texts.
        seed: of the choice. A higher rate attacks a superset of the words of a lower rate.
        word: the replacement.
    """

    rate: float
    seed: int = 0
    word: str = "AAA"

    def __post_init__(self) -> None:
        if isinstance(self.rate, bool) or not (math.isfinite(self.rate) and 0 <= self.rate <= 1):
            raise RunError(f"attack rate {self.rate}: allowed are numbers from 0 to 1")
        if not self.word or self.word.split() != [self.word]:
            raise RunError(f"attack word {self.word!r}: allowed is one word without white space")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "word", **asdict(self)}

    def __str__(self) -> str:
        return f"{100 * self.rate:.3g} % of the words become {self.word}{f' (seed {self.seed})' if self.seed else ''}"


@dataclass(frozen=True)
class Condition:
    """One attack at one rate, or the clean evaluation.

    Attributes:
        words: its name.
        rate: share of words attacked; 0 = clean.
        table: routers x k over seeds, with paired differences.
    """

    words: str
    rate: float
    table: ComparisonTable


@dataclass(frozen=True)
class AttackTable(Forms):
    """Clean and attacked figures of a comparison.

    Attributes:
        name: for the files: attack, data and split.
        conditions: clean first, then by rate.
        routing: router -> rate -> share of the tokens outside the attack whose first expert changed.
        protocol: one line.
    """

    name: str
    conditions: Sequence[Condition]
    routing: Mapping[str, Mapping[float, float]]
    protocol: str

    @classmethod
    def of(cls, comparison: Comparison, name: str, runs: Sequence[tuple[RunRecord, Mapping[str, Any]]]) -> AttackTable:
        """The tables of runs and their records, as `run_under_attack` made them."""
        rows = [row for _, record in runs for row in record["results"]]
        split = next((str(row["split"]) for row in rows if "split" in row), "test")
        seeds = sorted({run.seed for run, _ in runs})
        begun = {run.router for run, _ in runs}
        routers = [router for router in comparison.routers if router in begun]

        def condition(words: str, rate: float, pick: Pick) -> Condition:
            found = {}
            for run, record in runs:
                kept = [one for row in record["results"] if (one := pick(row))]
                found[run.router, run.seed] = replace(run, evaluation={"results": kept})
            part = Comparison(comparison.path, {}, routers, seeds, found)
            return Condition(words, rate, ComparisonTable.of(part, split=split))

        attacks = _attacks(rows)
        conditions = [condition("clean", 0.0, lambda row: None if row.get("attack") else row)]
        conditions += [condition(f"{one}, all targets count", one.rate, _attacked(one)) for one in attacks]
        every = [record.get("protocol", {}) for _, record in runs]
        protocol = protocol_line(every[0]) + unlike(every)
        routing = {
            router: _moved([record for run, record in runs if run.router == router], attacks) for router in routers
        }
        return cls(name, conditions, routing, protocol)

    @property
    def head(self) -> str:
        return self.protocol

    def shown_grids(self) -> list[Grid]:
        """The table of each condition with its paired differences, then the change of the routing."""
        grids = [(one.words, grid) for one in self.conditions for grid in one.table.shown_grids()]
        return [*(replace(grid, caption=f"{words}: {grid.caption}") for words, grid in grids), *self.further()]

    def csv(self) -> str:
        """Comma-separated, the condition first."""
        lines: list[str] = []
        every_k = sorted({k for one in self.conditions for k in one.table.top_k})
        for one in self.conditions:
            header, *rows = replace(one.table, top_k=every_k).csv().splitlines()
            lines += [] if lines else [f"condition,{header}"]
            lines += [f'"{one.words}",{row}' for row in rows]
        return "\n".join(lines) + "\n"

    def further(self) -> list[Grid]:
        rates = sorted({one.rate for one in self.conditions[1:]})
        moved = {router: of for router, of in self.routing.items() if of}
        rows = [[router, *(formatted(of.get(rate)) for rate in rates)] for router, of in moved.items()]
        header = ["router", *(f"{100 * rate:.3g} %" for rate in rates)]
        return [Grid(header, rows, caption=ROUTING)] if rows else []


def attack_tables(comparison: Comparison) -> list[AttackTable]:
    """A table for each attack that the comparison's runs have records of."""
    found: dict[str, list[tuple[RunRecord, Mapping[str, Any]]]] = {}
    for run in (run for router in comparison.routers for run in comparison.of(router)):
        for file in sorted(run.path.glob("attacks-*.json")):
            record = read_object(file)
            for row in record.get("results", ()):
                if row.get("attack"):
                    check_shape(row["attack"], ATTACKED, f"{file}: attack")
            if record.get("results"):
                found.setdefault(f"attack-{file.stem.removeprefix('attacks-')}", []).append((run, record))
    return [AttackTable.of(comparison, name, runs) for name, runs in sorted(found.items())]


def _attacks(rows: Sequence[Mapping[str, Any]]) -> list[Attack]:
    """The attacks of these results, by rate."""
    found = [row["attack"] for row in rows if row.get("attack")]
    attacks = dict.fromkeys(Attack(one["rate"], one["seed"], one["word"]) for one in found)
    return sorted(attacks, key=lambda attack: attack.rate)


def _attacked(attack: Attack) -> Pick:
    """Picks the rows of this attack and marks them as clean, since `ComparisonTable` reads clean rows only."""
    values = attack.to_dict()

    def pick(row: Row) -> Row | None:
        found = row.get("attack") or {}
        return {**row, "attack": None} if values.items() <= found.items() else None

    return pick


def _moved(records: Sequence[Mapping[str, Any]], attacks: Sequence[Attack]) -> dict[float, float]:
    """Rate -> share of first experts that changed, mean over layers and records."""
    known, found = [attack.to_dict() for attack in attacks], dict[float, list[Any]]()
    for change in (change for record in records for change in record.get("routing", ())):
        if change["attack"] in known:
            layers = change["layers"].values()
            found.setdefault(change["attack"]["rate"], []).extend(layer.get("top1") for layer in layers)
    return {rate: mean for rate, values in found.items() if (mean := mean_of(values)) is not None}
