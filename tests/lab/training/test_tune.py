"""`compare --tune`: choices, halving, and a comparison whose rows have settings of their own."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.runs.comparison import write_plan
from pointsman_lab.training.compare import Plan
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.tune import SEEDS, _table, choices, edges, spec_of, takes, tuned
from tests.lab.cli.test_compare import TEXT, arguments


class Tune:
    """tune(routers, *values) -> the plan; the plans of its rounds, whose figures are all alike, are in `rounds`."""

    def __init__(self, settings: Callable[..., RunConfig], out: Path) -> None:
        self.settings, self.out = settings, out
        self.rounds: list[Plan] = []
        self.notes: list[str] = []

    def __call__(self, routers: str, *told: str, **changes: str) -> Plan:
        self.rounds.clear()
        self.notes.clear()
        plan = Plan(self.settings(**changes), tuple(routers.split(",")), (0,))
        train, add = lambda one, _: self.rounds.append(one), self.notes.append
        return tuned(plan, told, self.out, train, lambda _: None, lambda _: True, add)


@pytest.fixture
def tune(settings: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    run = SimpleNamespace(results=lambda split: {4: {"metric": "bits_per_character", "value": 1.0}})
    done = SimpleNamespace(runs=defaultdict(lambda: run))
    monkeypatch.setattr("pointsman_lab.training.tune.read_comparison", lambda folder: done)
    return Tune(settings, tmp_path / "out")


def write(plan: Plan, out: Path) -> None:
    write_plan(
        out, settings=plan.settings(), routers=plan.routers, seeds=plan.seeds, command="", data="0",
        tuned=plan.tuned,
    )  # fmt: skip


def test_choices_and_specs(settings: Callable[..., RunConfig]) -> None:
    assert choices(["learning_rate=5e-4..4e-3"]) == [
        (("learning_rate", value),) for value in ("0.0005", "0.001", "0.002", "0.004")
    ]
    both = choices(["learning_rate=1e-3,2e-3", "router_lr_scale=1,4"])
    assert len(both) == 4
    assert choices(["learning_rate=1e-3, 2e-3", "router_lr_scale= 1 ,4"]) == both
    assert [spec_of("xmoe+similarity", one) for one in both[:2]] == ["xmoe+similarity", "xmoe:lr_scale=4+similarity"]
    assert choices(["learning_rate=1e-3..3e-3"]) == [(("learning_rate", value),) for value in ("0.001", "0.002")]
    assert spec_of("similarity:tau=2", both[1]) == "smoe:lr_scale=4+similarity:tau=2"
    assert spec_of("similarity:tau=2", both[0]) == "similarity:tau=2"
    assert spec_of("smoe|xmoe@loss-free+similarity", both[1]) == (
        "smoe:lr_scale=4|xmoe@loss-free:lr_scale=4+similarity"
    )
    model = settings(**{"model.num_experts": "8"}).model
    for row in ("smoe", "smoe|xmoe", "hyperrouter@loss-free", "stable", "loss-free:groups=8:kept=4"):
        assert takes(row, both[1], model)
    for row in ("dense", "dense-matched", "smoe-dropout", "frozen-scaled", "hash", "thor"):
        assert not takes(row, both[1], model)
        assert takes(row, both[0], model)
    assert choices(["warmup_steps=500000..2000000"])[-1] == (("warmup_steps", "2000000"),)
    for wrong in ("learning_rate", "learning_rate=", "learning_rate=1", "learning_rate=2..1", "learning_rate=1,,2",
                  "learning_rate=1,1,2"):  # fmt: skip
        with pytest.raises(RunError, match=r"allowed is KEY=A,B,C or KEY=LOW\.\.HIGH"):
            choices([wrong])
    assert "inf" not in _table("smoe", {"a=1": [1.0, math.inf]}, "a=1", 8)
    with pytest.raises(RunError, match="a key is given twice"):
        choices(["a=1,2", "a=3,4"])
    told = edges({"learning_rate=1": [], "learning_rate=2": [], "learning_rate=4": []}, "learning_rate=4")
    assert told.startswith("\nlearning_rate=4 is at the edge")
    of = {f"train_top_k={k}": [] for k in ("1", "2", "1:2", "1-2", "N")}
    assert "train_top_k=2 is at the edge" in edges(of, "train_top_k=2")
    assert not edges(of, "train_top_k=N")


def test_rows_of_the_comparison_keep_their_settings_and_their_curves(tune: Tune, tmp_path: Path) -> None:
    plan = tune("smoe,xmoe", "router_lr_scale=4,8", "learning_rate=1e-3,2e-3")
    assert plan.routers == ("smoe:lr_scale=4", "xmoe:lr_scale=4")
    write(replace(plan, routers=("dense", *plan.routers)), tmp_path / "out")  # dense was trained without --tune
    curve = tmp_path / "out-tuning" / "tuning.json"
    before = curve.read_text()
    again = tune("smoe,dense,smoe:lr_scale=4", "router_lr_scale=4,8", "learning_rate=1e-3,2e-3")
    assert not tune.rounds
    assert tune.notes == ["dense: trained already, and so not tuned on these values"]
    assert again.routers == ("smoe:lr_scale=4", "dense")
    assert again.tuned == plan.tuned
    assert curve.read_text() == before
    more = tune("smoe,dense,switch", "router_lr_scale=1,8")
    assert {row for one in tune.rounds for row in one.routers} == {"switch", "switch:lr_scale=8"}
    assert more.routers == ("smoe:lr_scale=4", "dense", "switch")
    assert tune.notes == ["smoe, dense: trained already, and so not tuned on these values"]
    assert json.loads(curve.read_text())["curve"].keys() == {"smoe", "xmoe", "switch"}
    assert tune("smoe,xmoe,dense", "router_lr_scale=1,8", eval_split="valid").routers[-1] == "dense"
    with pytest.raises(RunError, match="batch_size is 4 there, 2 here"):
        tune("switch", "router_lr_scale=1,8", batch_size="2")
    assert not tune.rounds


def test_a_comparison_in_the_current_folder_is_tuned(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    tune.out = Path()
    assert tune("smoe", "learning_rate=1e-3,2e-3").routers == ("smoe",)
    assert (tmp_path / "out-tuning" / "tuning.json").is_file()


@pytest.mark.parametrize(
    "key",
    ["data", "tokenizer", "start_from", "seed", "steps", "model.router", "validate_every", "batch_size", "accumulation",
     "segment_length"],
)  # fmt: skip
def test_what_all_rows_share_is_refused(tune: Tune, key: str) -> None:
    with pytest.raises(RunError, match=rf"--tune {key}: all rows share it; use --set or its flag"):
        tune("smoe", f"{key}=3,4")


def test_a_wrong_value_is_refused_before_the_rounds(tune: Tune) -> None:
    for wrong in ("learning_rate=1e-3,abc", "clip_norm=1,-1"):
        with pytest.raises(RunError, match="allowed"):
            tune("smoe", wrong)
    assert not tune.rounds


def test_a_row_that_no_choice_fits_is_refused_before_the_rounds(tune: Tune) -> None:
    with pytest.raises(RunError, match="router_lr_scale: dense has no router whose rate can be scaled; give 1 among"):
        tune("smoe,dense", "router_lr_scale=2,4")
    assert not tune.rounds


def test_rows_that_may_become_the_same_are_refused_before_the_rounds(tune: Tune) -> None:
    told = "smoe and smoe:lr_scale=4 may both become smoe:lr_scale=4; leave one of them out"
    with pytest.raises(RunError, match=told):
        tune("smoe,xmoe,smoe:lr_scale=4", "router_lr_scale=1,4")
    assert not tune.rounds
    assert tune("smoe,smoe:lr_scale=4", "learning_rate=1e-3,2e-3").routers == ("smoe", "smoe:lr_scale=4")


def test_a_row_that_may_become_one_that_is_there_is_refused(tune: Tune, tmp_path: Path) -> None:
    write(Plan(tune.settings(), ("smoe:lr_scale=4",), (0,)), tmp_path / "out")
    with pytest.raises(RunError, match="smoe:lr_scale=4 and smoe may both become smoe:lr_scale=4"):
        tune("smoe,smoe:lr_scale=4", "router_lr_scale=1,4")


def test_the_last_round_is_of_three_seeds(tune: Tune, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(seed: int, rate: float) -> SimpleNamespace:  # the larger rate is better on the first seed alone
        value = 1.0 + (-rate if seed == SEEDS[0] else rate)
        return SimpleNamespace(results=lambda split: {4: {"metric": "bits_per_character", "value": value}})

    def done(folder: Path) -> SimpleNamespace:
        rate = float(folder.name.partition("learning_rate=")[2])
        return SimpleNamespace(runs={("smoe", seed): run(seed, rate) for seed in SEEDS})

    monkeypatch.setattr("pointsman_lab.training.tune.read_comparison", done)
    plan = tune("smoe", "learning_rate=0.1,0.2,0.4")
    assert [one.seeds for one in tune.rounds] == [SEEDS[:1]] * 5 + [SEEDS] * 2
    assert plan.tuned["smoe"]["learning_rate"] == "0.2", "of 0.2 and 0.4, the best two of the first seed"
    kept = json.loads((tmp_path / "out-tuning" / "tuning.json").read_text())
    assert kept["seeds"] == [*SEEDS]
    assert kept["curve"]["smoe"]["learning_rate=0.2"] == pytest.approx([0.8, 0.8, 1 + 0.2 / 3])


def test_half_of_the_choices_go_on_then_four_for_all_the_steps(tune: Tune) -> None:
    tune("smoe", f"learning_rate={','.join(map(str, range(1, 17)))}", steps="16")
    assert [one.base.steps for one in tune.rounds] == [4] * 16 + [8] * 8 + [16] * 4


def test_a_seed_of_the_choice_is_no_seed_of_a_result(tune: Tune, tmp_path: Path) -> None:
    plan = Plan(tune.settings(), ("smoe",), (0, 1002))
    with pytest.raises(RunError, match="--tune uses seed 1002, which is then no seed of a result"):
        tuned(plan, ["learning_rate=1,2"], tmp_path / "out", lambda *_: None, lambda _: None, lambda _: True)


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
    assert sorted(map(len, curve["smoe"].values())) == [1, 1, 1, 3, 3, 3], "six, the best three, at most four"
    assert sorted(map(len, curve["dense"].values())) == [1, 3, 3], "at the model's rate alone"
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("evaluation.json")}
    assert main(command) == 0
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.rglob("evaluation.json")}


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_choice_that_diverges_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: str) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT)
    more = ["--set", "clip_norm=0", "--set", "warmup_steps=1", "--train-top-k", "2", "--jobs", jobs, "--steps", "8"]
    command = [*arguments(text, out, routers="smoe,dense"), *more]
    assert main([*command, "--tune", "learning_rate=1e-3,1e9", "--names", "smoe=Plain"]) == 0
    shown = capsys.readouterr()
    assert "Plain, seed 1000" in shown.out
    assert "passed over: router smoe, seed 1000: step " in shown.err
    curve = json.loads((tmp_path / "out-tuning" / "tuning.json").read_text())["curve"]
    for row in ("smoe", "dense"):
        assert curve[row]["learning_rate=1e9"] == [None], "it is left behind"
        assert None not in curve[row]["learning_rate=1e-3"]
    plan = json.loads((out / "comparison.json").read_text())
    assert {one["learning_rate"] for one in plan["tuned"].values()} == {"1e-3"}
    assert main([*command[:-1], "4", "--out", str(tmp_path / "none"), "--tune", "learning_rate=1e8,1e9"]) == 2
    assert "--tune: smoe diverged at every choice (1 steps): name lower" in capsys.readouterr().err
