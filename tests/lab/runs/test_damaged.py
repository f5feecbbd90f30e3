"""What the campaigns of damage and kills have found (tests/campaigns): damaged files are refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab._values import finite
from pointsman_lab.runs.checkpoints import open_checkpoint, prune, remove_leftovers, steps_of, write_folder
from pointsman_lab.runs.compact import RECORD, read_record
from pointsman_lab.training.directory import RunDirectory

READERS: dict[str, Callable[[Path], object]] = {
    "vocabulary.json": lambda folder: RunDirectory(folder).vocabulary(),
    "config.json": lambda folder: RunDirectory(folder).config(),
    RECORD: lambda folder: list(read_record(folder)),
}


def test_a_number_beyond_every_float_is_not_finite() -> None:
    assert finite(10**400) is None
    assert finite(2**70) == 2.0**70


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "content", [b"\x82\xff", b"[" * 100_000, b'{"a":' * 100_000, b"\x00", b"1", b'{"a": "\\ud800"}']
)
def test_what_is_no_json_is_refused_by_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError) as caught:
        READERS[name](tmp_path)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_kill_while_old_checkpoints_go_leaves_none_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_folder(tmp_path, step, {"model.safetensors": b"x"}, {})
    write_folder(tmp_path, 3, {"model.safetensors": b"x"}, {})

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 3, keep=1)
    monkeypatch.undo()
    for step in steps_of(tmp_path):
        open_checkpoint(tmp_path / f"step-{step}")
    assert steps_of(tmp_path)[0] == 3
    remove_leftovers(tmp_path)
    assert all(entry.name.startswith("step-") for entry in tmp_path.iterdir())


def test_pruning_keeps_the_checkpoint_that_is_used(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_folder(tmp_path, step, {}, {})
    prune(tmp_path, 2, keep=1)  # step-3 is damaged, say
    assert steps_of(tmp_path) == [3, 2]
    prune(tmp_path, 3, keep=0)
    prune(tmp_path, 3, keep=1, spare=2)
    assert steps_of(tmp_path) == [3, 2]
