"""Runs and run directories: resuming bit for bit, interruption, what a finished run leaves, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman.ops.kernels import using
from pointsman_lab.cli import verify
from pointsman_lab.data.corpus import Corpus
from pointsman_lab.evaluation.passes import PLAIN
from pointsman_lab.runs.checkpoints import CheckpointError, open_checkpoint, steps_of
from pointsman_lab.tasks.language_modelling.task import LanguageModelling, token_counts
from pointsman_lab.training import run as run_module
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.run import load_run
from pointsman_lab.training.state import Diverged, Interrupted
from pointsman_lab.training.trainer import TrainResult, train

Settings = Callable[..., RunConfig]
TIMES = ("step_seconds", "tokens_per_second", "overhead")


class Listener:
    """A progress display that keeps what it is told, and asks to stop after so many training steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.figures: list[Mapping[str, float]] = []
        self.stop_after = stop_after

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.phases.append(name)

    def advance(self, done: int, figures: Mapping[str, float]) -> None:
        if self.phases[-1] == "train":
            self.figures.append(figures)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def is_set(self) -> bool:
        return self.stop_after is not None and len(self.figures) >= self.stop_after


@pytest.fixture
def run(corpus: Corpus, tmp_path: Path) -> Callable[..., TrainResult]:
    def make(config: RunConfig, name: str = "run", **options: Any) -> TrainResult:
        options = {"task": LanguageModelling(corpus), **options}
        return train(config, tmp_path / name, **options)

    return make


def tensors(out: Path, step: int) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(out / "checkpoints" / f"step-{step}")
    return {**checkpoint_tensors(checkpoint, "model"), **checkpoint_tensors(checkpoint, "trainer")}


def rows(out: Path, *kinds: str) -> list[dict[str, Any]]:
    kept = RunDirectory(out).metrics(*kinds)
    return [{key: value for key, value in row.items() if key not in TIMES} for row in kept]


def assert_equal_runs(one: Path, two: Path, step: int = 8) -> None:
    """Weights, optimizer, memories, figures and evaluation agree bit for bit."""
    first, second = tensors(one, step), tensors(two, step)
    assert first.keys() == second.keys()
    assert any(name.startswith("memory.") for name in first)
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert rows(one) == rows(two)
    results = [json.loads((out / "evaluation.json").read_text())["results"] for out in (one, two)]
    assert results[0] == results[1]


