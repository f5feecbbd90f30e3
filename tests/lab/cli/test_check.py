"""`pointsman check`: a verdict a line, exit code 1 where one does not hold, one line for a mistake."""

import json
from pathlib import Path

import pytest

from pointsman_lab.cli.main import main

STEP = """
import torch

def step(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    optimizer.step()
"""


def test_a_step_of_ones_own_and_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(STEP)
    assert main(["check", "mine.py:step", "--lines", "accumulation,top-k,clip norm", "--out", "found"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "mine.py:step, balance: own"
    assert [line.split()[:2] for line in told[1:3]] == [["accumulation", "yes"], ["top-k", "NO"]]
    assert "takes no max_norm" in told[3]
    assert told[4] == "top-k: of Mixtral's own loss, not of your step; see --balance pointsman"
    rows = json.loads(Path("found/check.json").read_text())
    assert [row["holds"] for row in rows] == [True, False, None]
    assert "| mine.py:step | own | yes | **no** | - |" in Path("found/check.md").read_text()


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["trainr"], "did you mean 'trainer'?"),
        (["loop", "--balance", "ours"], "allowed: own, pointsman"),
        (["loop", "--lines", "topk"], "did you mean 'top-k'?"),
        (["loop", "--device", "cuda"], "checks run on a CPU"),
    ):
        assert main(["check", *words]) == 2
        error = capsys.readouterr().err.strip()
        assert told in error
        assert "\n" not in error
