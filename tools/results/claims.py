"""claims.md: each claim of the papers beside a paired test, a control and a verdict; made from comparison directories.

`claims_file.py` says how claims are written.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pointsman._errors import RunError, did_you_mean
from pointsman._files import read_json, write_whole
from pointsman._grid import NONE, Grid
from pointsman._shapes import check_shape
from pointsman_lab.report.intervals import LEAST_SEEDS, LEVEL, Paired
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.paths import COMPARISON
from tools.results.claims_file import CLAIMS, Claim, read_claims

HEADER = ("claim", "where", "test", "difference", "seeds", "control", "verdict")


@dataclass(frozen=True)
class Tested:
    """A claim with its figures.

    Attributes:
        difference: row minus base, in printed units; of timings the ratio of the two minus the limit.
        control: row minus control; None where the claim names none.
        unit: of both.
    """

    claim: Claim
    difference: Paired
    control: Paired | None
    unit: str

    @property
    def verdict(self) -> str:
        """holds, does not hold, not told apart, or not run."""
        seeds = len(self.difference.values)
        if seeds < LEAST_SEEDS:
            return f"not run ({seeds} of {LEAST_SEEDS} seeds)" if seeds else "not run"
        if not self.difference.sign:
            return "not told apart"
        return "holds" if self.difference.sign == (-1 if self.claim.expected == "less" else 1) else "does not hold"

    @property
    def test(self) -> str:
        """What is compared, or the command that would compare it."""
        claim = self.claim
        if claim.measure:
            return f"`{claim.grid}`: `{claim.row}` against `{claim.base}`, {claim.measured.text}"
        over = f": `{claim.row}` over `{claim.base}`, against {claim.limit:g}" if claim.timings else ""
        return f"`{claim.test}`{over}"

    @property
    def against_control(self) -> str:
        """The same against the control, in words."""
        if self.control is None:
            return "-"
        if len(self.control.values) < LEAST_SEEDS:
            return f"{self.claim.control}: not run"
        words = {0: "not told apart from", -1: "below", 1: "above"}[self.control.sign or 0]
        return f"{self.control.text()}: {words} `{self.claim.control}`"


@dataclass(frozen=True)
class Page:
    """All claims, tested.

    Attributes:
        commands: grid -> the commands that make it, with GRID as its folder.
        comparisons: family of grids -> intervals that the page shows: each has the level 1 - 0.05 / comparisons.
    """

    tested: Sequence[Tested]
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    comparisons: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Page:
        """The claims of `folder`/claims.toml, tested on the grids in `folder`; a grid that is not there is not run.

        Raises:
            RunError: a claim that names no known measure or grid; a damaged grid.
        """
        commands, rows, families, claims = read_claims(folder / CLAIMS)
        grids = {name: read_comparison(folder / name) for name in commands if (folder / name / COMPARISON).is_file()}
        pairs = [
            (values_of(one, one.base, grids) or over_limit(one, folder), values_of(one, one.control, grids))
            for one in claims
        ]
        kinds = ["time" if one.timings else families.get(one.grid, "") for one in claims]
        count: Counter[str] = Counter()
        for kind, pair in zip(kinds, pairs, strict=True):
            count[kind] += sum(len(of) >= LEAST_SEEDS for of in pair)
        beside = [max(1, count[kind]) for kind in kinds]
        tested = [
            Tested(
                one,
                Paired(base, n),
                Paired(control, n) if one.control else None,
                one.measured.unit(grids.get(one.grid)) if one.measure else "of the time" if one.timings else "",
            )
            for one, (base, control), n in zip(claims, pairs, beside, strict=True)
        ]
        whole = {
            name: [f"{first} \\\n    {_options(rows[name], grids.get(name))}--out GRID", *after]
            for name, (first, *after) in commands.items()
        }
        return cls(tested, whole, +count)

    def markdown(self) -> str:
        """The page."""
        told = ", ".join(f"{family} {n}" for family, n in self.comparisons.items()) or "there are none"
        lines = [
            "# Claims",
            "",
            "Made by `make results` from the records in this folder; nothing here is typed by hand.",
            "",
            "Each line compares two rows of one grid, paired by seed: same data order, same initial weights outside",
            "the router. Difference: first row minus second, mean ± half of its confidence interval (Student's t).",
            "Intervals are corrected for the n comparisons of their family on this page (Bonferroni: the level is",
            f"1 - {1 - LEVEL:.2f} / n; {told}); in brackets half of the {LEVEL:.0%} interval.",
            f"A verdict needs {LEAST_SEEDS} seeds, and an interval on one side of 0. With few seeds the corrected",
            "intervals are wide, and most claims stay undecided. The models are tiny: verdicts are about this size.",
            "",
        ]
        lines += self._summary()
        for aspect in dict.fromkeys(one.claim.aspect for one in self.tested):
            rows = [self._row(one) for one in self.tested if one.claim.aspect == aspect]
            table = Grid(HEADER, rows, code=False, labels=len(HEADER)).markdown()
            lines += [f"## {aspect[0].upper()}{aspect[1:]}", "", table, ""]
        lines += ["## Commands", "", "Rows that claims and trends name, with the seeds of the row that has most.", ""]
        for name, commands in self.commands.items():
            shown = [one.replace("GRID", f"docs/results/{name}") for one in commands]
            lines += [f"`{name}`:", "", "```sh", *shown, "```", ""]
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        """What is decided, in sentences, and how much is not."""
        decided = [one for one in self.tested if one.verdict in ("holds", "does not hold")]
        open_ones = sum(one.verdict == "not told apart" for one in self.tested)
        lines = ["## What is decided", ""]
        for one in decided:
            told = f"- {one.claim.claim}: **{one.verdict}** ({one.difference.text()} {one.unit}; {one.test})."
            lines.append(textwrap.fill(told, 120, subsequent_indent="  ", break_on_hyphens=False))
            lines += [f"  Control: {one.against_control}."] if one.control is not None else []
        lines += [
            f"- Of {len(self.tested)} claims {len(decided)} are decided, {open_ones} are not told apart and "
            f"{len(self.tested) - len(decided) - open_ones} are not run.",
            "- What would change a verdict: more seeds, another learning rate, longer runs, larger models.",
            "",
        ]
        return lines

    def _row(self, one: Tested) -> list[str]:
        claim = one.claim
        count = len(one.difference.values)
        seeds = f"{count} turns" if count and claim.timings else str(count or NONE)
        figure = f"{one.difference.text()} {one.unit}".strip() if one.difference.values else NONE
        return [claim.claim, claim.where, one.test, figure, seeds, one.against_control, f"**{one.verdict}**"]

    def write(self, folder: Path) -> Path:
        """Writes claims.md."""
        return write_whole(folder / "claims.md", self.markdown())


def _options(rows: Sequence[str], comparison: Comparison | None) -> str:
    """Of `compare`: rows, and seeds as many as there are, at least `LEAST_SEEDS`."""
    seeds = max([LEAST_SEEDS, *(len(comparison.of(row)) for row in rows if comparison)])
    return f"--routers {','.join(rows)} \\\n    --seeds {seeds} " if rows else ""


def values_of(claim: Claim, other: str, grids: Mapping[str, Comparison]) -> list[float]:
    """The claim's row minus another row, one a seed that both have; none where either has not been run."""
    comparison = grids.get(claim.grid)
    if not other or comparison is None or not claim.measure:
        return []
    one, two = (claim.measured.of(comparison, router) for router in (claim.row, other))
    return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]


def over_limit(claim: Claim, folder: Path) -> list[float]:
    """The row's time over the base's, minus the limit, one a turn; none without timings.

    Raises:
        RunError: a damaged file, or one without a row that the claim names.
    """
    if not claim.timings or (record := read_json(file := folder / claim.timings)) is None:
        return []
    check_shape(record, {"seconds!": {"*": [float]}}, str(file))
    seconds = record["seconds"]
    for row in (claim.row, claim.base):
        if row not in seconds:
            raise RunError(f"{file}: no row {row!r}: {did_you_mean(row, seconds)}")
    mine, base = seconds[claim.row], seconds[claim.base]
    if len(mine) != len(base) or not all(one > 0 for one in (*mine, *base)):
        raise RunError(f"{file}: {claim.row} and {claim.base}: a time above 0 is expected for every turn of both")
    return [one / two - claim.limit for one, two in zip(mine, base, strict=True)]
