"""`verify`: 0 for what is whole; 1, and a line with its file for each fault; 2 for no folder of ours."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pointsman.traces import RoutingTrace
from pointsman_lab.cli.main import main
from pointsman_lab.runs.compact import write_record
from tests.lab.report.fixtures import write_comparison, write_finetuning, write_run


def verified(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, list[str]]:
    code = main(["verify", str(folder)])
    told = capsys.readouterr()
    assert "Traceback" not in told.out + told.err
    return code, (told.out + told.err).splitlines()


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "runs" / "smoe" / "seed-0", tmp_path / "run"))


def test_a_run_a_comparison_a_checkpoint_and_a_trace_are_whole(
    trained: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = RoutingTrace({"a": torch.zeros(3, 1, dtype=torch.int16)}, {"a": 2}, torch.tensor([3])).save(tmp_path / "t")
    for folder, kind in ((trained, "a comparison"), (run, "a run"), (run / "checkpoints/step-6", "a checkpoint"),
                         (trace, "a routing trace")):  # fmt: skip
        code, lines = verified(capsys, folder)
        assert (code, len(lines)) == (0, 1), lines
        assert f": {kind}, " in lines[0]
        assert lines[0].endswith("whole")
    assert ", 1 files: " in lines[0]
    code, lines = verified(capsys, tmp_path / "nothing")
    assert (code, lines) == (2, [f"pointsman: {tmp_path / 'nothing'}: no such folder"])
    assert verified(capsys, tmp_path)[0] == 2
    for file in (run / "config.json", next(run.rglob("*.safetensors"))):
        line = f"pointsman: {file}: no routing trace; of anything else give the folder"
        assert verified(capsys, file) == (2, [line])
    trace.write_bytes(trace.read_bytes()[:-1])
    assert verified(capsys, trace)[0] == 1


def test_exported_weights_are_no_run_that_is_not_finished(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "mine")]) == 0
    capsys.readouterr()
    assert verified(capsys, tmp_path / "mine") == (0, [f"{tmp_path / 'mine'}: exported weights, 3 files: whole"])
    weights = tmp_path / "mine" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert verified(capsys, tmp_path / "mine")[0] == 1


def test_a_fine_tuning_that_is_not_finished_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write_comparison(tmp_path / "mine", ["smoe"], [0], steps=4)
    tuned = write_finetuning(out / "runs/r0/seed-0", "sst2", "smoe", 0, metric=0.7)
    about = {"task": "sst2", "balance": None, "pooling": "last", "head_dropout": 0.1, "from_scratch": False}
    (tuned / "finetune.json").write_text(json.dumps({"format": 1, **about, "freeze": [], "classes": ["a", "b"]}))
    assert verified(capsys, out)[1][0].endswith("whole")
    (tuned / "evaluation.json").unlink()
    for folder in (out, out / "runs/r0/seed-0", tuned):
        code, lines = verified(capsys, folder)
        assert (code, lines[0]) == (1, f"{tuned}: not finished: smoe (seed 0)")


def test_figures_and_settings_that_contradict_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write_comparison(tmp_path / "mine", ["smoe", "xmoe"], [0, 1], steps=4)
    record, run = write_record(out), out / "runs/r0/seed-1"
    assert record
    assert verified(capsys, out)[0] == 0
    kept = (run / "metrics.jsonl").read_bytes()
    shutil.copy(out / "runs/r0/seed-0/metrics.jsonl", run)
    assert verified(capsys, out)[1][0] == f"{run / 'metrics.jsonl'}: not what record.jsonl has of this run"
    (run / "metrics.jsonl").write_bytes(kept)
    file = run / "evaluation.json"
    evaluation = json.loads(file.read_text())
    evaluation["results"][0]["value"] -= 0.5
    file.write_text(json.dumps(evaluation))
    code, (value, recorded, _) = verified(capsys, out)
    assert (code, value.startswith(f"{file}: a value of ")) == (1, True)
    assert recorded == f"{file}: not what record.jsonl has of this run"
    evaluation["results"][0]["nats"] -= 0.5 * math.log(2)
    file.write_text(json.dumps(evaluation))
    assert verified(capsys, out)[1][:-1] == [recorded]
    record.unlink()
    assert verified(capsys, out)[0] == 0
    plan = json.loads((out / "comparison.json").read_text())
    tuned = {"xmoe": {"row": "xmoe", "learning_rate": "1e-3", "router_lr_scale": "4"}}
    (out / "comparison.json").write_text(json.dumps({**plan, "tuned": tuned}))
    assert verified(capsys, out)[0] == 0
    for changed, said in (
        ({**plan, "settings": {**plan["settings"], "steps": 8}}, "r0/seed-0: steps is 4 there, 8 in the comparison"),
        (
            {**plan, "tuned": {"xmoe": {"learning_rate": "5e-1"}}},
            "r1/seed-0: learning_rate is 0.001 there, 0.5 in the comparison",
        ),
    ):
        (out / "comparison.json").write_text(json.dumps(changed))
        assert said in verified(capsys, out)[1][0]
        for words in (["share", str(out)], ["submit", str(out), "--router", "smoe"]):
            assert main([*words, "--out", str(tmp_path / "packed")]) == 2
            assert said in capsys.readouterr().err
        assert main(["report", str(out), "--map", "none"]) == 0
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("kept", "last"), [("", 0), ('{"kind": "train", "step": 3, "loss": 4.0}\n', 3)])
def test_metrics_that_end_before_the_run_does(
    kept: str, last: int, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole lines, as a tool leaves them that cuts at a line's end."""
    (run / "metrics.jsonl").write_text(kept)
    code, told = verified(capsys, run)
    assert (code, told[0]) == (1, f"{run / 'metrics.jsonl'}: it ends at step {last} of 6: lines are lost")


