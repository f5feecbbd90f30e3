"""claims.toml: the grids of a folder, the claims that are tested on them, and the trends, as they are written.

And what the records hold of a claim: its rows as the grid has them, their figures, whether they may be compared.

The file lies beside the grids. A grid is a comparison directory; a claim compares two rows of one:

    [grids.enwik8-tiny]
    command = "pointsman compare --data enwik8 --preset tiny"
    after = ["pointsman evaluate GRID --attack word"]     # optional: what else its claims need, with GRID as its folder
    family = "language"        # the default: of its claims
    page = false               # optional: its claims stay, and its page goes, since a better grid has taken its place
    again = "again-k2"         # optional: a grid that has rows of this one again, with rates that were chosen anew

The rows of `again` take the place of those that were asked for likewise, in pages and claims. A claim of a primary
family is then decided only where this grid's own rows and these give the same verdict.

    [families.language]        # optional; p-values are corrected within a family
    kind = "primary"           # or "exploratory", the default
    seeds = 12                 # without so many a claim is not run; the default is 3

    [[claims]]
    aspect = "quality at small k"
    claim = "HyperRouter is ahead of SMoE-Dropout at k = 1"
    where = "HyperRouter, Table 1"
    grid = "enwik8-tiny"
    measure = "quality"        # or another of measures.py
    k = 1
    row = "hyperrouter"
    base = "smoe-dropout"
    expected = "less"          # than the base's: "less" or "more"; "equal": within the margin
    margin = 0.01              # optional: a difference that counts as none; the default is the measure's
    family = "decoder"         # optional: another than the grid's
    control = "frozen-scaled"  # optional: the same difference to this row
    base_k = 8                 # optional: k of base and control; the default is k
    question = "scale"         # optional: the question of the index that it answers
    note = "at one rate"       # optional: stands after the verdict

    [[questions]]              # of the index, in order
    name = "scale"
    title = "Is it the initial scale?"
    picture = "trained-k-at-1" # of a trend
    alt = "gap to smoe"
    note = "A sentence."       # optional

A claim about time compares the turns of a benchmark, which timed both rows one after the other on one machine:

    timings = "../../benchmarks/results/mixers.json"           # {"seconds": {row: [one a turn]}}
    row = "smoe+similarity"
    base = "smoe"
    limit = 1.07               # "less": the row's time over the base's is below it

One about a program's figures compares the losses of both, one a seed; `test` is its command, and it names its family:

    losses = "routes/main-k2.json"                             # {"bits": {row: [one a seed]}}
    row = "smoe, own, all"
    base = "smoe, mean, all"

One about the exam compares scores of the record that the package carries, in the family "exam":

    exam = "any-k"             # the task
    row = "hyperrouter"
    base = "smoe-dropout"
    expected = "more"
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import read_json, read_text
from pointsman_lab._shapes import check_shape
from pointsman_lab._values import typed_fields
from pointsman_lab.exam.scores import TASKS, Cells, difference
from pointsman_lab.report.cell import LEAST_SEEDS
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import Comparison
from tools.results.inference import CORRECTIONS
from tools.results.measures import AT_ONE_K, MARGINS, UNITS, Measure

CLAIMS = "claims.toml"
SHAPE: dict[str, Any] = {
    "grids": {"*": {"command!": str, "after": [str], "family": str, "about": str, "page": bool, "again": str}},
    "intro": str,
    "questions": [{"name!": str, "title!": str, "picture!": str, "alt!": str, "note": str}],
    "families": {"*": {"kind": str, "seeds": int}},
    "claims": [dict],
    "trends": [{
        "name!": str, "title!": str, "x!": str, "measure!": str, "k": int, "log": bool, "base": str, "note": str,
        "grids": [list], "rows": [str], "curves": {"*": [list]},
    }],
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Claims that are judged together."""

    kind: str = "exploratory"
    seeds: int = LEAST_SEEDS


@dataclass(frozen=True)
class Claim:
    """One line of claims.toml; see the module. Without a measure there is no test yet: `test` says which it will be."""

    aspect: str
    claim: str
    where: str
    grid: str = ""
    measure: str = ""
    k: int = 0
    base_k: int = 0
    row: str = ""
    base: str = ""
    expected: str = "less"
    control: str = ""
    attack: str = "word-enwik8-test"
    rate: float = 0.1
    task: str = ""
    timings: str = ""
    losses: str = ""
    exam: str = ""
    limit: float = 0.0
    test: str = ""
    family: str = ""
    margin: float = 0.0
    question: str = ""
    note: str = ""

    @property
    def equal_within(self) -> float:
        """A difference within plus and minus this counts as none."""
        return self.margin or MARGINS.get("score" if self.exam else self.measure, 0.01)

    @property
    def measured(self) -> Measure:
        return Measure(self.measure, self.k, self.attack, self.rate, self.task)


