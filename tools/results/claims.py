"""claims.md: each claim of the papers beside a paired test, a control and a verdict; made from comparison directories.

`claims_file.py` says how claims are written and what the records hold of them, `inference.py` how they are judged.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pointsman_lab._files import write_whole
from pointsman_lab._grid import NONE, Grid
from pointsman_lab.exam.exam import record
from pointsman_lab.report.cell import LEAST_SEEDS
from pointsman_lab.runs.comparison import Comparison
from tools.results.claims_file import (
    CLAIMS,
    Claim,
    Family,
    check_cost,
    read_claims,
    read_toml,
    tuned_claim,
    unit_of,
    values_in_file,
    values_of,
)
from tools.results.grids import again_of, check_tuned, read_grids, tuned_rows
from tools.results.inference import Judged, Prior, judge

Grids = Mapping[str, Comparison]
COMMANDS = ("pointsman ", "python ")
HEADER = ("claim", "where", "test", "difference", "seeds", "p", "control", "verdict")
EXPLAINED = """
# Claims

Made by `make results` from the records in `records/`; nothing here is typed by hand.

Each line compares two rows, of one grid where no other is named, paired by seed: same data order, same initial weights
in the parts that both have. Of a language model a seed changes the initial weights, not the order of the data.
Difference: first row minus second, mean ± half of its 95 % interval, not corrected. Its variance is moderated over the
claims of a measure (Smyth 2004), so intervals of one grid can be of one width, and grids' own pages have others; p is
corrected for the family: by Holm's method in a primary family, by Benjamini and Hochberg's in an exploratory one. *Does
not hold*: the opposite is significant. *Equivalent*: two one-sided tests find the difference within the margin that is
named. *Undecided*: neither; beside it stands the smallest difference that would have been seen with a power of 80 % (at
Holm's first step), or of a claim of equality the smallest margin, and how many more seeds would bring that to the 0.01
(or other margin) that is named. A control is no claim, so it has a figure, with an interval of its own variance, and no
verdict. The models are tiny: verdicts are about this size.

Bold: verdicts of primary families, beside them that of a plain t-test, corrected likewise, where it is another. No
interval holds what the choice of learning rates adds: it rests on one seed, or, where the grid's page says so, on one
seed down to the settings of the last round and on three between these. Where rates were chosen twice, the figure is of
the second choice; that of the first stands behind the verdict, with its own where it is another, and a claim is decided
only where both say the same. Exploratory grids were looked at while their seeds came in, so their p-values are too
small by an unknown amount, and their verdicts only suggest what to ask next. [The protocol](protocol.md) says what was
fixed before the runs. A note after a verdict has its figures in the section Balance, or in other grids' lines. A star
marks a claim that entered when its records were there already. Each grid's page has its command; claims.toml in
`records/` has all.
"""


@dataclass(frozen=True)
class Tested:
    """A claim with its figures.

    Attributes:
        values: row minus base, in printed units, one a seed; of timings the ratio of the two minus the limit.
        control: row minus control, likewise; None where the claim names none.
        unit: of both.
        seeds: how many seeds its family asks for.
        judged: the tests of the difference, corrected for the family; None where seeds are missing.
        primary: whether its family is.
        plain: the tests without moderation, of a primary family.
        first, plain_first: both at the first choice of rates, where the grid has a second, of a primary family.
    """

    claim: Claim
    values: Sequence[float]
    control: Sequence[float] | None
    unit: str
    seeds: int
    judged: Judged | None = None
    primary: bool = False
    plain: Judged | None = None
    first: Judged | None = None
    plain_first: Judged | None = None

    @property
    def verdict(self) -> str:
        """holds, does not hold, equivalent, undecided, or not run; of two choices of rates what both say."""
        if self.judged is None:
            return f"not run ({len(self.values)} of {self.seeds} seeds)" if self.values else "not run"
        return _agreed(self.judged, self.first)

    @property
    def verdict_text(self) -> str:
        """The verdict with what it rests on."""
        text = self.marked
        if self.judged is not None and self.verdict == "equivalent":
            text += f" within {self.judged.margin:g}"
        elif self.judged is not None and self.judged.verdict == "undecided":
            more, smallest, margin = self.judged.more_seeds, self.judged.smallest, self.judged.margin
            needs = f"needs {more:,} more" if more < 1000 else "needs over 1,000 more"
            sees = "would show equality within" if self.claim.expected == "equal" else "sees"
            text += f": {sees} {smallest:.3f}; {needs} seed{'s' * (more != 1)} for {margin:g}"
        return text + self.otherwise

    @property
    def otherwise(self) -> str:
        """That of the first choice of rates, of a plain t-test where it is another, and the claim's note."""
        text = ""
        if self.judged and self.first:
            one, two = self.first, self.judged
            text = f"; first choice of rates: {interval(one.values, one)}"
            text += f", {one.verdict}" if one.verdict != two.verdict else ""
            text += f"; second: {two.verdict}" if two.verdict not in (one.verdict, self.verdict) else ""
        other = _agreed(self.plain, self.plain_first) if self.plain else self.verdict
        text += f"; by a plain t-test {other}" if other != self.verdict else ""
        return text + (f"; {self.claim.note}" if self.claim.note and self.judged else "")

    @property
    def marked(self) -> str:
        """The verdict, bold in a primary family."""
        return f"**{self.verdict}**" if self.primary else self.verdict

    @property
    def figure(self) -> str:
        """`-0.123 ± 0.045 bits`: the mean and half of its 95 % interval, that of this comparison alone."""
        unseen = self.judged is None and self.seeds > LEAST_SEEDS
        if not self.values or unseen:  # nobody looks at a primary family before all of its seeds are there
            return NONE
        return f"{interval(self.values, self.judged)} {self.unit}".strip()

    @property
    def test(self) -> str:
        """What is compared, or the command that would compare it, or why there is none."""
        claim = self.claim
        if claim.measure:
            of = f" at k = {claim.base_k}" if claim.base_k else ""
            return f"`{claim.grid}`: `{claim.row}` against `{claim.base}`{of}, {claim.measured.text}"
        if claim.exam:
            return f"[exam](../exam/index.md), {claim.exam}: `{claim.row}` against `{claim.base}`"
        if claim.timings:
            return f"`{claim.test}`: `{claim.row}` over `{claim.base}`, against {claim.limit:g}"
        if claim.losses:
            return f"`{claim.test}`: `{claim.row}` against `{claim.base}`"
        return f"`{claim.test}`" if claim.test.startswith(COMMANDS) else claim.test

    @property
    def against_control(self) -> str:
        """The same against the control: a figure, which is no test of the claim."""
        if self.control is None:
            return NONE
        if len(self.control) < (self.seeds if self.judged is None else LEAST_SEEDS):
            return f"`{self.claim.control}`: not run"
        return f"{interval(self.control)} against `{self.claim.control}`"


def _agreed(one: Judged, first: Judged | None) -> str:
    """The verdict of two choices of rates; undecided where they differ."""
    return one.verdict if first is None or first.verdict == one.verdict else "undecided"


def interval(values: Sequence[float], judged: Judged | None = None) -> str:
    """Mean ± half of the 95 % interval; the mean alone below `LEAST_SEEDS` values."""
    one = judged or Judged(values, 0.0)
    return f"{one.mean:+.3f}" + (f" ± {one.half:.3f}" if len(values) >= LEAST_SEEDS else "")


@dataclass(frozen=True)
class Page:
    """All claims, tested."""

    tested: Sequence[Tested]
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    grids: Grids = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Page:
        """The claims of `folder`/claims.toml, tested on the grids in `folder`; a grid that is not there is not run."""
        commands, families, claims = read_claims(folder / CLAIMS)
        known = read_toml(folder / CLAIMS).get("grids", {})
        own, shown = read_grids(folder)
        for grid in own.values():
            check_tuned(grid)
        of_grid = {name: grid.get("family", "") for name, grid in known.items()}
        tested = judged_by_family(_tested(claims, folder, shown, families, of_grid), families)
        again = again_of(known, own)
        if again:
            primary = {name: of for name, of in families.items() if of.kind == "primary"}
            first = judged_by_family(_tested(claims, folder, own, families, of_grid), primary)
            tested = [
                replace(one, first=before.judged, plain_first=before.plain)
                if one.claim.grid in again else one
                for one, before in zip(tested, first, strict=True)
            ]  # fmt: skip
        for one in tested:
            check_cost(one.claim, shown.get(one.claim.grid))
        whole = {name: [f"{first} \\\n    {_options(own.get(name))}--out GRID", *after]
                 for name, (first, *after) in commands.items()}  # fmt: skip
        whole |= {name: whole[name] + [one.replace("GRID", f"records/{other}") for one in whole[other]]
                  for name, other in again.items()}  # fmt: skip
        return cls(tested, whole, families, shown)

    def markdown(self) -> str:
        lines = [EXPLAINED.lstrip(), *self._summary()]
        for name, family in self.families.items():
            of = [one for one in self.tested if one.claim.family == name]
            if not of:
                continue
            lines += [f"## {name[0].upper()}{name[1:]} ({family.kind}, {family.seeds} seeds)", ""]
            for aspect in dict.fromkeys(one.claim.aspect for one in of):
                table = Grid(HEADER, [self._row(one) for one in of if one.claim.aspect == aspect], code=False,
                             labels=len(HEADER)).markdown()  # fmt: skip
                lines += [f"### {aspect[0].upper()}{aspect[1:]}", "", table, ""]
        return "\n".join(lines)

    def seeds_of(self, family: str) -> int:
        """How many seeds each row of a primary family needs before anything of its grid is shown; else 0."""
        found = self.families.get(family)
        return found.seeds if found and found.kind == "primary" else 0

    def shown_commands(self, grid: str) -> list[str]:
        """The commands that make a grid, with the rows that claims and trends name."""
        return [one.replace("GRID", f"records/{grid}") for one in self.commands.get(grid, ())]

    def counts(self) -> Grid:
        """How many claims of each family have which verdict."""
        header = ("family", "claims", "hold", "do not hold", "equivalent", "undecided", "not run")
        kinds = ("holds", "does not hold", "equivalent", "undecided", "not run")
        rows = []
        for name, family in self.families.items():
            count = Counter(one.verdict.split(" (")[0] for one in self.tested if one.claim.family == name)
            if count:
                rows.append([f"{name} ({family.kind})", str(count.total()), *(str(count[kind]) for kind in kinds)])
        return Grid(header, rows, code=False)

    def _summary(self) -> list[str]:
        """The counts, and the claims that are decided; of a primary family all that are judged."""
        lines = ["## Verdicts", "", self.counts().markdown(), ""]
        for one in self.tested:
            if (one.primary and one.judged) or one.verdict in ("holds", "does not hold", "equivalent"):
                told = f"- {one.claim.claim}: {one.verdict_text} ({one.figure}; {one.test})."
                lines.append(textwrap.fill(told, 120, subsequent_indent="  ", break_on_hyphens=False))
                lines += [f"  Control: {one.against_control}."] if one.control is not None else []
        return [*lines, ""]

    def _row(self, one: Tested) -> list[str]:
        claim, count = one.claim, len(one.values)
        seeds = f"{count} turns" if count and claim.timings else str(count or NONE)
        p = NONE if one.judged is None else "<0.001" if one.judged.p < 0.001 else f"{one.judged.p:.2g}"
        return [claim.claim, claim.where, one.test, one.figure, seeds, p, one.against_control, one.verdict_text]

    def write(self, folder: Path) -> Path:
        return write_whole(folder / "claims.md", self.markdown())


def _tested(
    claims: Sequence[Claim], folder: Path, grids: Grids, families: Mapping[str, Family], of_grid: Mapping[str, str]
) -> list[Tested]:
    """The claims with their figures in these grids, not judged yet."""
    cells = record() if any(one.exam for one in claims) else {}
    specs = {name: tuned_rows(grid) for name, grid in grids.items()}
    return [
        Tested(
            one,
            values_of(one, one.base, grids, cells) or values_in_file(one, folder),
            values_of(one, one.control, grids, cells) if one.control else None,
            unit_of(one, grids),
            max(families.get(name, Family()).seeds for name in (one.family, of_grid.get(one.grid, ""))),
            primary=families[one.family].kind == "primary",
        )
        for one in (tuned_claim(one, specs) for one in claims)
    ]


def judged_by_family(tested: Sequence[Tested], families: Mapping[str, Family]) -> list[Tested]:
    """The claims with their tests, corrected within each family. A variance's prior is that of its grid and measure."""
    whole = [one for one in tested if len(one.values) >= one.seeds]
    kinds: dict[tuple[str, str, str], list[Sequence[float]]] = {}
    for one in whole:
        kinds.setdefault(_kind(one), []).append(one.values)
    priors = {
        kind: Prior.of([statistics.variance(of) for of in values], [len(of) - 1 for of in values])
        for kind, values in kinds.items()
    }
    found: dict[int, Judged] = {}
    plain: dict[int, Judged] = {}
    for name, family in families.items():
        members = [one for one in whole if one.claim.family == name]
        tests = [Judged(one.values, one.claim.equal_within, priors[_kind(one)], one.claim.expected) for one in members]
        ids, kind, planned = [id(one) for one in members], family.kind, 0
        if kind == "primary":
            planned = sum(one.claim.family == name for one in tested)
            plain |= zip(ids, judge([replace(test, prior=Prior()) for test in tests], kind, planned), strict=True)
        found |= zip(ids, judge(tests, kind, planned), strict=True)
    return [replace(one, judged=found.get(id(one)), plain=plain.get(id(one))) for one in tested]


def _kind(one: Tested) -> tuple[str, str, str]:
    if one.claim.losses:  # parts of one text: no variances of their own to learn from
        return one.claim.losses, one.claim.row, one.claim.base
    return one.claim.family, one.claim.grid or one.claim.exam, one.claim.measure


def _options(comparison: Comparison | None) -> str:
    """Of `compare`: all rows as they were asked for, and seeds as many as the row has that has most."""
    if comparison is None:
        return ""
    asked = {spec: row for row, spec in tuned_rows(comparison).items()}
    rows = [asked.get(row, row) for row in comparison.routers]
    seeds = max(len(comparison.of(row)) for row in comparison.routers)
    return f"--routers {','.join(rows)} \\\n    --seeds {seeds} "
