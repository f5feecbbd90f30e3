"""`compare --tune`: choices, halving, and a comparison whose rows have settings of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.training.tune import choices, edges, spec_of, takes
from tests.lab.cli.test_compare import TEXT, arguments


def test_choices_and_specs() -> None:
    assert choices(["learning_rate=5e-4..4e-3"]) == [
        (("learning_rate", value),) for value in ("0.0005", "0.001", "0.002", "0.004")
    ]
    both = choices(["learning_rate=1e-3,2e-3", "router_lr_scale=1,4"])
    assert len(both) == 4
    assert [spec_of("xmoe+similarity", one) for one in both[:2]] == ["xmoe+similarity", "xmoe:lr_scale=4+similarity"]
    assert [takes(row, both[1]) for row in ("smoe", "dense", "smoe-dropout")] == [True, False, False]
    assert takes("dense", both[0])
    for wrong in ("learning_rate", "learning_rate=", "learning_rate=1", "learning_rate=2..1", "learning_rate=1,,2"):
        with pytest.raises(RunError, match=r"allowed is KEY=A,B,C or KEY=LOW\.\.HIGH"):
            choices([wrong])
    with pytest.raises(RunError, match="a key is given twice"):
        choices(["a=1,2", "a=3,4"])
    told = edges({"learning_rate=1": [], "learning_rate=2": [], "learning_rate=4": []}, "learning_rate=4")
    assert told.startswith("\nlearning_rate=4 is at the edge")


@pytest.mark.slow
def test_each_row_gets_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    tune = ["--tune", "learning_rate=1e-4,1e-3,1e-2", "--tune", "router_lr_scale=1,4", "--train-top-k", "2"]
    command = [*arguments(text, out, *tune, routers="smoe,dense"), "--steps", "16"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "smoe, seed 1000" in shown
    assert shown.count("chosen") == 2
    plan = json.loads((out / "comparison.json").read_text())
    assert [plan["tuned"][router]["row"] for router in plan["routers"]] == ["smoe", "dense"]
    for router in plan["routers"]:
        [run] = out.glob(f"runs/{router.replace(':', ',')}/seed-*")
        config = json.loads((run / "config.json").read_text())
        assert config["learning_rate"] == float(plan["tuned"][router]["learning_rate"])
        assert config["seed"] == 0
    curve = json.loads((tmp_path / "out-tuning" / "tuning.json").read_text())["curve"]
    assert sorted(map(len, curve["smoe"].values())) == [1, 1, 1, 2, 3, 3], "six, the best three, the best two"
    assert sorted(map(len, curve["dense"].values())) == [1, 3, 3], "at the model's rate alone"
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("evaluation.json")}
    assert main(command) == 0
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("evaluation.json")}
