"""Runs and comparisons under attack, from the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman_lab.cli.main import main
from pointsman_lab.data.vocabulary import Vocabulary
from pointsman_lab.finetuning import Finetuning, finetune
from pointsman_lab.progress import Quiet
from pointsman_lab.recipes import preset
from pointsman_lab.report import write_report
from pointsman_lab.tasks.attacks.attacks import run_under_attack
from pointsman_lab.tasks.attacks.table import Attack
from pointsman_lab.training.compare import Plan, compare
from pointsman_lab.training.run import load_run
from pointsman_lab.training.trainer import train

SMALL = {
    "model.dim": 16, "model.num_layers": 2, "model.num_experts": 4, "model.hidden_dim": 16, "model.num_heads": 2,
    "model.head_dim": 8, "batch_size": 4, "eval_tokens": 512, "eval_batch_size": 4, "validate_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("robust")
    (folder / "text.txt").write_text("A film was good, the play was bad. \n" * 800)
    config = preset("tiny", data=str(folder / "text.txt"), steps=4).with_overrides(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        compare(Plan(config, ("smoe", "dense"), (0,)), folder / "runs", progress=Quiet())
    return folder / "runs"


@pytest.fixture(scope="module")
def finetuned(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    rows = ["text,label", *(f"the film was {'good,1' if i % 2 else 'bad,0'}" for i in range(40))]
    for part in ("train", "valid", "test"):
        kept = rows[:31] if part == "valid" else rows
        (folder / f"{part}.csv").write_text("\n".join(kept) + "\n")
    out = folder / "run"
    finetune(comparison / "runs/smoe/seed-0", Finetuning(str(folder), steps=2, settings={"batch_size": 8}), out=out)
    return out


def test_a_language_model_under_a_sweep(comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = comparison / "runs/smoe/seed-0"
    clean = json.loads((run / "evaluation.json").read_text())["results"]
    arguments = ["evaluate", str(run), "--attack", "word", "--attack-rate", "0.025,0.1", "--out", str(tmp_path)]
    assert main([*arguments, "--device", "cpu"]) == 0
    [file] = tmp_path.glob("attacks-word-*-test.json")
    record = json.loads(file.read_text())
    assert len(record["results"]) == 3 * len(clean)
    for one, other in zip(clean, record["results"][: len(clean)], strict=True):
        assert other["nats"] == pytest.approx(one["nats"], rel=1e-6)  # the clean row is the run's own evaluation
    attacked = record["results"][len(clean) :]
    assert [row["attack"]["rate"] for row in attacked] == [0.025] * len(clean) + [0.1] * len(clean)
    for row in attacked:
        assert row["attack"]["chosen"] == round(row["attack"]["rate"] * row["attack"]["candidates"])
    assert [change["attack"]["rate"] for change in record["routing"]] == [0.025, 0.1]
    shown = capsys.readouterr().out
    assert "10 % of the words become AAA" in shown
    before = file.read_text()
    assert main([*arguments, "--device", "cpu"]) == 0
    assert file.read_text() == before  # deterministic
    assert main([*arguments, "--device", "cpu", "--attack-seed", "1"]) == 0
    assert file.read_text() != before


def test_a_folder_of_records_gives_no_run_the_figures_of_another(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, retrained, out = comparison / "runs/smoe/seed-0", tmp_path / "run", tmp_path / "out"
    shutil.copytree(run, retrained)

    def under_attack(path: Path) -> bool:
        """Whether the file was made anew; its clean figures are those of the run's own evaluation."""
        assert main(["evaluate", str(path), "--attack", "word", "--out", str(out), "--device", "cpu"]) == 0
        [file] = out.glob("*.json")
        found = [row["nats"] for row in json.loads(file.read_text())["results"] if not row.get("attack")]
        own = [row["nats"] for row in json.loads((path / "evaluation.json").read_text())["results"]]
        assert found == pytest.approx(own, rel=1e-6)
        return "is made anew: its weights, text or settings were others" in capsys.readouterr().err

    assert not under_attack(run)
    assert not under_attack(retrained), "the same weights"
    assert under_attack(comparison / "runs/dense/seed-0")
    assert under_attack(retrained)
    shutil.rmtree(retrained)
    train(load_run(run).config.with_overrides({"seed": 1}), retrained)
    assert under_attack(retrained)


