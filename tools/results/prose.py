"""index.md from index.md.in: a text whose figures are computed from the records of the grids beside it.

The text is a Jinja template. `grid("k2")` gives the rows of a grid:

    {% set k2 = grid("k2") %}
    {{ k2.less("hyperrouter", "smoe-dropout", k=1) }}     0.19 ± 0.06: how much less, mean ± half of the 95 % interval
    {{ k2.less("xmoe", "smoe", k=1).seeds }}              each of five seeds, or four of five seeds: which have the sign
    {{ k2.of("hyperrouter", "entropy", digits=3) }}       1.082 ± 0.045: mean ± sample standard deviation
    {{ k2.table([cell(k=1), cell(k=1, base="smoe")], {"smoe": "", "frozen-scaled": "frozen-scaled (control)"}) }}

Differences are paired by seed. `less` and `more` refuse a mean of the other sign, `level` an interval without 0: the
sentence around such a figure is to be written anew. What else it says is not checked. `gap` takes any difference and
prints its sign. A base of another grid is `enwik8.row("smoe")`. What is measured, and its k, attack, rate, task and
shift, are as in claims.toml.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from pointsman._errors import RunError, did_you_mean
from pointsman._files import read_text, write_whole
from pointsman._grid import NONE, Grid
from pointsman_lab.report.cell import LEAST_SEEDS, Paired
from pointsman_lab.runs.comparison import Comparison, read_comparison
from pointsman_lab.runs.paths import COMPARISON
from tools.results.measures import UNITS, Measure

SOURCE, RESULT = "index.md.in", "index.md"
WIDTH = 120
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BARE = "bare"
"""The base of a table's column: each row's router without its mixer."""
SEEDS = "seeds"
"""What a column shows: how many runs of the row are done."""


@dataclass(frozen=True)
class Estimate:
    """A figure of a text.

    Attributes:
        values: one a seed.
        paired: whether they are differences.
        signed: whether the sign is printed.
        digits: after the point.
    """

    values: Sequence[float]
    paired: bool = False
    signed: bool = False
    digits: int = 2

    def __str__(self) -> str:
        if len(self.values) < (LEAST_SEEDS if self.paired else 2):
            return self.mean
        return self._with(Paired(self.values).half) if self.paired else self.sd

    @property
    def sd(self) -> str:
        """Mean ± sample standard deviation."""
        return self._with(statistics.stdev(self.values))

    @property
    def mean(self) -> str:
        return self._shown(statistics.fmean(self.values))

    @property
    def percent(self) -> str:
        """The mean, times a hundred."""
        return self._shown(100 * statistics.fmean(self.values))

    @property
    def seeds(self) -> str:
        """How many seeds have the sign of the mean, in words."""
        agreed = sum((value < 0) == (statistics.fmean(self.values) < 0) for value in self.values)
        return f"{'each' if agreed == len(self.values) else _in_words(agreed)} of {self.count} seeds"

    @property
    def count(self) -> str:
        """The number of seeds, in words."""
        return _in_words(len(self.values))

    def _with(self, spread: float | None) -> str:
        return f"{self.mean} ± {spread:.{self.digits}f}"

    def _shown(self, figure: float) -> str:
        if self.signed:
            return f"{figure:+.{self.digits}f}"
        return f"{abs(figure) if self.paired else figure:.{self.digits}f}"


def _in_words(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


@dataclass(frozen=True)
class Cell:
    """A column of a table."""

    what: str = "quality"
    k: int = 0
    base: str = ""
    digits: int = 3
    header: str = ""
    rest: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The header: as given, or what is measured, at which k, to which base."""
        if self.header:
            return self.header
        unit = UNITS.get(self.what)
        what = "" if self.what == "quality" and self.k else f"{self.what} ({unit})" if unit else self.what
        to = {"": "", BARE: " to the bare router"}.get(self.base, f" to `{self.base}`")
        return ", ".join(filter(None, (what, f"k={self.k}" if self.k else ""))) + to


