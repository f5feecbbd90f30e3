"""Checkpoints: whole or not at all; damaged ones of every kind are refused by name, and the one before is used."""

import errno
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab._files import alone
from pointsman_lab.data.corpus import Corpus
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.runs import checkpoints as module
from pointsman_lab.runs.checkpoints import (
    CheckpointError,
    last_checkpoint,
    open_checkpoint,
    prune,
    steps_of,
    whole_checkpoint,
)
from pointsman_lab.tasks.language_modelling.task import LanguageModelling
from pointsman_lab.training.checkpoint import checkpoint_tensors, write_checkpoint
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.state import Interrupted
from pointsman_lab.training.trainer import train

Settings = Callable[..., RunConfig]


def some() -> dict[str, dict[str, Tensor]]:
    shared = torch.arange(6.0).view(2, 3)
    return {
        "model": {"a": shared, "b": shared, "part": shared[0], "empty": torch.zeros(2, 0), "turned": shared.t()},
        "trainer": {"half": torch.ones(3, dtype=torch.bfloat16), "count": torch.tensor(7), "a/b|c": torch.ones(1)},
    }


def test_tensors_and_state_come_back(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 12, some(), {"note": "x"})
    found = open_checkpoint(path)
    assert (path.name, found.step, found.state) == ("step-12", 12, {"note": "x"})
    for name, tensors in some().items():
        read = checkpoint_tensors(found, name)
        assert read.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(read[key], tensor)
            assert read[key].dtype == tensor.dtype
    assert {entry.name for entry in path.iterdir()} == {
        "model.safetensors", "trainer.safetensors", "state.json", "manifest.json",
    }  # fmt: skip