def read_claims(file: Path) -> tuple[dict[str, list[str]], dict[str, Family], list[Claim]]:
    """(grid -> its commands, families by name, claims) of claims.toml."""
    values = read_toml(file)
    grids = values.get("grids", {})
    commands = {name: [grid["command"], *grid.get("after", ())] for name, grid in grids.items()}
    claims = []
    for number, one in enumerate(values.get("claims", []), 1):
        where = f"{file}, claim {number}"
        claim = Claim(**typed_fields(Claim, one, f"{where}: "))
        if claim.expected not in ("less", "more", "equal"):
            raise RunError(f"{where}: expected={claim.expected!r}: allowed are less, more and equal")
        if claim.measure and claim.measure not in UNITS:
            raise RunError(f"{where}: unknown measure {claim.measure!r}: {did_you_mean(claim.measure, UNITS)}")
        if claim.measure in AT_ONE_K and not claim.k:
            raise RunError(f"{where}: measure={claim.measure!r} needs a k")
        if claim.measure and claim.grid not in commands:
            raise RunError(f"{where}: unknown grid {claim.grid!r}: {did_you_mean(claim.grid, commands)}")
        if claim.losses and (not claim.family or claim.control):
            raise RunError(f"{where}: a claim about losses names its family, and has no control")
        if claim.exam and claim.exam not in TASKS:
            raise RunError(f"{where}: unknown task {claim.exam!r} of the exam: {did_you_mean(claim.exam, TASKS)}")
        of_grid = grids.get(claim.grid, {}).get("family", "language")
        family = "time" if claim.timings else "exam" if claim.exam else of_grid
        claims.append(replace(claim, family=claim.family or family))
    families = {name: Family(**of) for name, of in values.get("families", {}).items()}
    for name, family in families.items():
        if family.kind not in CORRECTIONS:
            raise RunError(f"{file}, family {name!r}: kind={family.kind!r}: {did_you_mean(family.kind, CORRECTIONS)}")
    families |= {claim.family: Family() for claim in claims if claim.family not in families}
    return commands, families, claims


def read_toml(file: Path) -> dict[str, Any]:
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


def planned(trend: Mapping[str, Any]) -> dict[str, list[tuple[float | str, str, str]]]:
    """Curve -> its points (x, grid, row), of a trend of claims.toml: the grids of each of its rows, and its curves."""
    points = {row: [(x, grid, row) for x, grid in trend.get("grids", [])] for row in trend.get("rows", [])}
    return points | {name: [(x, grid, row) for x, grid, row in of] for name, of in trend.get("curves", {}).items()}


def unit_of(claim: Claim, grids: Mapping[str, Comparison]) -> str:
    if claim.measure:
        return claim.measured.unit(grids.get(claim.grid))
    return "of the time" if claim.timings else "of the score" if claim.exam else "bits" if claim.losses else ""


def values_of(claim: Claim, other: str, grids: Mapping[str, Comparison], cells: Cells) -> list[float]:
    """The claim's row minus another row, one a seed that both have; none where either has not been run."""
    if claim.exam:
        return list(difference(cells, claim.exam, claim.row, other).values)
    grid = grids.get(claim.grid)
    if not other or grid is None or not claim.measure:
        return []
    one = claim.measured.of(grid, claim.row)
    two = replace(claim.measured, k=claim.base_k or claim.k).of(grid, other)
    return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]


def tuned_claim(claim: Claim, specs: Mapping[str, Mapping[str, str]]) -> Claim:
    """The claim with the rows of its grid in place of those that were asked for: grid -> row -> spec."""
    own = specs.get(claim.grid, {})
    row, base, control = (own.get(name, name) for name in (claim.row, claim.base, claim.control))
    return replace(claim, row=row, base=base, control=control)


def check_cost(claim: Claim, grid: Comparison | None) -> None:
    """Refuses a claim on what routing gains over a dense row that costs less, without a control that tells them apart.

    Such a control has been run, and is the row's own `+uniform`, or a dense row of its cost (within 2 %).
    """
    if grid is None or not claim.measure or not {claim.row, claim.base} <= {*grid.routers}:
        return
    rows = {one.router: one for one in ComparisonTable.of(grid).rows}
    row, base, control = rows[claim.row], rows[claim.base], rows.get(claim.control)
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
    asked = f"name a control of {claim.grid} that has been run: {claim.row}+uniform, or dense-matched"
    raise RunError(f"{CLAIMS}, {claim.claim!r}: {told}: {asked}")


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
