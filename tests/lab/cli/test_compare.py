"""`pointsman compare` as a user runs it, on a small text."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from pointsman.ops.kernels import using
from pointsman_lab.cli.export import model_folder
from pointsman_lab.cli.main import _Terminal, main
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.run import load_run

TEXT = "".join(f"the {i}th wagon leaves on track {i * i % 7}; the pointsman sets the points.\n" for i in range(900))
SMALL = [
    "--set", "model.dim=16", "--set", "model.num_heads=2", "--set", "model.head_dim=8", "--set", "model.hidden_dim=16",
    "--set", "model.num_experts=4", "--set", "batch_size=4", "--set", "segment_length=16", "--set", "memory_length=16",
    "--set", "eval_batch_size=4", "--set", "eval_segment_length=16", "--set", "valid_tokens=256",
    "--set", "log_every=1",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def arguments(text: Path, out: Path, *more: str, routers: str = "smoe,smoe-dropout,hyperrouter,dense") -> list[str]:
    flags = ["--routers", routers, "--data", str(text), "--steps", "6", "--eval-tokens", "512", "--out", str(out)]
    return ["compare", *flags, *SMALL, "--jobs", "1", *more]


def evaluations(out: Path) -> dict[str, float]:
    return {str(f.relative_to(out)): f.stat().st_mtime_ns for f in out.glob("runs/*/*/evaluation.json")}


@pytest.mark.slow
def test_a_comparison_from_nothing_to_another_row_and_seed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments(text, out)) == 0
    table = capsys.readouterr().out
    for word in ("smoe", "smoe-dropout", "hyperrouter", "dense", "k=1", "k=2", "k=4", "entropy", "bits per character"):
        assert word in table
    assert "nan" not in table
    for name in ("table.txt", "table.csv", "table.md", "table.tex", "report.html", "comparison.json"):
        assert (out / name).stat().st_size > 100
    page = (out / "report.html").read_text()
    assert "hyperrouter" in page
    first = evaluations(out)
    assert len(first) == 4

    losses = {}
    for router in ("smoe", "smoe-dropout"):
        rows = [json.loads(row) for row in (out / f"runs/{router}/seed-0/metrics.jsonl").read_text().splitlines()]
        losses[router] = next(row["loss"] for row in rows if row["kind"] == "train")
    # the same data and the same initial weights; both linear routers even start with the same draw
    assert losses["smoe"] == pytest.approx(losses["smoe-dropout"], abs=1e-6)

    assert main(arguments(text, out, routers="switch")) == 0
    again = evaluations(out)
    assert {key: again[key] for key in first} == first
    assert set(again) - set(first) == {"runs/switch/seed-0/evaluation.json"}
    assert "hyperrouter" in capsys.readouterr().out

    assert main(arguments(text, out, "--seeds", "2", routers="smoe")) == 0
    assert "±" in capsys.readouterr().out
    assert set(evaluations(out)) - set(again) == {"runs/smoe/seed-1/evaluation.json"}


@pytest.mark.slow
def test_other_settings_are_refused_and_another_evaluation_is_not(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments(text, out, routers="smoe")) == 0
    assert main(arguments(text, out, "--set", "learning_rate=0.5", routers="smoe")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "learning_rate" in error
    assert "0.5" in error
    assert main(arguments(text, out, "--top-k", "1,3", routers="smoe")) == 0
    assert "k=3" in capsys.readouterr().out
    results = json.loads((out / "runs/smoe/seed-0/evaluation.json").read_text())["results"]
    assert [result["top_k"] for result in results] == [1, 3]
    assert main(arguments(text, out, routers="smoe,dense")) == 0
    assert main(arguments(text, out, "--set", "eval_split=valid", routers="smoe,dense")) == 0, "one after another"
    evaluated = [json.loads((out / f"runs/{row}/seed-0/evaluation.json").read_text()) for row in ("smoe", "dense")]
    assert {result["split"] for one in evaluated for result in one["results"]} == {"valid"}
    capsys.readouterr()
    assert main(["evaluate", str(out / "runs/dense/seed-0"), "--top-k", "1,4", "--eval-tokens", "256"]) == 0
    assert "--top-k 1 has no effect: dense has one k, 4" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_on_other_data_or_evaluated_otherwise_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments(text, out, routers="smoe")) == 0
    assert main([*arguments(text, out, routers="switch"), "--eval-tokens", "256"]) == 2
    assert "eval_tokens is 512 there, 256 here" in capsys.readouterr().err
    assert main(arguments(text, out, routers="dense")) == 0
    command = json.loads((out / "comparison.json").read_text())["command"]
    assert "--routers smoe,dense " in command  # makes the whole table, not the last row alone
    text.write_text(TEXT[::-1])
    assert main(arguments(text, out, routers="switch")) == 2
    assert "other data" in capsys.readouterr().err
    assert set(evaluations(out)) == {f"runs/{router}/seed-0/evaluation.json" for router in ("smoe", "dense")}


@pytest.mark.slow
def test_finished_rows_need_no_checkpoints(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments(text, out, routers="smoe")) == 0
    for file in sorted(out.glob("runs/*/*/checkpoints/**/*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    before, table = evaluations(out), (out / "table.txt").read_text()
    assert main(arguments(text, out, routers="smoe")) == 0
    assert evaluations(out) == before
    shutil.rmtree(out / "runs")  # on another machine there is only the record
    assert main(arguments(text, out, routers="smoe")) == 0
    assert not list(out.glob("runs/*/*/checkpoints"))
    assert (out / "table.txt").read_text() == table


@pytest.mark.slow
def test_interrupted_it_goes_on_where_it_was(text: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of two jobs saves both; the end equals an unbroken comparison, one by one, bit for bit."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    words = arguments(text, broken, "--steps", "400", "--jobs", "2", routers="smoe,hyperrouter")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pointsman_lab", *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    metrics = broken / "runs/smoe/seed-0/metrics.jsonl"
    deadline = time.monotonic() + 250
    while not (metrics.exists() and metrics.read_text().count('"train"') > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "same command goes on" in error.decode()
    assert list(metrics.parent.glob("checkpoints/step-*"))
    run = [sys.executable, "-m", "pointsman_lab"]
    subprocess.run([*run, *words], env=environment, check=True, capture_output=True)
    whole.mkdir()
    shutil.copy(broken / "comparison.json", whole)
    words[words.index(str(broken))] = str(whole)
    words[words.index("2", words.index("--steps"))] = "1"  # jobs
    subprocess.run([*run, *words], env=environment, check=True, capture_output=True)
    for router in ("smoe", "hyperrouter"):
        one, other = (
            json.loads((out / f"runs/{router}/seed-0/evaluation.json").read_text())["results"]
            for out in (broken, whole)
        )
        assert one == other


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows")
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_terminal_that_closes_saves_first(jobs: int, text: Path, tmp_path: Path) -> None:
    """All processes of the terminal are told, and none can write to it any more."""
    out = tmp_path / "out"
    words = arguments(text, out, "--steps", "4000", "--jobs", str(jobs), routers="smoe,hyperrouter")
    terminal, end = os.openpty()
    os.set_blocking(terminal, False)
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', os.ttyname(end), sys.executable, "-m", "pointsman_lab", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # which the first terminal that is opened belongs to
    )
    signal.signal(signal.SIGHUP, inherited)
    metrics = [out / f"runs/{router}/seed-0/metrics.jsonl" for router in ("smoe", "hyperrouter")[:jobs]]
    deadline = time.monotonic() + 250
    try:
        while not all(one.exists() and one.read_text().count('"train"') > 3 for one in metrics):
            assert time.monotonic() < deadline
            assert process.poll() is None
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 65536)
            time.sleep(0.05)
    finally:
        os.close(end)
        os.close(terminal)
        code = process.wait(120)
    assert code == 130
    for one in metrics:
        assert list(one.parent.glob("checkpoints/step-*"))


def test_an_export_loads_as_one(text: Path, tmp_path: Path) -> None:
    """config.json and weights make the model again; materialized, HyperRouter is a plain linear router."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    words = ["train", "--router", "hyperrouter", "--data", str(text), "--steps", "2", "--eval-tokens", "512"]
    assert main([*words, *SMALL, "--out", str(run)]) == 0
    assert main(["export", str(run), "--out", str(run), "--materialize"]) == 2  # it would be no run any more
    for _ in range(2):
        assert main(["export", str(run), "--out", str(plain), "--materialize"]) == 0
    config = RunConfig.from_json((plain / "config.json").read_text())
    assert config.model.router == "smoe|smoe"
    model = TransformerXL(config.model).eval()
    assert safetensors.torch.load_model(model, plain / "model.safetensors") == (set(), [])
    tokens = torch.arange(12).view(1, 12)
    saved = load_run(run)
    with torch.no_grad(), using(saved.config.kernels):
        assert torch.equal(model(tokens).logits, saved.model(tokens).logits)


