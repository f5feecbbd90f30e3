"""Checkpoints: folders `step-N` of files with a manifest of sizes and SHA-256; written whole or not at all.

A checkpoint is written under a temporary name, synced and renamed, so that a folder called `step-N` is always whole.
A folder that does not match its manifest is refused by name, and the one before it is used.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import checksum, disk_errors, read_json, sync_folder, write_synced
from pointsman_lab.runs.paths import EVALUATION

FORMAT = 1
SHARDED = 2
"""The format of checkpoints of many ranks: folders of safetensors files, each with parts of tensors."""
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_TEMPORARY = ".writing-"


class CheckpointError(RunError):
    """A checkpoint that cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that matches its manifest."""

    path: Path
    step: int
    state: Mapping[str, Any]
    format: int = FORMAT
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # file -> tensor -> its stored name


def write_folder(folder: Path, step: int, files: Mapping[str, bytes], state: Mapping[str, Any]) -> Path:
    """Writes `folder/step-N`.

    Checkpoints of later steps are renamed to `passed-over-step-M`: the run that saves step N has rejected them.
    """
    with writing(folder, step):
        aside = begin_folder(folder)
        try:
            described = {}
            for name, content in files.items():
                write_synced(aside / name, content)
                described[name] = _described(content)
            return complete_folder(folder, step, aside, described, state)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def writing(folder: Path, step: int) -> AbstractContextManager[None]:
    """Turns what the disk refuses while `folder/step-N` is written into one line."""
    return disk_errors(folder / f"step-{step}", f"checkpoint step-{step} was not written")


def begin_folder(folder: Path) -> Path:
    """A folder under a temporary name, for the files of a checkpoint; what killed writers left is removed.

    The run's own directory must be there: one that was removed while the run trained is not made again.
    """
    folder.mkdir(exist_ok=True)
    remove_leftovers(folder)
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder))


def complete_folder(
    folder: Path,
    step: int,
    aside: Path,
    described: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
    rest: Mapping[str, Any] = MappingProxyType({"format": FORMAT}),
) -> Path:
    """Adds state.json and the manifest to the synced files in `aside`, and names the whole `folder/step-N`."""
    target = folder / f"step-{step}"
    content = json.dumps(state, indent=2).encode()
    write_synced(aside / STATE, content)
    manifest = {**rest, "step": step, "files": {**described, STATE: _described(content)}}
    write_synced(aside / MANIFEST, json.dumps(manifest, indent=2).encode())
    sync_folder(aside)
    if target.exists():  # a damaged one: the run has come through step N again
        target.rename(Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder)) / target.name)
    aside.chmod(0o755)
    aside.rename(target)
    sync_folder(folder)
    remove_leftovers(folder)
    for later in [other for other in steps_of(folder) if other > step]:
        passed_over = folder / f"passed-over-step-{later}"
        shutil.rmtree(passed_over, ignore_errors=True)
        (folder / f"step-{later}").rename(passed_over)
    return target


def _described(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def prune(folder: Path, step: int, keep: int, spare: int | None = None) -> None:
    """Removes the oldest checkpoints before `step`, but not `spare`, until `keep` are left (0 = removes none)."""
    with disk_errors(folder, "old checkpoints were not removed"):
        for old in [other for other in steps_of(folder) if other < step][keep - 1 :] if keep else ():
            if old != spare:  # renamed first: a kill must leave no part of one called step-N
                (folder / f"step-{old}").rename(Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=folder)) / "old")
        remove_leftovers(folder)


def steps_of(folder: Path) -> list[int]:
    """The steps of the folders called `step-N`, latest first, whole or not."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def checksums(path: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint folder, as its manifest has it."""
    return {name: described["sha256"] for name, described in _json(path, MANIFEST)["files"].items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this folder, after every file was checked against the manifest.

    CheckpointError says why it is damaged, cut off or no checkpoint of this library.
    """
    match = _STEP.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: a folder called step-N is one")
    step = int(match[1])
    manifest = _json(path, MANIFEST)
    form = manifest.get("format")
    if form not in (FORMAT, SHARDED) or manifest.get("step") != step or not isinstance(manifest.get("files"), dict):
        told = f"its {MANIFEST} is not of format {FORMAT} or {SHARDED} and step {step}"
        raise CheckpointError(f"checkpoint {path} is foreign: {told}")
    for name, expected in manifest["files"].items():
        _check_file(path, name, expected)
    if STATE not in manifest["files"]:
        raise CheckpointError(f"checkpoint {path} is foreign: it has no {STATE}")
    for file in (*path.glob("*.safetensors"), *path.glob("*/*.safetensors")):  # torch's reader takes all it finds
        if (name := file.relative_to(path).as_posix()) not in manifest["files"]:
            raise CheckpointError(f"checkpoint {path} is foreign: its {MANIFEST} does not describe {name}")
    return Checkpoint(path, step, _json(path, STATE), int(form), manifest.get("aliases", {}))


def last_checkpoint(
    folder: Path, note: Callable[[str], None], usable: Callable[[Checkpoint], str | None] = lambda checkpoint: None
) -> Checkpoint | None:
    """The latest usable checkpoint of a `checkpoints` folder; `note` is told of each that it passes over, and why."""
    for step in steps_of(folder):
        try:
            checkpoint = open_checkpoint(folder / f"step-{step}")
        except CheckpointError as error:
            note(str(error))
            continue
        reason = usable(checkpoint)
        if reason is None:
            return checkpoint
        note(f"checkpoint {checkpoint.path} is foreign: {reason}")
    return None


def whole_checkpoint(
    folder: Path,
    note: Callable[[str], None] | None = None,
    usable: Callable[[Checkpoint], str | None] = lambda checkpoint: None,
) -> Checkpoint:
    """`last_checkpoint`; CheckpointError where there is none."""
    passed: list[str] = []
    checkpoint = last_checkpoint(folder, passed.append, usable)
    if checkpoint is None:
        kept = (folder.parent / EVALUATION).is_file()  # of a shared run, or one whose checkpoints were removed
        why = passed[0] if passed else "its weights are not there" if kept else "the run has not saved yet"
        others = f" (and {len(passed) - 1} older ones are no better)" if len(passed) > 1 else ""
        raise CheckpointError(f"{folder.parent} has no whole checkpoint: {why}{others}")
    if note:
        for line in passed:
            note(line)
    return checkpoint


def _check_file(path: Path, name: str, expected: Any) -> None:
    parts = name.split("/")
    if len(parts) > 2 or "\\" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise CheckpointError(f"checkpoint {path} is foreign: its {MANIFEST} names {name!r}")
    file = path / name
    if file.is_symlink() or file.parent.is_symlink() or not file.is_file():
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            told = f"{name} has {size:,} bytes, not {expected['bytes']:,} (cut off?)"
            raise CheckpointError(f"checkpoint {path} is damaged: {told}")
        digest = checksum(file)["sha256"]
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {name} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError):
        raise CheckpointError(f"checkpoint {path} is foreign: its {MANIFEST} does not describe {name}") from None
    if digest != expected["sha256"]:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} does not have the checksum in {MANIFEST}")


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        values = read_json(path / name)
    except RunError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {str(error).removeprefix(f'{path}/')}") from None
    if values is None:
        raise CheckpointError(f"checkpoint {path} is damaged or foreign: it has no {name}")
    return values


def remove_leftovers(folder: Path) -> None:
    """Removes what killed writers left in a `checkpoints` folder; for the process that holds the run."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith(_TEMPORARY):
            shutil.rmtree(entry, ignore_errors=True)
