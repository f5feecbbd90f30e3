"""What the records hold of a claim: its rows as the grid has them, their figures, whether they may be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import read_json
from pointsman_lab._shapes import check_shape
from pointsman_lab.exam.scores import Cells, difference
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison, read_plan
from pointsman_lab.runs.record import label
from pointsman_lab.training.settings import flat
from tools.results.claims_file import CLAIMS, Claim


def unit_of(claim: Claim, grids: Mapping[str, Comparison]) -> str:
    """Of the difference."""
    if claim.measure:
        return claim.measured.unit(grids.get(claim.grid))
    return "of the time" if claim.timings else "of the score" if claim.exam else "bits" if claim.losses else ""


def values_of(
    claim: Claim, other: str, grids: Mapping[str, Comparison], cells: Cells, grid: str = ""
) -> list[float]:  # fmt: skip
    """The claim's row minus another row, one a seed that both have; none where either has not been run.

    Args:
        grid: which has the other row; the default is the claim's.
    """
    if claim.exam:
        return list(difference(cells, claim.exam, claim.row, other).values)
    mine, theirs = grids.get(claim.grid), grids.get(grid or claim.grid)
    if not other or mine is None or theirs is None or not claim.measure:
        return []
    if mine.settings != theirs.settings:
        raise RunError(f"{CLAIMS}, {claim.claim!r}: {claim.grid} and {grid} have other settings: no pairs")
    one = claim.measured.of(mine, claim.row)
    two = replace(claim.measured, k=claim.base_k or claim.k).of(theirs, other)
    return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]


def tuned_rows(folder: Path) -> dict[str, str]:
    """Row as it was asked for -> its spec in the grid, where `compare --tune` chose the router's own rate."""
    plan = read_plan(folder) or {}
    return {str(one["row"]): spec for spec, one in plan.get("tuned", {}).items() if "row" in one}


def check_tuned(grid: Comparison) -> None:
    """Refuses a run in which a number is not the one that `compare --tune` chose for its row."""
    for spec, chosen in (read_plan(grid.path) or {}).get("tuned", {}).items():
        for run in grid.of(label(spec)):
            found = flat(run.config)
            for key, value in chosen.items():
                was = found.get(key)
                if type(was) in (int, float) and was != float(value):
                    raise RunError(f"{run.path}: {key} is {was}; {grid.path} chose {value} for {spec}")


def tuned_claim(claim: Claim, specs: Mapping[str, Mapping[str, str]]) -> Claim:
    """The claim with the rows of its grids in place of those that were asked for: grid -> row -> spec."""
    mine, theirs = specs.get(claim.grid, {}), specs.get(claim.base_grid or claim.grid, {})
    row, control = (mine.get(name, name) for name in (claim.row, claim.control))
    return replace(claim, row=row, base=theirs.get(claim.base, claim.base), control=control)


def check_cost(claim: Claim, grid: Comparison | None, other: Comparison | None) -> None:
    """Refuses a claim on what routing gains over a dense row that costs less, without a control that tells them apart.

    Such a control has been run, and is the row's own `+uniform`, or a dense row of its cost (within 2 %).

    Args:
        grid: which has the row and the control. other: which has the base.
    """
    if grid is None or other is None or not claim.measure:
        return
    if claim.row not in grid.routers or claim.base not in other.routers:
        return
    rows = {one.router: one for one in ComparisonTable.of(grid).rows}
    theirs = rows if other is grid else {one.router: one for one in ComparisonTable.of(other).rows}
    row, base, control = rows[claim.row], theirs[claim.base], rows.get(claim.control)
    if row.router_parameters is None or base.router_parameters is not None or not (row.cost and base.cost):
        return
    mine, least = row.cost["flops"], base.cost["flops"]
    if least >= 0.98 * mine:
        return
    if control is not None and control.done:
        dense = control.router_parameters is None and abs(control.cost.get("flops", 0) / mine - 1) <= 0.02
        if dense or claim.control == f"{claim.row.partition('+')[0]}+uniform":
            return
    told = f"{claim.base} costs {least / 1e6:.3g} MFLOP a token, {claim.row} {mine / 1e6:.3g}"
    raise RunError(
        f"{CLAIMS}, {claim.claim!r}: {told}: name a control of {claim.grid} that has been run: {claim.row}+uniform, "
        "or dense-matched"
    )


def values_in_file(claim: Claim, folder: Path) -> list[float]:
    """The row's time over the base's, minus the limit, one a turn; of losses row minus base, one a seed."""
    kind, name = ("bits", claim.losses) if claim.losses else ("seconds", claim.timings)
    if not name or (record := read_json(file := folder / name)) is None:
        return []
    check_shape(record, {f"{kind}!": {"*": [float]}}, str(file))
    figures = record[kind]
    for row in (claim.row, claim.base):
        if row not in figures:
            raise RunError(f"{file}: no row {row!r}: {did_you_mean(row, figures)}")
    mine, base = figures[claim.row], figures[claim.base]
    if len(mine) != len(base) or not all(math.isfinite(one) and (claim.losses or one > 0) for one in (*mine, *base)):
        what = "a figure is expected for every seed" if claim.losses else "a time above 0 is expected for every turn"
        raise RunError(f"{file}: {claim.row} and {claim.base}: {what} of both")
    if claim.losses:
        return [one - two for one, two in zip(mine, base, strict=True)]
    return [one / two - claim.limit for one, two in zip(mine, base, strict=True)]