def test_shared_tensors_are_stored_once_and_any_reader_can_load_the_model(settings: Settings, tmp_path: Path) -> None:
    config = settings("hyperrouter:share=true").model
    torch.manual_seed(5)
    model = TransformerXL(config)
    path = write_checkpoint(tmp_path, 1, {"model": model.state_dict()}, {})
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert len([name for name in stored if "hypernetwork.2.weight" in name]) == 1
    assert len([name for name in model.state_dict() if "hypernetwork.2.weight" in name]) == 2
    other = TransformerXL(settings("hyperrouter:share=true", seed=3).model)
    safetensors.torch.load_model(other, str(path / "model.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".writing-left-over").mkdir()
    others = {"step-three", "step-012"}
    for name in others:
        (tmp_path / name).mkdir()
    for step in (1, 2, 10, 11):
        write_checkpoint(tmp_path, step, some(), {})
        prune(tmp_path, step, 2)
    assert steps_of(tmp_path) == [11, 10]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-10", "step-11", *others}
    assert steps_of(tmp_path / "nowhere") == []


def test_what_was_passed_over_neither_stays_nor_pushes_others_out(tmp_path: Path) -> None:
    for step in (9, 12):
        write_checkpoint(tmp_path, step, some(), {})
    for step in (3, 4, 10):
        write_checkpoint(tmp_path, step, some(), {})
        prune(tmp_path, step, 1)
        assert steps_of(tmp_path) == [step]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-10", "passed-over-step-9", "passed-over-step-12"}


def test_saving_a_step_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 4, some(), {})
    (path / "model.safetensors").write_bytes(b"")
    write_checkpoint(tmp_path, 4, some(), {"again": True})
    assert open_checkpoint(path).state == {"again": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-4"]


@pytest.mark.parametrize("name", ["other.safetensors", ".x.safetensors", "trainer/shard-1.safetensors"])
def test_weights_that_the_manifest_does_not_describe_are_not_read(tmp_path: Path, name: str) -> None:
    path, mine = write_checkpoint(tmp_path, 4, some(), {}), tmp_path / "mine"
    mine.mkdir()
    safetensors.torch.save_file({"secret": torch.ones(3)}, mine / Path(name).name)
    if "/" in name:
        (path / "trainer").symlink_to(mine)
    else:
        (path / name).symlink_to(mine / name)
    with pytest.raises(CheckpointError, match=rf"does not describe {name}"):
        open_checkpoint(path)


def truncate(path: Path) -> None:
    file = path / "trainer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def change_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def replace_by_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"not a folder")


def replace_by_pickle(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, r"damaged: trainer\.safetensors has .* bytes, not .*cut off"),
    "flipped bit": (flip, r"damaged: model\.safetensors does not have the checksum"),
    "missing file": (lambda path: (path / "model.safetensors").unlink(), r"damaged: model\.safetensors is missing"),
    "missing state": (lambda path: (path / "state.json").unlink(), r"damaged: state\.json is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"it has no manifest\.json"),
    "cut-off manifest": (
        lambda path: (path / "manifest.json").write_text('{"form'),
        r"manifest\.json: not readable",
    ),
    "manifest of a list": (
        lambda path: (path / "manifest.json").write_text("[]"),
        r"manifest\.json: a JSON object",
    ),
    "another format": (lambda path: change_manifest(path, format=9), "foreign"),
    "another step": (lambda path: change_manifest(path, step=9), "foreign"),
    "no state listed": (lambda path: change_manifest(path, files={}), r"foreign: it has no state\.json"),
    "odd entry": (lambda path: change_manifest(path, files={"state.json": 3}), "an object is expected"),
    "a file": (replace_by_a_file, "is no checkpoint"),
    "a pickle": (replace_by_pickle, r"has no manifest\.json"),
    "empty folder": (lambda path: [entry.unlink() for entry in path.iterdir()], r"has no manifest\.json"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_used(tmp_path: Path, kind: str) -> None:
    damage, told = DAMAGES[kind]
    write_checkpoint(tmp_path, 3, some(), {})
    path = write_checkpoint(tmp_path, 6, some(), {})
    damage(path)
    with pytest.raises(CheckpointError, match=told) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    notes: list[str] = []
    found = last_checkpoint(tmp_path, notes.append)
    assert found is not None
    assert found.step == 3
    assert notes == [str(caught.value)]


@pytest.mark.parametrize(
    ("kind", "all_of_them", "router"),
    [
        *(
            (kind, every, "smoe")
            for kind in ("truncated", "flipped bit", "no manifest", "a pickle")
            for every in (0, 1)
        ),
        ("truncated", 0, "smoe+attention"),  # knows its number of heads only after a step
    ],
)
def test_a_run_resumes_from_the_last_good_one_to_the_same_end(
    settings: Settings, corpus: Corpus, tmp_path: Path, kind: str, all_of_them: int, router: str
) -> None:
    class Stop:
        notes: list[str] = []  # noqa: RUF012
        steps = 0

        def phase(self, name: str, total: int, done: int = 0) -> None: ...

        def advance(self, done: int, figures: Any) -> None:
            self.steps += "loss" in figures

        def note(self, message: str) -> None:
            self.notes.append(message)

        def is_set(self) -> bool:
            return self.steps >= 7

    def run(name: str, **options: Any) -> None:
        train(settings(router), tmp_path / name, task=LanguageModelling(corpus), **options)

    run("unbroken")
    stop = Stop()
    with pytest.raises(Interrupted):
        run("broken", progress=stop, stop=stop)
    folder = tmp_path / "broken" / "checkpoints"
    assert steps_of(folder) == [7, 6, 3]
    for step in [7, 6, 3] if all_of_them else [7]:
        DAMAGES[kind][0](folder / f"step-{step}")
    after = Stop()
    after.steps, after.notes = -99, []
    run("broken", resume=True, progress=after)
    assert "step-7" in after.notes[0]
    assert ("begins at step 0" if all_of_them else "goes on after step 6") in after.notes[-1]
    one, two = (open_checkpoint(tmp_path / name / "checkpoints" / "step-8") for name in ("unbroken", "broken"))
    for file in ("model", "trainer"):
        first, second = checkpoint_tensors(one, file), checkpoint_tensors(two, file)
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_weights_of_another_model_are_passed_over(settings: Settings, corpus: Corpus, tmp_path: Path) -> None:
    narrow = settings(**{"model.hidden_dim": 16})
    for name, config in (("wide", settings()), ("narrow", narrow)):
        train(config, tmp_path / name, task=LanguageModelling(corpus))
    shutil.rmtree(tmp_path / "wide" / "checkpoints")
    shutil.copytree(tmp_path / "narrow" / "checkpoints", tmp_path / "wide" / "checkpoints")
    notes: list[str] = []

    class Notes:
        def phase(self, name: str, total: int, done: int = 0) -> None: ...

        def advance(self, done: int, figures: Any) -> None: ...

        def note(self, message: str) -> None:
            notes.append(message)

    result = train(settings(), tmp_path / "wide", task=LanguageModelling(corpus), resume=True, progress=Notes())
    assert result.step == 8
    assert all("foreign" in note for note in notes[:3])
    assert "is [4, 16, 32], this model's [4, 32, 32]" in notes[0]
    assert "begins at step 0" in notes[3]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_full_or_closed_disk_gives_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, when: int
) -> None:
    write_checkpoint(tmp_path, 1, some(), {})
    write, calls = module.write_synced, []

    def failing(file: Path, content: bytes) -> None:
        calls.append(file)
        if len(calls) > when:
            file.write_bytes(content[: len(content) // 2])
            raise OSError(number, "the system's words", str(file))
        write(file, content)

    monkeypatch.setattr(module, "write_synced", failing)
    with pytest.raises(ValueError, match="step-2 was not written; what was saved before is untouched") as caught:
        write_checkpoint(tmp_path, 2, some(), {})
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]
    open_checkpoint(tmp_path / "step-1")


def test_a_directory_in_which_another_process_works_is_refused(
    settings: Settings, corpus: Corpus, tmp_path: Path
) -> None:
    with alone(tmp_path), pytest.raises(RunError, match="another process is working in this directory"):
        train(settings(), tmp_path, task=LanguageModelling(corpus))
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_a_place_that_cannot_be_a_run_directory_is_refused(settings: Settings, corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="nothing was begun"):
        train(settings(), tmp_path / "file" / "run", task=LanguageModelling(corpus))


def test_without_a_whole_checkpoint_one_line_says_so(tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(RunError, match="has no whole checkpoint: the run has not saved yet"):
        whole_checkpoint(tmp_path / "checkpoints", notes.append)
    (tmp_path / "evaluation.json").write_text("{}")  # as in a shared run
    with pytest.raises(RunError, match="has no whole checkpoint: its weights are not there"):
        whole_checkpoint(tmp_path / "checkpoints", notes.append)
    for step in (1, 2, 3):
        write_checkpoint(tmp_path / "checkpoints", step, some(), {})
        (tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match=r"step-3 is damaged: .* \(and 2 older ones are no better\)") as caught:
        whole_checkpoint(tmp_path / "checkpoints", notes.append)
    assert "\n" not in str(caught.value)
    assert notes == []
    for step in (4, 5):
        path = write_checkpoint(tmp_path / "checkpoints", step, some(), {})
    (path / "model.safetensors").write_bytes(b"x")
    assert whole_checkpoint(tmp_path / "checkpoints", notes.append).step == 4
    assert len(notes) == 1
