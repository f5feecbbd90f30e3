"""A text about grids: figures from records, signs that are checked, tables, and paragraphs broken anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman._errors import RunError
from tests.lab.report.fixtures import write_comparison, write_run
from tools.results.prose import RESULT, SOURCE, Estimate, rendered, wrapped, write_prose

VALUES = {"smoe": (3.0, 3.1, 3.2), "xmoe": (2.9, 2.98, 3.06), "smoe+mix": (3.4, 3.0, 3.5), "young": (3.0, 3.5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for grid, off in (("one", 0.0), ("two", 1.0)):
        skipped = [(router, seed) for router in VALUES for seed in range(3)]
        write_comparison(tmp_path / grid, routers=list(VALUES), missing=skipped)
        for router, values in VALUES.items():
            for seed, value in enumerate(values):
                path = tmp_path / grid / "runs" / router / f"seed-{seed}"
                write_run(path, router, seed, top_k=(1,), values={1: value + off})
    return tmp_path


def text(folder: Path, figure: str) -> str:
    (folder / SOURCE).write_text('{% set one, two = grid("one"), grid("two") %}\n{{ ' + figure + " }}\n")
    return rendered(folder / SOURCE).strip()


def test_figures(folder: Path) -> None:
    assert text(folder, 'one.of("smoe", k=1)') == "3.10 ± 0.10"
    half = 4.302653 * 0.02 / 3**0.5  # Student's t, two degrees of freedom
    assert text(folder, 'one.less("xmoe", "smoe", k=1, digits=3)') == f"0.120 ± {half:.3f}"
    assert text(folder, 'one.less("xmoe", "smoe", k=1, digits=3).sd') == "0.120 ± 0.020"
    assert text(folder, 'one.gap("xmoe", "smoe", k=1).mean') == "-0.12"
    assert text(folder, 'two.more("smoe", one.row("smoe"), k=1).mean') == "1.00"
    assert text(folder, 'one.less("xmoe", "smoe", k=1).percent') == "12.00"
    assert text(folder, 'one.less("xmoe", "smoe", k=1).seeds') == "each of three seeds"
    assert text(folder, 'one.more("smoe+mix", "smoe", k=1).seeds') == "two of three seeds"
    assert text(folder, 'one.of("young", k=1).count') == "two"
    assert text(folder, 'one.level("smoe+mix", "smoe", k=1)').startswith("0.20 ± ")
    assert text(folder, 'one.between(["xmoe", "young"], "", k=1)') == "2.98 to 3.25"
    assert text(folder, 'one.more("young", "smoe", k=1)') == "0.20", "two seeds have no interval"
    assert text(folder, 'one.between(["young", "smoe+mix"], "smoe", k=1)') == "0.20 to 0.20"


def test_only_differences_lose_their_sign() -> None:
    assert str(Estimate([-0.25], digits=1)) == "-0.2"
    assert Estimate([-0.25]).percent == "-25.00"
    assert str(Estimate([-0.25], paired=True)) == "0.25"
    assert Estimate([1.0] * 12).count == "12"


def test_a_table(folder: Path) -> None:
    lines = text(
        folder,
        'two.table([cell(k=1, digits=1), cell(k=1, base="bare", digits=1), cell("entropy"), cell("seeds")], '
        '{"smoe": "plain one", "smoe+mix": "", "young": ""})',
    ).split("\n")
    assert lines[0] == "| row | k=1 | k=1 to the bare router | entropy (nats) | seeds |"
    assert lines[2].startswith("| plain one | 4.1 ± 0.1 | - |")
    assert lines[3].startswith("| smoe+mix | 4.3 ± 0.3 | +0.2 ± ")
    assert lines[4].endswith(" 2 |")


@pytest.mark.parametrize(
    ("figure", "told"),
    [
        ('one.more("xmoe", "smoe", k=1)', "one: xmoe minus smoe is -0.1200, not more"),
        ('one.level("xmoe", "smoe", k=1)', "one: xmoe and smoe are told apart: -0.12 ± 0.05"),
        ('one.less("xmoe", two.row("smoe"), k=1, digits=1).x', "no attribute 'x'"),
        ('one.of("xmo", k=1)', "one has no row 'xmo': did you mean 'xmoe'"),
        ('one.of("xmoe", "collapse")', "one: no run of xmoe has this figure: collapse"),
        ('one.between(["xmoe", "young"], "smoe", k=1)', "one: rows on both sides of smoe"),
        ('grid("on").of("xmoe")', "unknown grid 'on': did you mean 'one'"),
        ('one.of("xmoe", "qualty")', "unknown measure 'qualty': did you mean 'quality'"),
        ('three.of("xmoe")', "'three' is undefined"),
        ("one.of(", "unexpected"),
    ],
)
def test_what_a_text_may_not_say(folder: Path, figure: str, told: str) -> None:
    with pytest.raises(RunError) as error:
        text(folder, figure)
    assert told in str(error.value)
    assert f"{SOURCE}, line 2: " in str(error.value)


def test_the_page_beside_its_source(folder: Path) -> None:
    assert write_prose(folder) is None
    (folder / SOURCE).write_text("# Title\n\nplain words\n")
    assert write_prose(folder) == folder / RESULT
    assert (folder / RESULT).read_text() == "# Title\n\nplain words\n"


def test_paragraphs_are_broken_anew_and_nothing_else() -> None:
    given = "# a heading that stays\none two\nthree four\n\n- five six seven\n  eight\n10. nine ten eleven\n\n"
    kept = "| a | table row that stays |\n  | one | more |\n\n```sh\na command that stays as it is\n```\n"
    kept += "  ```sh\n  a b\n  c d\n  ```\n"
    assert wrapped(given + kept, 14) == (
        "# a heading that stays\none two three\nfour\n\n- five six\n  seven eight\n10. nine ten\n    eleven\n\n" + kept
    )