ROUTERS = {
    "smoe": {},
    "smoe:noise=0.5:balance=0.01": {"accumulation": 2},
    "hyperrouter:share=true": {"k_schedule": "cosine"},
    "xmoe": {},
    "thor": {},
    "dense-dropout": {},
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("stop_after", [1, 5])
def test_stopped_and_resumed_equals_unbroken_bit_for_bit(
    settings: Settings, run: Callable[..., TrainResult], router: str, stop_after: int
) -> None:
    config = settings(router, observe_every=2, **ROUTERS[router])
    unbroken = run(config, "unbroken")
    listener = Listener(stop_after)
    with pytest.raises(Interrupted, match=rf"after step {stop_after}; .*--resume"):
        run(config, "broken", progress=listener, stop=listener)
    resumed = run(config, "broken", resume=True, progress=Listener())
    assert resumed.step == 8
    assert not resumed.already_finished
    assert_equal_runs(unbroken.out, resumed.out)


@pytest.mark.parametrize("stop_after", [4, 5, None])  # step 4 was saved before
@pytest.mark.parametrize("how", ["removed", "renamed", "without config.json", "replaced"])
def test_a_run_whose_folder_goes_says_so_and_makes_none(
    settings: Settings, run: Callable[..., TrainResult], tmp_path: Path, how: str, stop_after: int | None
) -> None:
    class Removing(Listener):
        def advance(self, done: int, figures: Mapping[str, float]) -> None:
            super().advance(done, figures)
            there = (tmp_path / "run" / "config.json").exists() and not (tmp_path / "other").exists()
            if len(self.figures) == (stop_after or 5) and there:
                if how == "removed":
                    shutil.rmtree(tmp_path / "run")
                elif how == "renamed":
                    (tmp_path / "run").rename(tmp_path / "other")
                elif how == "replaced":  # by another run, which holds it
                    (tmp_path / "run").rename(tmp_path / "other")
                    shutil.copytree(tmp_path / "other", tmp_path / "run")
                else:
                    (tmp_path / "run" / "config.json").unlink()

    listener = Removing(stop_after)
    with pytest.raises(RunError, match="run was removed or renamed while the run trained") as caught:
        run(settings(checkpoint_every=4), progress=listener, stop=listener)
    assert not isinstance(caught.value, Interrupted)
    assert (tmp_path / "run").exists() == (how in ("without config.json", "replaced"))
    assert len(steps_of(tmp_path / "run" / "checkpoints")) <= 1
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_stopped_twice_and_within_evaluation(settings: Settings, run: Callable[..., TrainResult]) -> None:
    config = settings("hyperrouter")
    unbroken = run(config, "unbroken")

    class WithinEvaluation(Listener):
        def is_set(self) -> bool:
            return bool(self.phases) and self.phases[-1] == self.wanted

    for wanted in ("validate", "evaluate"):
        listener = WithinEvaluation()
        listener.wanted = wanted
        with pytest.raises(Interrupted):
            run(config, "broken", resume=wanted == "evaluate", progress=listener, stop=listener)
    assert_equal_runs(unbroken.out, run(config, "broken", resume=True).out)


def test_asked_to_stop_while_it_asks_it_saves(
    settings: Settings, run: Callable[..., TrainResult], tmp_path: Path
) -> None:
    class Late(Listener):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 1

    with pytest.raises(Interrupted) as caught:
        run(settings(), "my run", stop=Late())
    assert steps_of(tmp_path / "my run" / "checkpoints") == [caught.value.step]
    assert f"(--out '{tmp_path / 'my run'}') goes on" in str(caught.value), "as a shell takes it"


def test_killed_with_signal_9_and_resumed(
    settings: Settings, run: Callable[..., TrainResult], text_file: Path, tmp_path: Path
) -> None:
    config = settings("hyperrouter", steps=40, checkpoint_every=4, validate_every=10)
    unbroken = run(config, "unbroken")
    (tmp_path / "config.json").write_text(config.to_json())
    program = (
        "import sys, pathlib, torch; torch.set_num_threads(1)\n"
        "from pointsman_lab.training.config import RunConfig\n"
        "from pointsman_lab.training.trainer import train\n"
        "config = RunConfig.from_json(pathlib.Path(sys.argv[1], 'config.json').read_text())\n"
        "train(config, pathlib.Path(sys.argv[1], 'killed'))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env={**os.environ})
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 120
    while not steps_of(checkpoints) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(0.05 * (time.time_ns() % 7))  # anywhere after the first checkpoint
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert steps_of(checkpoints)
    resumed = run(config, "killed", resume=True)
    assert_equal_runs(unbroken.out, resumed.out, 40)


def test_what_a_finished_run_leaves(settings: Settings, run: Callable[..., TrainResult]) -> None:
    listener = Listener()
    result = run(settings("hyperrouter"), progress=listener)
    out = result.out
    files = {entry.name for entry in out.iterdir()}
    assert files == {
        "config.json", "environment.json", "vocabulary.json", "metrics.jsonl", "evaluation.json", "checkpoints",
        ".lock",
    }  # fmt: skip
    assert steps_of(out / "checkpoints") == [8, 6, 3]
    here = json.loads((out / "environment.json").read_text())
    assert here["kernels"] == {"path": "fast", "gpu": "torch"}
    assert here["packages"]["torch"] == metadata.version("torch")
    trained = RunDirectory(out).metrics("train")
    assert [row["step"] for row in trained] == list(range(1, 9))
    assert {"loss", "bits", "top_k", "learning_rate", "gradient_norm", *TIMES} < trained[0].keys()
    assert all(0 < row["overhead"] < 1 for row in trained)
    assert [(row["step"], row["top_k"]) for row in RunDirectory(out).metrics("valid")] == [
        (4, 1),
        (4, 4),
        (8, 1),
        (8, 4),
    ]
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert evaluation["checkpoint"] == "step-8"
    assert [entry["top_k"] for entry in evaluation["results"]] == [1, 2, 4]
    assert evaluation["router_parameters"] == 2 * 32
    assert set(evaluation["results"][0]["routers"]) == {"layers.0.moe", "layers.1.moe"}
    assert len(listener.figures) == 8
    assert {"loss", "bits", "top_k", "tokens_per_second"} <= listener.figures[0].keys()


def test_a_loaded_run_gives_the_same_figures(
    settings: Settings, run: Callable[..., TrainResult], corpus: Corpus
) -> None:
    result = run(settings("hyperrouter:share=true"))
    loaded = load_run(result.out)
    assert loaded.step == 8
    with using(loaded.config.kernels):
        task = LanguageModelling(corpus)
        again = task.evaluate(loaded.model, loaded.config, "test", loaded.config.eval_top_k, PLAIN)
    assert again == result.evaluation["results"]
    assert load_run(result.out, step=3).step == 3
    with pytest.raises(ValueError, match="no checkpoint"):
        load_run(result.out, step=4)
    with pytest.raises(ValueError, match="no run directory"):
        load_run(result.out.parent)
    file = result.out / "vocabulary.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["symbols"][:2] = vocabulary["symbols"][1::-1]
    file.write_text(json.dumps(vocabulary))
    with pytest.raises(ValueError, match=r"vocabulary\.json is damaged: it is not the vocabulary of step-8"):
        load_run(result.out)


def test_a_finished_run_says_so_and_stays(settings: Settings, run: Callable[..., TrainResult]) -> None:
    first = run(settings())
    before = {file: file.stat().st_mtime_ns for file in first.out.rglob("*.safetensors")}
    vocabulary = (first.out / "vocabulary.json").read_bytes()
    (first.out / "vocabulary.json").unlink()  # made again: without it nothing can be evaluated
    listener = Listener()
    again = run(settings(), resume=True, progress=listener)
    assert again.already_finished
    assert again.evaluation == first.evaluation
    assert "is finished" in listener.notes[-1]
    assert {file: file.stat().st_mtime_ns for file in first.out.rglob("*.safetensors")} == before
    assert (first.out / "vocabulary.json").read_bytes() == vocabulary


def test_another_evaluation_of_a_finished_run_trains_nothing(
    settings: Settings, run: Callable[..., TrainResult]
) -> None:
    run(settings())
    listener = Listener()
    for values in ((2, 3), (4,), (1, 4)):  # 4: all experts
        result = run(settings(eval_top_k=values), resume=True, progress=listener)
        assert [entry["top_k"] for entry in result.evaluation["results"]] == list(values)
    assert listener.figures == []


def test_a_directory_of_another_run_is_refused(settings: Settings, run: Callable[..., TrainResult]) -> None:
    run(settings())
    with pytest.raises(ValueError, match="holds this run already, saved at step 8 of 8: --resume"):
        run(settings())
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"another configuration: learning_rate is 0\.003 there, 0\.1 here"):
            run(settings(learning_rate=0.1), resume=resume)
        with pytest.raises(ValueError, match=r"model\.router is 'smoe' there, 'thor' here"):
            run(settings("thor"), resume=resume)
    assert run(settings(), resume=True).already_finished


def test_a_checkpoint_of_another_run_is_passed_over(
    settings: Settings, run: Callable[..., TrainResult], tmp_path: Path
) -> None:
    out, other = run(settings(checkpoint_every=4)).out, run(settings(seed=1, eval_tokens=50), "other").out
    shutil.rmtree(out / "checkpoints" / "step-8")
    shutil.copytree(other / "checkpoints" / "step-8", out / "checkpoints" / "step-8")
    told = "step-8 is foreign: its seed is 1, not 0 as in config.json"
    assert told in next(verify.faults(out, "a run"))
    notes: list[str] = []
    assert load_run(out, note=notes.append).step == 4
    assert told in notes[0]
    with pytest.raises(CheckpointError, match=told):
        load_run(out, step=8)
    listener = Listener()
    run(settings(eval_tokens=60), resume=True, progress=listener)
    assert told in listener.notes[0]
    assert_equal_runs(run(settings(eval_tokens=60), "third").out, out)


def test_resume_without_a_checkpoint_begins_at_step_0(settings: Settings, run: Callable[..., TrainResult]) -> None:
    listener = Listener()
    result = run(settings(), resume=True, progress=listener)
    assert "begins at step 0" in listener.notes[0]
    assert_equal_runs(run(settings(), "other").out, result.out)


def test_a_run_that_diverges_names_step_layer_and_checkpoint(
    settings: Settings, run: Callable[..., TrainResult], tmp_path: Path
) -> None:
    with pytest.raises(
        Diverged, match=r"step \d+: the .* is (nan|inf).*layer.*last good checkpoint is step-\d"
    ) as caught:
        run(settings(learning_rate=1e9, clip_norm=0, checkpoint_every=1, warmup_steps=3, validate_every=0))
    assert "\n" not in str(caught.value)
    for step in steps_of(tmp_path / "run" / "checkpoints"):
        open_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{step}")
    assert f"step-{steps_of(tmp_path / 'run' / 'checkpoints')[0]}" in str(caught.value)


def test_tensorboard(settings: Settings, run: Callable[..., TrainResult]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    listener = Listener(3)
    config = settings(tensorboard=True, observe_every=2)
    with pytest.raises(Interrupted):
        run(config, progress=listener, stop=listener)
    result = run(config, resume=True)
    events = accumulator.EventAccumulator(str(result.out / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "valid/bits_per_character/k=1", "routing/layers.0.moe/entropy"} <= set(tags)
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


class FakeLibrary:
    """wandb's and trackio's interface: what a run sends."""

    Settings = dict

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.sent: dict[int, dict[str, float]] = {}
        self.finished = 0

    def init(self, **given: Any) -> FakeLibrary:
        print("a line of the library's own")
        self.begun.append(given)
        return self

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.sent.setdefault(step, {}).update(metrics)

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers(
    name: str,
    settings: Settings,
    run: Callable[..., TrainResult],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library, listener = FakeLibrary(), Listener(3)
    monkeypatch.setitem(sys.modules, name, library)
    config = settings(track=(name,), observe_every=2)
    with pytest.raises(Interrupted):
        run(config, progress=listener, stop=listener)
    run(config, resume=True)
    first, second = library.begun
    assert first["name"] == second["name"]
    assert first.get("id") == second.get("id")
    assert first["config"]["steps"] == 8
    assert sorted(library.sent) == list(range(1, 9))
    assert library.sent[2]["train/loss"] > 0
    assert "routing/layers.0.moe/cv" in library.sent[2]
    assert library.finished == 2
    assert not capsys.readouterr().out


def test_a_tracker_that_is_missing_or_refuses_is_named(
    settings: Settings, run: Callable[..., TrainResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="did you mean 'wandb'"):
        settings(track=("wandbb",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="wandb is not installed: pip install"):
        run(settings(track=("wandb",)))
    assert not (tmp_path / "run" / "config.json").exists()
    monkeypatch.setattr(FakeLibrary, "init", lambda self, **given: 1 / 0)
    monkeypatch.setitem(sys.modules, "trackio", FakeLibrary())
    with pytest.raises(RunError, match="trackio does not begin: division by zero"):
        run(settings(track=("trackio",)))


def test_deterministic_takes_the_plain_path(settings: Settings, run: Callable[..., TrainResult]) -> None:
    result = run(settings(deterministic=True))
    assert json.loads((result.out / "environment.json").read_text())["kernels"]["path"] == "plain"
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("files", "message"),
    [({"train": 300, "valid": 100}, "has no test split"), ({"train": 300, "valid": 10, "test": 100}, "has 10 tokens")],
)
def test_data_that_the_end_cannot_use_are_refused_before_the_training(
    settings: Settings, tmp_path: Path, files: dict[str, int], message: str
) -> None:
    for name, size in files.items():
        (tmp_path / f"{name}.txt").write_text("a b " * (size // 4) + "c" * (size % 4))
    with pytest.raises(RunError, match=message):
        train(settings(data=str(tmp_path)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_that_have_changed_are_refused(
    settings: Settings, run: Callable[..., TrainResult], corpus: Corpus
) -> None:
    from dataclasses import replace

    listener = Listener(5)
    with pytest.raises(Interrupted):
        run(settings(), progress=listener, stop=listener)
    other = LanguageModelling(replace(corpus, fingerprint="another"))
    with pytest.raises(RunError, match="was trained on other data"):
        run(settings(), resume=True, task=other, progress=Listener())
    listener = Listener()
    run(settings(), resume=True, progress=listener)
    assert "goes on after step" in listener.notes[0], "nothing of it is lost"


def test_a_validation_that_a_kill_cut_is_made_up(settings: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = settings(checkpoint_every=4, validate_every=4)
    train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    file = tmp_path / "cut" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    [_, second] = [i for i, line in enumerate(lines) if '"valid"' in line and json.loads(line)["step"] == 4]
    file.write_text("".join(lines[:second]) + lines[second][:20])
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-8")
    (tmp_path / "cut" / "evaluation.json").unlink()
    train(config, tmp_path / "cut", resume=True)
    rows = [list(RunDirectory(tmp_path / name).metrics("valid")) for name in ("whole", "cut")]
    key = itemgetter("step", "top_k")
    assert sorted(rows[1], key=key) == sorted(rows[0], key=key)


def test_tables_are_made_of_the_counts_of_the_training_data(settings: Settings, corpus: Corpus) -> None:
    task = LanguageModelling(corpus)
    config = task.prepared(settings("hash:kind=balanced|mask:rare=2500"))
    hashed, masked = (router.score for _, router in named_routers(task.build_model(config)))
    tokens = corpus.split("train")
    counts = [int((np.asarray(tokens) == index).sum()) for index in range(corpus.vocabulary.size)]
    assert min(counts) < 2500 < max(counts)
    assert token_counts(tokens, len(counts)).tolist() == counts
    loads = [
        sum(count for count, e in zip(counts, hashed.table.tolist(), strict=True) if e == expert) for expert in range(4)
    ]
    assert max(loads) - min(loads) <= max(counts)
    assert (masked.width == 1).tolist() == [count < 2500 for count in counts]
    assert not hashed.needs_counts
    assert not masked.needs_counts


@pytest.mark.parametrize("moment", ["whole_checkpoint", "fitting_model"])
def test_a_run_is_read_while_its_training_removes_old_checkpoints(
    moment: str, settings: Settings, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It "cannot be read", or was called one that has no whole checkpoint."""
    train(settings(), tmp_path / "run", task=LanguageModelling(corpus))
    folder, aside = tmp_path / "run" / "checkpoints", tmp_path / "aside"
    (folder / "step-8").rename(aside)

    def after(*words: Any, **options: Any) -> Any:
        found = before(*words, **options) if moment == "whole_checkpoint" else None
        if aside.exists():  # training goes on
            aside.rename(folder / "step-8")
            shutil.rmtree(folder / "step-6")
        return before(*words, **options) if found is None else found

    before = getattr(run_module, moment)
    monkeypatch.setattr(run_module, moment, after)
    assert load_run(tmp_path / "run").step == 8
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"has not saved yet|its weights are not there"):
        load_run(tmp_path / "run")