def cell(what: str = "quality", k: int = 0, base: str = "", digits: int = 3, header: str = "", **rest: Any) -> Cell:
    """A column of a table; `rest`: attack, rate, task, shift."""
    return Cell(what, k, base, digits, header, rest)


class Rows:
    """The rows of a grid, as a text names them."""

    def __init__(self, folder: Path) -> None:
        self.comparison: Comparison = read_comparison(folder)
        self.name = folder.name
        self._values = cache(lambda row, measure: measure.of(self.comparison, row))

    def row(self, name: str) -> tuple[Rows, str]:
        """A row as the base of rows of another grid."""
        return self, name

    def of(self, name: str, what: str = "quality", *, digits: int = 2, **measure: Any) -> Estimate:
        """The figures of one row."""
        return Estimate(list(self._found(name, _measure(what, **measure)).values()), digits=digits)

    def gap(self, name: str, base: str | tuple[Rows, str], what: str = "quality", **more: Any) -> Estimate:
        """Row minus base, with its sign."""
        return replace(self._difference(name, base, what, **more), signed=True)

    def less(self, name: str, base: str | tuple[Rows, str], what: str = "quality", **more: Any) -> Estimate:
        """How much less the row has than the base; ValueError where it has not."""
        return self._with_sign("less", self._difference(name, base, what, **more), name, base)

    def more(self, name: str, base: str | tuple[Rows, str], what: str = "quality", **more: Any) -> Estimate:
        """How much more the row has than the base; ValueError where it has not."""
        return self._with_sign("more", self._difference(name, base, what, **more), name, base)

    def level(self, name: str, base: str | tuple[Rows, str], what: str = "quality", **more: Any) -> Estimate:
        """The difference, without its sign, of rows that are not told apart; ValueError where the interval has no 0."""
        told = self._difference(name, base, what, **more)
        if Paired(told.values).sign:
            raise ValueError(f"{self.name}: {name} and {_name(base)} are told apart: {replace(told, signed=True)}")
        return told

    def between(self, names: Sequence[str], base: str, what: str = "quality", **more: Any) -> str:
        """`0.24 to 0.28`: the least and the largest mean of some rows, or of their differences to `base` (if not "");
        ValueError where the signs differ."""
        told = [self._difference(name, base, what, **more) if base else self.of(name, what, **more) for name in names]
        means = sorted(statistics.fmean(one.values) for one in told)
        if means[0] * means[-1] < 0:
            raise ValueError(f"{self.name}: rows on both sides of {base or 0}: {means[0]:+.4f} and {means[-1]:+.4f}")
        low, high = sorted((abs(means[0]), abs(means[-1])))
        return f"{low:.{told[0].digits}f} to {high:.{told[0].digits}f}"

    def table(self, cells: Sequence[Cell], rows: Mapping[str, str]) -> str:
        """A Markdown table: spec -> label, "" = the spec itself; "-" at the base, nothing where there is no figure."""
        made = [[label or row, *(self._cell(row, one) for one in cells)] for row, label in rows.items()]
        return Grid(("row", *(one.title for one in cells)), made, code=False).markdown()

    def _difference(
        self, name: str, base: str | tuple[Rows, str], what: str, *, digits: int = 2, **measure: Any
    ) -> Estimate:  # fmt: skip
        of, other = base if isinstance(base, tuple) else (self, base)
        taken = _measure(what, **measure)
        one, two = self._found(name, taken), of._found(other, taken)
        values = [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]
        if not values:
            raise ValueError(f"{self.name}: {name} and {other} have no seed in common: {taken.text}")
        return Estimate(values, paired=True, digits=digits)

    def _with_sign(self, said: str, told: Estimate, name: str, base: str | tuple[Rows, str]) -> Estimate:
        if (mean := statistics.fmean(told.values)) * (1 if said == "more" else -1) < 0:
            raise ValueError(f"{self.name}: {name} minus {_name(base)} is {mean:+.4f}, not {said}")
        return told

    def _cell(self, row: str, one: Cell) -> str:
        base = row.partition("+")[0] if one.base == BARE else one.base
        if base == row:
            return NONE
        if one.what == SEEDS:
            return str(sum(run.done for run in self.comparison.of(self._known(row))))
        rest = {"k": one.k, **one.rest}
        if not all(self._values(self._known(name), _measure(one.what, **rest)) for name in (row, base) if name):
            return ""
        rest["digits"] = one.digits
        return str(self.gap(row, base, one.what, **rest) if base else self.of(row, one.what, **rest))

    def _known(self, row: str) -> str:
        if row not in self.comparison.routers:
            raise ValueError(f"{self.name} has no row {row!r}: {did_you_mean(row, self.comparison.routers)}")
        return row

    def _found(self, row: str, measure: Measure) -> Mapping[int, float]:
        found: Mapping[int, float] = self._values(self._known(row), measure)
        if not found:
            raise ValueError(f"{self.name}: no run of {row} has this figure: {measure.text}")
        return found


