"""The results: pages are what the records give."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_are_what_the_records_give(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "results"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")  # claims about time read it
    subprocess.run([sys.executable, "-m", "tools.results", str(folder)], cwd=ROOT, check=True, timeout=500)
    for page in ("index.md", "claims.md", "trends.md", *(str(f.relative_to(RESULTS)) for f in RESULTS.glob("*/*.md"))):
        assert (folder / page).read_text() == (RESULTS / page).read_text(), page
