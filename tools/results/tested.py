"""A claim with its figures and its verdict, in the words of the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pointsman_lab._grid import NONE
from pointsman_lab.report.cell import LEAST_SEEDS
from tools.results.claims_file import Claim
from tools.results.inference import Judged

COMMANDS = ("pointsman ", "python ")


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