def _name(base: str | tuple[Rows, str]) -> str:
    return base if isinstance(base, str) else f"{base[1]} of {base[0].name}"


def _measure(what: str, **rest: Any) -> Measure:
    if what not in UNITS:
        raise ValueError(f"unknown measure {what!r}: {did_you_mean(what, UNITS)}")
    return Measure(what, **rest)


def write_prose(folder: Path) -> Path | None:
    """Writes `folder`/index.md from index.md.in; None where there is none.

    Raises:
        RunError: an unknown grid or row, a figure that is not there, or one with another sign than the text says.
    """
    source = folder / SOURCE
    return write_whole(folder / RESULT, rendered(source)) if source.is_file() else None


def rendered(source: Path) -> str:
    """The text with its figures, its paragraphs broken anew."""

    @cache
    def grid(name: str) -> Rows:
        if not (source.parent / name / COMPARISON).is_file():
            known = [file.parent.name for file in source.parent.glob(f"*/{COMPARISON}")]
            raise ValueError(f"unknown grid {name!r}: {did_you_mean(name, known)}")
        return Rows(source.parent / name)

    texts = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        autoescape=False,
    )  # fmt: skip
    try:
        made = texts.from_string(read_text(source)).render(grid=grid, cell=cell)
    except Exception as error:  # whatever an expression of the text raises
        raise RunError(f"{source}, line {_line(error)}: {error or type(error).__name__}") from None
    return wrapped(made)


def _line(error: BaseException) -> int:
    """Of the text: the last one of the template that the error came through."""
    lines, at = [getattr(error, "lineno", 0)], error.__traceback__
    while at is not None:
        lines += [at.tb_lineno] if at.tb_frame.f_code.co_filename == "<template>" else []
        at = at.tb_next
    return int(lines[-1] or 0)


def wrapped(text: str, width: int = WIDTH) -> str:
    """Markdown with its paragraphs and items broken at `width`; code, tables and headings stay."""
    done: list[str] = []
    for part in re.split(r"(?ms)(^ *```.*?^ *```$)", text):
        if part.lstrip().startswith("```"):
            done.append(part)
            continue
        blocks = re.split(r"(?m)(^(?:\s*\n| *\|.*\n|#.*\n))|(?=^ *(?:[-*] |\d+\. ))", part)
        done += [
            _filled(block, width) if block.strip() and block.lstrip()[0] not in "|#" else block
            for block in blocks
            if block
        ]
    return "".join(done)


def _filled(block: str, width: int) -> str:
    first = re.match(r" *([-*] |\d+\. )?", block)
    indent = first[0] if first else ""
    filled = textwrap.fill(
        " ".join(block[len(indent) :].split()), width, initial_indent=indent, subsequent_indent=" " * len(indent),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return filled + "\n" * block.endswith("\n")
