import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pointsman._errors import RunError
from pointsman_lab._files import user_cache_folder
from pointsman_lab.data.cache import Tokens, cached
from pointsman_lab.data.vocabulary import Vocabulary

VOCABULARY = Vocabulary.of_bytes(b"abcd")


class Builder:
    def __init__(self, before_end: Callable[[], object] = lambda: None) -> None:
        self.calls = 0
        self.before_end = before_end

    def __call__(self) -> Tokens:
        self.calls += 1
        train, test = ([np.array(ids, dtype=np.uint8) for ids in blocks] for blocks in ([[0, 1, 2], [], [3]], [[2, 2]]))
        self.before_end()
        return Tokens.of(VOCABULARY, {"train": train, "test": test}, {"train": 0, "valid": 0, "test": 1})


def check(tokens: Tokens) -> None:
    assert tokens.vocabulary == VOCABULARY
    assert {split: ids.tolist() for split, ids in tokens.arrays.items()} == {
        "train": [0, 1, 2, 3],
        "valid": [],
        "test": [2, 2],
    }
    assert tokens.unknown == {"train": 0, "valid": 0, "test": 1}


def test_built_once_then_mapped(tmp_path: Path) -> None:
    build = Builder()
    check(cached("key", tmp_path, build))
    tokens = cached("key", tmp_path, build)
    check(tokens)
    assert build.calls == 1
    assert isinstance(tokens.arrays["train"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens.arrays["train"][0] = 1
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["key"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "meta.json"])
@pytest.mark.parametrize(
    "damage", [flip, lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-2])]
)
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    build = Builder()
    cached("key", tmp_path, build)
    damage(tmp_path / "tokens" / "key" / name)
    check(cached("key", tmp_path, build))
    assert build.calls == 2
    check(cached("key", tmp_path, build))
    assert build.calls == 2
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["key"]


def test_two_processes_at_once(tmp_path: Path) -> None:
    other = Builder()
    build = Builder(before_end=lambda: check(cached("key", tmp_path, other)))  # the other one is done first
    check(cached("key", tmp_path, build))
    assert (build.calls, other.calls) == (1, 1)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["key"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("key", tmp_path, Builder(before_end=interrupt))
    assert list((tmp_path / "tokens").iterdir()) == []


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / "tokens" / ".tmp-1-elsewhere+old", tmp_path / "tokens" / ".tmp-1-elsewhere+new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 2 * 86_400,) * 2)
    cached("key", tmp_path, Builder())
    assert not old.exists()
    assert new.exists()


def test_no_space_is_one_line(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"no space left for the token cache in .*tokens"):
        cached("key", tmp_path, Builder(before_end=full))
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    build = Builder()
    with pytest.warns(UserWarning, match="tokens stay in memory"):
        tokens = cached("key", blocked, build)
    check(tokens)
    assert build.calls == 1
    with pytest.raises(ValueError, match="read-only"):
        tokens.arrays["train"][0] = 1
    assert tokens.crc32 == cached("key", tmp_path, Builder()).crc32


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "pointsman"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the rule says: ignore it
    assert user_cache_folder() == Path.home() / ".cache" / "pointsman"
    monkeypatch.setattr(Path, "home", _nobody)
    with pytest.raises(RunError, match="no home folder: set XDG_CACHE_HOME"):
        user_cache_folder()


def _nobody() -> Path:
    raise RuntimeError("could not determine home directory")
