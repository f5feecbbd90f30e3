"""The results: pages are what the records give, and every figure of README with two decimals stands on the page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
FIGURE = r"\d+\.\d{2,3}(?: ± \d+\.\d{2,3})?"


def words(file: Path) -> str:
    return " ".join(file.read_text(encoding="utf-8").split())


def test_the_figures_of_readme_stand_on_the_results_page() -> None:
    shown = words(ROOT / "README.md").split("## What it found")[1].split("## Install")[0]
    page = words(RESULTS / "index.md")
    figures = re.findall(FIGURE, shown)
    assert len(figures) > 10
    found = [figure for figure in figures if re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", page)]
    assert found == figures


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_are_what_the_records_give(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "results"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")  # claims about time read it
    subprocess.run([sys.executable, "-m", "tools.results", str(folder)], cwd=ROOT, check=True, timeout=500)
    for page in ("index.md", "claims.md", "trends.md", *(str(f.relative_to(RESULTS)) for f in RESULTS.glob("*/*.md"))):
        assert (folder / page).read_text() == (RESULTS / page).read_text(), page
