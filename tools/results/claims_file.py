"""claims.toml: the grids of a folder, the claims that are tested on them, and the trends, as they are written.

It lies beside the grids. A grid is a comparison directory; a claim compares two rows of one:

    [grids.enwik8-tiny]
    command = "pointsman compare --data enwik8 --preset tiny"
    after = ["pointsman evaluate GRID --attack word"]     # optional: what else its claims need, with GRID as its folder
    family = "language"        # the default; intervals are corrected for the comparisons of all grids of a family

    [[claims]]
    aspect = "quality at small k"
    claim = "HyperRouter is ahead of SMoE-Dropout at k = 1"
    where = "HyperRouter, Table 1"
    grid = "enwik8-tiny"
    measure = "quality"        # or another of measures.py
    k = 1
    row = "hyperrouter"
    base = "smoe-dropout"
    expected = "less"          # than the base's: "less" or "more"
    control = "frozen-scaled"  # optional: the same test against this row

A claim about time compares the turns of a benchmark, which timed both rows one after the other on one machine:

    timings = "../../benchmarks/results/mixers.json"           # {"seconds": {row: [one a turn]}}
    row = "smoe+similarity"
    base = "smoe"
    limit = 1.07               # "less": the row's time over the base's is below it
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman._files import read_text
from pointsman._shapes import check_shape
from pointsman._values import typed_fields
from tools.results.measures import UNITS, Measure

CLAIMS = "claims.toml"
COMPARED = ("base", "row", "control")
SHAPE: dict[str, Any] = {
    "grids": {"*": {"command!": str, "after": [str], "family": str}},
    "claims": [dict],
    "trends": [{"name!": str, "title!": str, "measure!": str, "grids": [list], "rows": [str], "curves": {"*": [list]}}],
}


@dataclass(frozen=True)
class Claim:
    """One line of claims.toml; see the module. Without a measure there is no test yet: `test` says which it will be."""

    aspect: str
    claim: str
    where: str
    grid: str = ""
    measure: str = ""
    k: int = 0
    row: str = ""
    base: str = ""
    expected: str = "less"
    control: str = ""
    attack: str = "word-enwik8-test"
    rate: float = 0.1
    task: str = ""
    shift: str = ""
    timings: str = ""
    limit: float = 0.0
    test: str = ""

    @property
    def measured(self) -> Measure:
        """What is compared."""
        return Measure(self.measure, self.k, self.attack, self.rate, self.task, self.shift)


def read_claims(file: Path) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, str], list[Claim]]:
    """(grid -> its commands, grid -> the rows that are named, grid -> its family, claims) of claims.toml.

    Raises:
        RunError: not TOML, an unknown field or measure, or a grid that is not named.
    """
    values = read_toml(file)
    grids = values.get("grids", {})
    commands = {name: [grid["command"], *grid.get("after", ())] for name, grid in grids.items()}
    claims = []
    for number, one in enumerate(values.get("claims", []), 1):
        where = f"{file}, claim {number}"
        claim = Claim(**typed_fields(Claim, one, f"{where}: "))
        if claim.expected not in ("less", "more"):
            raise RunError(f"{where}: expected={claim.expected!r}: allowed are less and more")
        if claim.measure and claim.measure not in UNITS:
            raise RunError(f"{where}: unknown measure {claim.measure!r}: {did_you_mean(claim.measure, UNITS)}")
        if claim.measure and claim.grid not in commands:
            raise RunError(f"{where}: unknown grid {claim.grid!r}: {did_you_mean(claim.grid, commands)}")
        claims.append(claim)
    rows = {name: rows_of(name, values) for name in grids}
    return commands, rows, {name: grid.get("family", "language") for name, grid in grids.items()}, claims


def read_toml(file: Path) -> dict[str, Any]:
    """claims.toml.

    Raises:
        RunError: not TOML, or not of its shape.
    """
    try:
        values = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{file}: not TOML: {error}") from None
    check_shape(values, SHAPE, str(file))
    for number, trend in enumerate(values.get("trends", []), 1):
        try:
            planned(trend)
        except ValueError:
            raise RunError(f"{file}, trend {number}: grids are [x, grid], curves [x, grid, row]") from None
    return values


def rows_of(grid: str, values: Mapping[str, Any]) -> list[str]:
    """The rows of a grid that claims and trends of claims.toml name."""
    named = [one.get(part, "") for one in values.get("claims", []) if one.get("grid") == grid for part in COMPARED]
    for one in values.get("trends", []):
        rows = [row for points in planned(one).values() for _, of, row in points if of == grid]
        named += [one.get("base", ""), *rows] if rows else []
    return [row for row in dict.fromkeys(named) if row]


def planned(trend: Mapping[str, Any]) -> dict[str, list[tuple[float | str, str, str]]]:
    """Curve -> its points (x, grid, row), of a trend of claims.toml: the grids of each of its rows, and its curves."""
    points = {row: [(x, grid, row) for x, grid in trend.get("grids", [])] for row in trend.get("rows", [])}
    return points | {name: [(x, grid, row) for x, grid, row in of] for name, of in trend.get("curves", {}).items()}
