"""The results: pages are what the records give, and few and short enough to be read."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pointsman import MoE
from pointsman._errors import RunError
from pointsman.routers.frame.entries import BASELINES
from pointsman_lab.cli.runs import run_config
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


def test_a_claims_base_may_be_of_another_grid(tmp_path: Path) -> None:
    folder = invented(tmp_path)
    shutil.copytree(folder / "tiny", folder / "other")
    file = folder / "other" / "comparison.json"
    tuned = {"behind": {"row": "smoe", "learning_rate": "0.001"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), "tuned": tuned}))
    grids = '[grids.other]\ncommand = "pointsman compare"\nfamily = "main"\n[families.main]\nseeds = 3\n'
    (folder / CLAIMS).write_text(PAGE + grids + claim("ahead") + claim("ahead", base_grid="other"))
    here, other = Page.read(folder).tested
    assert other.test == "`tiny`: `ahead` against `behind` of `other`, quality, k = 1"
    assert min(mine - its for mine, its in zip(here.values, other.values, strict=True)) > 0, "behind is worse than smoe"
    (folder / CLAIMS).write_text(PAGE + grids.replace("= 3", "= 12") + claim("ahead", base_grid="other"))
    assert Page.read(folder).tested[0].figure == "-", "nobody looks before all seeds of that grid are there"
    plan = json.loads(file.read_text())
    file.write_text(json.dumps({**plan, "settings": {**plan["settings"], "steps": 7}}))
    for wrong, message in (
        (claim("ahead", base_grid="other"), "tiny and other have other settings: no pairs"),
        (claim("ahead", base_grid="othre"), "unknown grid 'othre'"),
        (claim("ahead", measure="", base_grid="other"), "base_grid='other' needs a measure"),
    ):
        (folder / CLAIMS).write_text(PAGE + grids + wrong)
        with pytest.raises(RunError, match=message):
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