def test_a_power_cut_leaves_no_torn_file_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is on the disk before it takes its place."""
    synced, before, replace = set[int](), os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        before(descriptor)

    def checked(self: Path, target: Path) -> Path:
        assert self.stat().st_ino in synced, self.name
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", checked)
    with model_folder(tmp_path / "out") as scratch:
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (scratch / name).write_text(name)
    assert (tmp_path / "out").stat().st_ino in synced
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_an_export_that_cannot_be_written(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["train", "--router", "smoe", "--data", str(text), "--steps", "1", "--eval-tokens", "512"]
    assert main([*words, *SMALL, "--out", str(run)]) == 0
    capsys.readouterr()

    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_model", full)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "No space left" in capsys.readouterr().err


def test_a_stopped_evaluation_says_so(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    words = ["train", "--router", "smoe", "--data", str(text), "--steps", "1", "--eval-tokens", "512"]
    assert main([*words, *SMALL, "--out", str(run)]) == 0
    capsys.readouterr()
    stopping = threading.Event()
    stopping.set()
    monkeypatch.setattr("pointsman_lab.cli.evaluate.stop_on_signals", lambda: contextlib.nullcontext(stopping))
    assert main(["evaluate", str(run)]) == 130
    assert capsys.readouterr().err.strip() == "pointsman: stopped; the same command starts this evaluation anew"


@pytest.mark.skipif(os.name != "posix", reason="no such terminals")
def test_a_write_to_a_closed_terminal_goes_nowhere() -> None:
    terminal, end = os.openpty()
    stream = _Terminal(end, "w", closefd=False)
    assert stream.write(b"seen") == 4
    os.close(terminal)
    assert stream.write(b"unseen") == 6
    assert not os.isatty(end)
    os.close(end)
