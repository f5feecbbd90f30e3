"""The comparisons of a folder of records, and the rows of them whose learning rates were chosen a second time."""

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.paths import COMPARISON
from pointsman_lab.runs.record import label
from pointsman_lab.training.settings import flat
from tools.results.claims_file import CLAIMS, read_toml


def read_grids(folder: Path) -> tuple[dict[str, Comparison], dict[str, Comparison]]:
    """The comparisons of a folder by name: as they are, and as pages and claims see them, with the rows of `again`."""
    own = {file.parent.name: read_comparison(file.parent) for file in sorted(folder.glob(f"*/{COMPARISON}"))}
    known = read_toml(folder / CLAIMS).get("grids", {}) if (folder / CLAIMS).is_file() else {}
    again = again_of(known, own)
    for name, other in again.items():
        if other not in own or other not in known:
            allowed = sorted(own.keys() & known.keys())
            raise RunError(f"{folder / CLAIMS}, grid {name!r}: again={other!r}: {did_you_mean(other, allowed)}")
        if own[name].settings != own[other].settings:
            raise RunError(f"{folder / CLAIMS}, grid {name!r}: {other} has other settings")
    shown = own | {name: _with_rows(own[name], own[other]) for name, other in again.items()}
    return own, {name: grid for name, grid in shown.items() if name not in again.values()}


def again_of(known: Mapping[str, Any], own: Container[str]) -> dict[str, str]:
    """Grid -> the grid that has its rows again, of the grids of claims.toml that are there."""
    return {name: grid["again"] for name, grid in known.items() if "again" in grid and name in own}


def _with_rows(grid: Comparison, again: Comparison) -> Comparison:
    """The grid with the rows of `again` in place of those that were asked for by the same spec."""
    theirs = tuned_rows(again)
    asked = {spec: row for row, spec in tuned_rows(grid).items()}
    place = {row: theirs[asked[row]] for row in grid.routers if asked.get(row) in theirs}
    runs = {key: run for key, run in grid.runs.items() if key[0] not in place}
    runs |= {key: run for key, run in again.runs.items() if key[0] in place.values()}
    tuned = {spec: one for spec, one in grid.tuned.items() if spec not in place}
    tuned |= {spec: one for spec, one in again.tuned.items() if spec in place.values()}
    return replace(grid, routers=[place.get(row, row) for row in grid.routers], runs=runs, tuned=tuned)


def tuned_rows(grid: Comparison) -> dict[str, str]:
    """Row as it was asked for -> its spec in the grid, where `compare --tune` chose the router's own rate."""
    return {str(one["row"]): spec for spec, one in grid.tuned.items() if "row" in one}


def check_tuned(grid: Comparison) -> None:
    """Refuses a run in which a number is not the one that `compare --tune` chose for its row."""
    for spec, chosen in grid.tuned.items():
        for run in grid.of(label(spec)):
            found = flat(run.config)
            for key, value in chosen.items():
                was = found.get(key)
                if type(was) in (int, float) and was != float(value):
                    raise RunError(f"{run.path}: {key} is {was}; {grid.path} chose {value} for {spec}")