def cut(run: Path) -> Path:
    file = run / "checkpoints/step-6/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return file.parent


def other_model(run: Path) -> Path:
    config = json.loads((run / "config.json").read_text())
    config["model"]["num_experts"] *= 2
    (run / "config.json").write_text(json.dumps(config))
    return run / "checkpoints/step-6"


def linked(run: Path) -> Path:
    (run.parent / "elsewhere").mkdir()
    (run / "finetune").symlink_to(run.parent / "elsewhere")
    return run / "finetune"


def piped(run: Path) -> Path:
    os.mkfifo(run / "pipe")
    return run / "pipe"


def a_folder(run: Path) -> Path:
    (run / "evaluation-old.json").mkdir()
    return run / "evaluation-old.json"


def row_lost(run: Path) -> Path:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    return run / "metrics.jsonl"


def no_sample(run: Path) -> Path:
    (run / "explorer.json").write_text('{"format": 1}')
    return run / "explorer.json"


def other_shape(run: Path) -> Path:
    (run / "evaluation.json").write_text('{"results": [1]}')
    return run / "evaluation.json"


def other_vocabulary(run: Path) -> Path:
    (run / "vocabulary.json").write_text('{"level": "byte", "symbols": [1, 2]}')
    return run / "vocabulary.json"


def no_settings(run: Path) -> Path:
    (run / "finetune/x/seed-0/checkpoints").mkdir(parents=True)
    return run / "finetune/x/seed-0"


def no_evaluation(run: Path) -> Path:
    (run / "evaluation.json").unlink()
    return run


@pytest.mark.skipif(os.name != "posix", reason="links and pipes of a POSIX system")
@pytest.mark.parametrize(
    "damage",
    [
        cut,
        other_model,
        linked,
        piped,
        a_folder,
        row_lost,
        no_sample,
        other_shape,
        other_vocabulary,
        no_evaluation,
        no_settings,
    ],
)
def test_a_fault_is_a_line_with_the_files_name(
    run: Path, damage: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = damage(run)
    code, lines = verified(capsys, run)
    assert code == 1
    assert any(str(place) in line for line in lines[:-1]), lines
    assert lines[-1].endswith("would be refused or are missing")


def test_what_no_reader_foresaw_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pointsman_lab.report.page.render", lambda _: {}["protocol"])
    run = write_run(tmp_path / "run", steps=4)
    assert verified(capsys, run)[1][0] == f"{run}: damaged: KeyError('protocol')"


def test_a_record_and_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe", "xmoe"), seeds=(0,))
    record = write_record(out)
    assert record
    shutil.rmtree(out / "runs")
    assert verified(capsys, out)[0] == 0
    assert not (out / "runs").exists()
    record.write_text(record.read_text() + "{\n")
    code, lines = verified(capsys, out)
    assert code == 1
    assert f"{record}, line 3: " in lines[0]
    model = tmp_path / "step-b"  # called as our checkpoints are
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "mixtral"}')
    assert verified(capsys, model)[1][0] == f"{model}: no weights"
    index, shard = model / "model.safetensors.index.json", model / "model-1.safetensors"
    index.write_text(json.dumps({"weight_map": {"a": shard.name, "b": "model-2.safetensors"}}))
    save_file({"a": torch.zeros(1)}, shard)
    code, lines = verified(capsys, model)
    assert (code, len(lines), lines[0]) == (1, 2, f"{index}: model-2.safetensors is missing")
    index.write_text("{}")
    assert verified(capsys, model)[1][0] == f"{index}: no weight_map"
    index.unlink()
    other = model / "pytorch_model.bin.index.json"  # of a format that nobody reads beside safetensors
    other.write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    assert verified(capsys, model)[0] == 0
    shard.unlink()
    assert verified(capsys, model)[1][0] == f"{other}: pytorch_model-1.bin is missing"
    other.unlink()
    save_file({"a": torch.zeros(1)}, model / "model-00001-of-00002.safetensors")
    assert verified(capsys, model)[1][0] == f"{model}: {index.name} is missing, which lists its parts"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model-00001-of-00002.safetensors")}))
    assert verified(capsys, model)[1][0] == f"{index}: model-00001-of-00002.safetensors lacks b"
    index.write_text(json.dumps({"weight_map": {"a": "../else.safetensors"}}))
    assert verified(capsys, model)[1][0] == f"{index}: ../else.safetensors is in another folder"
    index.unlink()
    (model / "model-00001-of-00002.safetensors").unlink()
    (model / "training_args.bin").write_bytes(b"x")
    assert verified(capsys, model)[1][0] == f"{model}: no weights"
    (model / "model.safetensors").write_bytes(b"x")
    code, lines = verified(capsys, model)
    assert (code, len(lines)) == (1, 2)
    assert "a Hugging Face model" in lines[1]
    assert verified(capsys, write_run(tmp_path / "alone"))[0] == 0


def test_an_exam_that_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"version": 1, "rows": ["mine"], "tasks": ["clusters"], "seeds": 8}
    for changed, told in (({}, "not finished: mine, task clusters"), ({"version": 99}, "version 99 of the exam")):
        (tmp_path / "exam.json").write_text(json.dumps({**plan, **changed}))
        assert told in verified(capsys, tmp_path)[1][0]
