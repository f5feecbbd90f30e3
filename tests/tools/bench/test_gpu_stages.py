"""The stages that measure a GPU: a dry run on a CPU, with sizes that mean nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu"


def stages(out: Path, *names: str, limit: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *names, "--device", "cpu", "--tiny", "--out", str(out)]
    return subprocess.run(
        [*command, "--limit", str(limit)], capture_output=True, text=True, timeout=580, check=False
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_two_stages(tmp_path: Path) -> None:
    ended = stages(tmp_path, "facts", "micro")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["facts", "micro"]
    assert all(" done " in line for line in lines[1:-1])
    for name, figure in (("facts", "copy_GB_per_s"), ("micro", "bmm_1025_columns_ms")):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found[figure] > 0
        assert found["tiny"]


def test_a_stage_at_its_limit_does_not_stop_the_next(tmp_path: Path) -> None:
    ended = stages(tmp_path, "facts", "facts", limit=0.05)
    assert ended.stdout.count("stopped at its limit") == 2


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    ended = stages(tmp_path, "fact")
    assert ended.returncode == 2
    assert "unknown stage 'fact'" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["tests", "layer", "steps", "run"])
def test_the_other_stages(name: str, tmp_path: Path) -> None:
    ended = stages(tmp_path, name)
    assert ended.returncode == 0, (tmp_path / f"{name}.log").read_text()