def test_a_sweep_goes_on_with_other_words_for_the_same(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sweep(rate: str, *words: str) -> set[float]:
        """The rates that the file has then."""
        run = ["evaluate", str(comparison / "runs/smoe/seed-0"), "--attack", "word", "--attack-rate", rate]
        assert main([*run, *words, "--out", str(tmp_path), "--device", "cpu"]) == 0
        record = json.loads(next(tmp_path.glob("*.json")).read_text())
        return {row["attack"]["rate"] for row in record["results"] if row.get("attack")}

    monkeypatch.chdir(comparison.parent)
    assert sweep("0.05", "--top-k", "1,4") == {0.05}
    assert sweep("0.1", "--top-k", "4,1") == {0.05, 0.1}
    assert sweep("0.2", "--top-k", "1,4", "--data", "./text.txt") == {0.05, 0.1, 0.2}
    assert "is made anew" not in capsys.readouterr().err
    [file] = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    del record["asked"]
    file.write_text(json.dumps(record))
    assert sweep("0.1", "--top-k", "1,4") == {0.1}
    assert f"{file} is made anew" in capsys.readouterr().err, "a record of before says not what it is of"


def test_what_another_process_adds_meanwhile_stays(
    comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["evaluate", str(comparison / "runs/smoe/seed-0"), "--attack", "word", "--out", str(tmp_path)]

    def another_is_faster(*arguments: Any, **named: Any) -> dict[str, Any]:
        monkeypatch.setattr("pointsman_lab.tasks.attacks.attacks.run_under_attack", run_under_attack)
        assert main([*run, "--attack-rate", "0.1,0.2"]) == 0
        return run_under_attack(*arguments, **named)

    monkeypatch.setattr("pointsman_lab.tasks.attacks.attacks.run_under_attack", another_is_faster)
    assert main([*run, "--attack-rate", "0.2,0.3"]) == 0
    [file] = tmp_path.glob("attacks-word-*-test.json")
    record = json.loads(file.read_text())
    assert [attack["rate"] for attack in record["asked"]["attacks"]] == [0.1, 0.2, 0.3]
    assert [change["attack"]["rate"] for change in record["routing"]] == [0.1, 0.2, 0.3]
    rates = [row.get("attack", {}).get("rate") for row in record["results"] if row["top_k"] == 1]
    assert rates == [None, 0.1, 0.2, 0.3]


def test_no_evaluation_begins_that_cannot_be_written(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path) -> None:
        raise RunError(f"{folder}: no permission")

    monkeypatch.setattr("pointsman_lab.cli.evaluate.check_writable", refused)
    run = comparison / "runs/smoe/seed-0"
    for more in ([], ["--attack", "word"]):
        assert main(["evaluate", str(run), *more]) == 2
        assert capsys.readouterr().err == f"pointsman: {run}: no permission\n"


def test_a_comparison_under_attack(comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(comparison), "--attack", "word", "--attack-rate", "0.05", "--top-k", "1,4"]
    assert main([*arguments, "--out", str(tmp_path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for words in ("clean", "5 % of the words become AAA, all targets count", "attacked targets: count", "Paired"):
        assert words in shown
    assert {path.suffix for path in tmp_path.glob("attack-word-*-test.*")} == {".txt", ".csv", ".md", ".tex"}
    page = write_report(comparison, tmp_path).read_text()
    assert 'id="attack-word-' in page
    assert "5 % of the words become AAA, all targets count: " in page
    [table] = tmp_path.glob("*.csv")
    lines = table.read_text().splitlines()
    assert len(lines) == 1 + 2 * 2
    assert lines[0].startswith("condition,router,metric")
    records = list(comparison.glob("runs/*/seed-0/attacks-word-*-test.json"))
    assert len(records) == 2
    times = [path.stat().st_mtime_ns for path in records]
    assert main([*arguments, "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert [path.stat().st_mtime_ns for path in records] == times  # done already
    settings = comparison / "runs/smoe/seed-0/config.json"
    before = settings.read_text()
    settings.write_text(before.replace('"eval_tokens": 512', '"eval_tokens": 256'))
    unlike = "; rows differ in tokens: their figures are not comparable"
    try:
        assert unlike not in table.with_suffix(".txt").read_text()
        assert main([*arguments, "--out", str(tmp_path), "--device", "cpu"]) == 0
        assert unlike in table.with_suffix(".txt").read_text()
    finally:
        settings.write_text(before)
    again = {
        path.parent.parent.name for path, time in zip(records, times, strict=True) if path.stat().st_mtime_ns != time
    }
    assert again == {"smoe"}  # whose protocol is another one now
    assert main([*arguments, "--out", str(tmp_path), "--device", "cpu"]) == 0
    cells = {line for line in table.read_text().splitlines() if "5 % of the words" in line}
    for more in (["--attack-rate", "0.1"], ["--attack-rate", "0.1,0.05", "--attack-seed", "3"]):  # the first ones stay
        assert main([*arguments, *more, "--out", str(tmp_path), "--device", "cpu"]) == 0
    lines = table.read_text().splitlines()
    assert cells < set(lines)
    assert len(lines) == 1 + 2 * 5
    assert sum("(seed 3)" in line for line in lines) == 4
    capsys.readouterr()
    assert main([*arguments, "--top-k", "4", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert len(table.read_text().splitlines()) == 1 + 2 * 2, "other k: made anew"
    assert capsys.readouterr().err.count("is made anew: its weights, text or settings were others") == 2


def test_changed_data_are_not_read_under_the_name_of_the_run_s_own(
    comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, run = comparison.parent / "text.txt", comparison / "runs/smoe/seed-0"
    before = text.read_text()
    text.write_text(before.replace("good", "doog"))
    few = ["--out", str(tmp_path), "--device", "cpu"]
    asked = [["evaluate", str(run)], ["diagnose", str(run)], ["evaluate", str(comparison), "--attack", "word"]]
    try:
        for words in asked:
            assert main([*words, *few]) == 2
            told = capsys.readouterr().err
            assert f"{run}: its data here are not those of its training: files are other or missing" in told
            assert f"with --data {text} they are read as other data" in told
        assert not list(tmp_path.iterdir())
        assert main([*asked[0], *few, "--data", str(text)]) == 0
        assert replace(load_run(run), data=None).task().name, "a checkpoint without a fingerprint"
    finally:
        text.write_text(before)


def test_a_part_that_is_not_read_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tmp_path / "wikitext-2", tmp_path / "run"
    data.mkdir()
    for part, lines in (("train", 900), ("valid", 90), ("test", 90)):
        text = "".join(f" the {line} th wagon leaves on track {line * line % 7} .\n" for line in range(lines))
        (data / f"wiki.{part}.tokens").write_text(text)
    config = preset("tiny", data=f"{data}:level=word", steps=2).with_overrides({**SMALL, "eval_tokens": 256})
    train(config, run)
    asked = ["evaluate", str(run), "--device", "cpu", "--out", str(tmp_path / "out")]
    valid = data / "wiki.valid.tokens"
    text = valid.read_text()
    valid.unlink()
    assert main(asked) == 2, "the training part is there: another one's absence is told"
    assert "files are other or missing" in capsys.readouterr().err
    (data / "wiki.train.tokens").unlink()
    for content in (None, text):
        if content:
            valid.write_text(content)
        assert main(asked) == 0
        assert main([*asked, "--attack", "word", "--attack-rate", "0.1"]) == 0
    before, after = (json.loads(next(place.glob("evaluation*.json")).read_text()) for place in (run, tmp_path / "out"))
    assert [row["nats"] for row in after["results"]] == [row["nats"] for row in before["results"]]


def test_the_routing_changes_in_the_precision_of_the_run(comparison: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(comparison / "runs/smoe/seed-0")
    run = replace(run, config=run.config.with_overrides({"precision": "bfloat16"}))
    monkeypatch.setattr("pointsman_lab.tasks.attacks.attacks.evaluate", lambda *_, **__: [])
    seen: set[bool] = set()
    for _, router in named_routers(run.model):
        router.register_forward_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    run_under_attack(run, [Attack(0.1)], tokens=64)
    assert seen == {True}


def test_a_task_of_another_package_is_not_attacked() -> None:
    config = SimpleNamespace(model=SimpleNamespace(family="of-another-package"), data="digits.txt")
    run: Any = SimpleNamespace(path="runs/one", config=config, vocabulary=Vocabulary.of_bytes(b"0123456789"))
    with pytest.raises(RunError, match=r"runs/one learned digits.txt: this is for language models"):
        run_under_attack(run, [Attack(0.1)])


def test_a_classifier_is_evaluated_on_a_part_and_not_attacked(
    finetuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["evaluate", str(finetuned), "--out", str(tmp_path), "--device", "cpu", "--top-k", "1"]
    assert main([*asked, "--split", "valid"]) == 0
    [file] = tmp_path.glob("evaluation-*-valid.json")
    record = json.loads(file.read_text())
    assert {(row["split"], row["examples"]) for row in record["results"]} == {("valid", 30)}
    assert record["protocol"]["split"] == "valid"
    assert main([*asked, "--attack", "word"]) == 2
    assert "is a fine-tuned run; allowed are language models" in capsys.readouterr().err
    assert main(["evaluate", str(finetuned), "--data", "stdlib"]) == 2
    assert "--data has no effect on fine-tuned runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attack", "word", "--attack-rate", "1.5"], "allowed are numbers from 0 to 1"),
        (["--attack", "word", "--attack-rate", "x"], "allowed are numbers from 0 to 1"),
        (["--attack", "char"], "'char'"),
        (["--attack", "word", "--top-k", "9"], "allowed are whole numbers from 1 to 4"),
    ],
)
def test_mistakes(comparison: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(comparison / "runs/smoe/seed-0"), "--device", "cpu", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pointsman")]
    assert len(lines) == 1
    assert message in lines[0]
