"""How evenly the routers of a comparison use their experts, and what routing costs: routers x k."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._files import read_text
from pointsman._grid import NONE, Grid
from pointsman._values import finite
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.forms import Forms, joined
from pointsman_lab.runs.comparison import Comparison

NOTE = (
    "Load: standard deviation of the experts' numbers of tokens over their mean, mean over layers (0 = even); mean ± "
    "sample standard deviation over seeds. Share: the router's time over that of a whole layer with smoe in "
    "configuration a (python -m tools.bench --case routers)."
)


@dataclass(frozen=True)
class LoadTable(Forms):
    """Routers x k.

    Attributes:
        rows: router -> k -> the imbalance of the load over seeds.
        shares: router -> its share of the layer's time, where it was measured.
    """

    rows: Mapping[str, Mapping[int, Cell]]
    shares: Mapping[str, float]

    @property
    def file(self) -> str:
        return "load"

    @classmethod
    def of(cls, comparison: Comparison, shares: Mapping[str, float] | None = None, split: str = "test") -> LoadTable:
        """The loads that the comparison's evaluations recorded; routers without any are left out."""
        rows: dict[str, dict[int, Cell]] = {}
        for router in comparison.routers:
            found: dict[int, dict[int, float]] = {}
            for run in comparison.of(router):
                for k, result in (run.results(split) if run.done else {}).items():
                    if (value := imbalance(result)) is not None:
                        found.setdefault(k, {})[run.seed] = value
            if found:
                rows[router] = {k: Cell(values) for k, values in sorted(found.items())}
        return cls(rows, shares or {})

    def _grid(self, *, exact: bool = False) -> Grid:
        ks = sorted({k for row in self.rows.values() for k in row})
        rows: list[list[Any]] = []
        for router, row in self.rows.items():
            cells = [row.get(k, Cell({})) for k in ks]
            share = self.shares.get(router)
            if exact:
                rows.append([router, *(cell.mean for cell in cells), share])
            else:
                rows.append([router, *(cell.text(3) for cell in cells), NONE if share is None else f"{share:.1%}"])
        grid = Grid(["router", *(f"k={k}" for k in ks), "share"], rows, caption=NOTE)
        return grid if exact else grid.without_empty_columns()

    def shown_grids(self) -> list[Grid]:
        return [self._grid()]

    def csv(self) -> str:
        return self._grid(exact=True).csv()

    def markdown(self) -> str:
        return joined(self._grid().markdown(), NOTE)


def imbalance(result: Mapping[str, Any]) -> float | None:
    """The coefficient of variation of the load, mean over layers; None where an evaluation has no loads."""
    found = []
    for layer in (result.get("routers") or {}).values():
        load: Sequence[float] = [finite(share) or 0.0 for share in layer.get("load") or []]
        if sum(load):
            found.append(statistics.pstdev(load) / statistics.fmean(load))
    return statistics.fmean(found) if found else None


def measured_shares(file: Path) -> dict[str, float]:
    """Router -> share of configuration a in float32, from a benchmark's layer.json; empty where there is none."""
    if not file.exists():
        return {}
    shares: dict[str, dict[str, float]] = json.loads(read_text(file)).get("routers") or {}
    return shares.get("float32", {})
