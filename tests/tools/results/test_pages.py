"""The results: pages are what the records give, and few and short enough to be read."""

import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pointsman import MoE
from pointsman._errors import RunError
from pointsman.routers.frame.entries import BASELINES
from pointsman_lab.cli.runs import run_config
from tests.lab.report.fixtures import write_comparison, write_run
from tests.tools.results.test_claims import PAGE, claim, invented
from tools.results.__main__ import Pages
from tools.results.claims import Page
from tools.results.claims_file import CLAIMS

ROOT = Path(__file__).parents[3]
SECTIONS = ["## table", "## loads"]
QUESTION = """
intro = "Figures."

[[questions]]
name = "first"
title = "Is it so?"
picture = "quality"
alt = "a picture"

"""
RECORDS, RESULTS = ROOT / "records", ROOT / "docs" / "results"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pages_are_what_the_records_give(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.results", str(RECORDS), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=800)
    made = {file.name for file in tmp_path.glob("*.md")}
    assert made == {file.name for file in RESULTS.glob("*.md")} - {"protocol.md"}
    for page in made:
        assert (tmp_path / page).read_text() == (RESULTS / page).read_text(), page


def test_the_results_are_few_and_short() -> None:
    files = [file for file in RESULTS.rglob("*") if file.is_file()]
    assert len(files) <= 80
    assert sum(file.stat().st_size for file in files) <= 8e6
    index = (RESULTS / "index.md").read_text(encoding="utf-8")
    assert len(index.splitlines()) <= 150, "three screens"
    for target in re.findall(r"\]\((?!http)([^)#]+)", index):
        assert (RESULTS / target).is_file(), target
    assert not re.search(r"told\s+apart", "".join(file.read_text(encoding="utf-8") for file in RESULTS.glob("*.md")))


def test_a_grid_and_the_index_of_a_folder(tmp_path: Path) -> None:
    folder, pages = invented(tmp_path), tmp_path / "pages"
    pages.mkdir()
    text = PAGE.replace("[grids.tiny]", QUESTION + "[grids.tiny]\nabout = 'A tiny grid.'")
    (folder / CLAIMS).write_text(text + claim("ahead", question="first") + claim("behind"))
    Pages(folder, Page.read(folder)).write(pages)
    grid = (pages / "tiny.md").read_text()
    assert grid.startswith("# tiny\n\nA tiny grid.\n\n")
    assert [line for line in grid.splitlines() if line.startswith("## ")] == SECTIONS
    index = (pages / "index.md").read_text()
    assert "| ahead less | [tiny](tiny.md) | -1.0" in index
    assert "behind less" not in index
    assert "| [tiny](tiny.md) | A tiny grid. | 5 | 3 |" in index
    assert {file.name for file in pages.iterdir()} == {"tiny.md", "index.md"}, "the other grids are not there"


def test_the_page_of_a_grid_goes_and_its_claims_stay(tmp_path: Path) -> None:
    folder, pages = invented(tmp_path), tmp_path / "pages"
    pages.mkdir()
    text = PAGE.replace("[grids.tiny]", QUESTION + "[grids.tiny]\npage = false")
    (folder / CLAIMS).write_text(text + claim("ahead", question="first"))
    Pages(folder, Page.read(folder)).write(pages)
    assert "| ahead less | tiny | -1.0" in (pages / "index.md").read_text()
    assert {file.name for file in pages.iterdir()} == {"index.md"}


def test_of_a_primary_grid_nothing_is_shown_before_all_seeds(tmp_path: Path) -> None:
    folder, pages = invented(tmp_path), tmp_path / "pages"
    pages.mkdir()
    family = '[families.main]\nkind = "primary"\nseeds = 12\n'
    text = QUESTION + family + PAGE.replace("[grids.tiny]", '[grids.tiny]\nfamily = "main"')
    (folder / CLAIMS).write_text(text + claim("ahead", question="first", control="behind"))
    Pages(folder, Page.read(folder)).write(pages)
    index = (pages / "index.md").read_text()
    assert "| ahead less | tiny | - | `behind`: not run | **not run (3 of 12 seeds)** |" in index
    assert not (pages / "tiny.md").exists()


def test_claims_find_the_rows_whose_rate_was_tuned(tmp_path: Path) -> None:
    folder = invented(tmp_path)
    file = folder / "tiny" / "comparison.json"
    plan = json.loads(file.read_text())
    file.write_text(json.dumps({**plan, "tuned": {"ahead": {"row": "asked", "learning_rate": "0.001"}}}))
    (folder / CLAIMS).write_text(PAGE + claim("asked"))
    [one] = Page.read(folder).tested
    assert (one.claim.row, one.verdict) == ("ahead", "holds")
    assert "smoe,asked,behind" in Page.read(folder).shown_commands("tiny")[0], "so that the command makes the grid"
    file.write_text(json.dumps({**plan, "tuned": {"ahead": {"row": "asked", "learning_rate": "0.5"}}}))
    with pytest.raises(RunError, match=r"seed-0: learning_rate is .*tiny chose 0.5 for ahead"):
        Page.read(folder)


def test_a_note_stands_after_the_verdict(tmp_path: Path) -> None:
    folder = invented(tmp_path)
    (folder / CLAIMS).write_text(PAGE + claim("ahead", note="at one rate") + claim("none", note="at one rate"))
    assert [one.verdict_text for one in Page.read(folder).tested] == ["holds; at one rate", "not run"]


def test_a_tuned_grid_shows_what_was_chosen(tmp_path: Path) -> None:
    folder, pages = invented(tmp_path), tmp_path / "pages"
    pages.mkdir()
    curve = {"learning_rate=0.001": [2.0, 1.5], "learning_rate=0.002": [1.9, 1.6], "learning_rate=0.004": [3.0]}
    (folder / "tiny" / "tuning.json").write_text(json.dumps({"seeds": [1000, 1001], "k": 2, "curve": {"ahead": curve}}))
    (folder / CLAIMS).write_text(QUESTION + PAGE + claim("ahead"))
    Pages(folder, Page.read(folder)).write(pages)
    grid = (pages / "tiny.md").read_text()
    assert "| `ahead` | 3 | learning_rate=0.001 | 2.000, 1.500 | learning_rate=0.002 (1.600) |" in grid
    assert "`ahead`: learning_rate=0.001 is at the edge of what was tried" in grid
    assert "Seed 1000 (last round: 1000 to 1001), validation text, k = 2" in grid


AGAIN = """
[grids.again]
command = "pointsman compare --data stdlib --tune learning_rate=2e-3"
page = false
"""


def again(tmp_path: Path, family: str = "primary", **figures: float) -> Path:
    """Grid `tiny`, three of whose rows were tuned, and `again`, which has two of these rows and another, tuned anew."""
    folder = invented(tmp_path)
    rows = {"smoe": "smoe", "ahead": "ahead", "behind": "behind"}
    for name, chosen in (("tiny", rows), ("again", {"ahead:lr_scale=4": "ahead", "behind": "behind", "new": "new"})):
        if name == "again":
            write_comparison(
                folder / name, routers=list(chosen), missing=[(row, seed) for row in chosen for seed in range(3)]
            )
            for row, asked in chosen.items():
                for seed in range(3):
                    value = (
                        {"ahead": 2.0, "behind": 4.0, "new": 1.0, **figures}[asked] + 0.1 * seed + 0.001 * (seed % 2)
                    )
                    run = folder / name / "runs" / row.replace(":", "~") / f"seed-{seed}"
                    write_run(run, row, seed, top_k=(1,), values={1: value})
        file = folder / name / "comparison.json"
        tuned = {spec: {"row": row, "learning_rate": "0.001"} for spec, row in chosen.items()}
        plan = json.loads(file.read_text())
        routers = [row for row in plan["routers"] if row != "few"]
        file.write_text(json.dumps({**plan, "routers": routers, "tuned": tuned}))
    text = f'[families.main]\nkind = "{family}"\n' + PAGE.replace(
        "[grids.tiny]", '[grids.tiny]\nfamily = "main"\nagain = "again"'
    )
    (folder / CLAIMS).write_text(text + AGAIN + claim("ahead") + claim("behind", control="ahead") + claim("same"))
    return folder


def test_rows_whose_rates_were_chosen_again_take_the_place_of_the_first(tmp_path: Path) -> None:
    page = Page.read(again(tmp_path, ahead=1.0))
    assert list(page.grids["tiny"].routers) == ["smoe", "ahead:lr_scale=4", "behind", "same"]
    assert "again" not in page.grids, "it is no grid of its own"
    ahead, behind, same = page.tested
    assert (ahead.claim.row, ahead.claim.base) == ("ahead:lr_scale=4", "smoe")
    assert ahead.values == pytest.approx([-2.0, -2.0, -2.0], abs=0.01)
    assert ahead.verdict_text.startswith("**holds**; first choice of rates: -1.0")
    assert not ahead.verdict_text.endswith("holds"), "the same verdict is not said twice"
    assert behind.control is not None
    assert behind.control == pytest.approx([3.0, 3.0, 3.0], abs=0.01)
    assert "; first choice of rates: " in same.verdict_text, "its variance is moderated with those of the others"
    first, other = page.shown_commands("tiny")[0], page.shown_commands("tiny")[2]
    assert "--routers smoe,ahead,behind,same " in first
    assert first.endswith("--out records/tiny")
    assert "--routers ahead,behind,new " in other
    assert other.endswith("--out records/again")


def test_a_claim_is_decided_where_both_choices_of_rates_agree(tmp_path: Path) -> None:
    ahead, behind, _ = Page.read(again(tmp_path, ahead=3.5, behind=5.0)).tested
    assert ahead.judged is not None
    assert (ahead.judged.verdict, ahead.verdict, behind.verdict) == ("does not hold", "undecided", "does not hold")
    assert ahead.verdict_text.startswith("**undecided**; first choice of rates: -1.0")
    assert ahead.verdict_text.endswith(", holds; second: does not hold")


def test_exploratory_claims_follow_the_second_choice_of_rates(tmp_path: Path) -> None:
    ahead = Page.read(again(tmp_path, "exploratory", ahead=3.5)).tested[0]
    assert (ahead.verdict_text, ahead.first) == ("does not hold", None)


def test_the_page_of_a_grid_has_both_choices_of_rates(tmp_path: Path) -> None:
    folder, pages = again(tmp_path, ahead=1.0), tmp_path / "pages"
    pages.mkdir()
    curve = {"learning_rate=0.001": [2.0], "learning_rate=0.002": [1.9]}
    for name, rows in (("tiny", ("smoe", "ahead")), ("again", ("ahead", "new"))):
        told = {"seeds": [1000], "k": 2, "curve": dict.fromkeys(rows, curve)}
        (folder / name / "tuning.json").write_text(json.dumps(told))
    (folder / CLAIMS).write_text(QUESTION + (folder / CLAIMS).read_text())
    Pages(folder, Page.read(folder)).write(pages)
    grid = (pages / "tiny.md").read_text()
    first, second = grid.index("## tuning\n"), grid.index("## tuning again\n")
    assert "| `smoe` | 2 |" in grid[first:second]
    assert "| `ahead` | 2 |" in grid[second:]
    assert "`new`" not in grid, "the grid has no such row"
    assert {file.name for file in pages.iterdir()} == {"tiny.md", "index.md"}


def test_a_second_choice_of_rates_is_of_the_same_settings(tmp_path: Path) -> None:
    folder = again(tmp_path)
    text, file = (folder / CLAIMS).read_text(), folder / "again" / "comparison.json"
    (folder / CLAIMS).write_text(text.replace('again = "again"', 'again = "agian"'))
    with pytest.raises(RunError, match=r"grid 'tiny': again='agian'.*again"):
        Page.read(folder)
    (folder / CLAIMS).write_text(text.replace("[grids.again]", "[grids.others]"))
    with pytest.raises(RunError, match=r"grid 'tiny': again='again'"):
        Page.read(folder)
    (folder / CLAIMS).write_text(text)
    plan = json.loads(file.read_text())
    file.write_text(json.dumps({**plan, "settings": {**plan["settings"], "steps": 7}}))
    with pytest.raises(RunError, match="grid 'tiny': again has other settings"):
        Page.read(folder)


def test_commands_of_the_page_of_claims_are_understood() -> None:
    told = tomllib.loads((RECORDS / CLAIMS).read_text())
    given = [*(one.get("test", "") for one in told["claims"]), *(one["command"] for one in told["grids"].values())]
    commands = [one for one in given if one.startswith("pointsman ")]
    assert commands
    for command in commands:
        _, verb, *words = shlex.split(re.split(r" \(about | && ", command)[0])
        values = importlib.import_module(f"pointsman_lab.cli.{verb}").parser().read(words)
        if verb == "compare" and not values.task:
            run_config(values, "smoe")
            for router in {*(values.routers or ())} - BASELINES.keys():
                MoE(8, 8, num_experts=8, top_k=2, router=router, vocab_size=8)
