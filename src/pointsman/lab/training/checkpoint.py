"""Checkpoints: folders `step-N` of safetensors and JSON, written whole or not at all; no pickle anywhere.

A checkpoint is written under another name, synced to the disk and renamed, so that a folder called `step-N` is whole
whenever the machine stops. Its manifest holds size and SHA-256 of each file; a folder that does not fit its manifest is
refused by name, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman._files import disk_errors, open_own, read_json, sync_folder, within, write_synced

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP = re.compile(r"step-(\d+)")
_ASIDE = ".writing-"
_ALIASES = "aliases"

Files = Mapping[str, Mapping[str, Tensor]]
"""What a checkpoint holds: file name without its ending -> tensor name -> tensor."""


class CheckpointError(RunError):
    """A checkpoint that cannot be used; the message names it and says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that fits its manifest.

    Attributes:
        path: its folder, `…/step-N`.
        step: N, the number of finished optimizer steps.
        state: what `state.json` holds.
    """

    path: Path
    step: int
    state: Mapping[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files, on the CPU; shared ones under each of their names."""
        return read_tensors(self.path / f"{name}.safetensors")


def write_checkpoint(folder: Path, step: int, files: Files, state: Mapping[str, Any], keep: int = 0) -> Path:
    """Writes `folder/step-N` and removes older ones, until `keep` are left with it (0 = none).

    Those of later steps, which whoever saves step N passed over as damaged or foreign, are put aside as
    `passed-over-step-M`: nothing takes them for this run's again.

    Args:
        folder: the run's `checkpoints` folder; made if need be.
        step: N.
        files: tensors by file; tensors that share storage are stored once.
        state: JSON for the rest.

    Raises:
        RunError: no space, no permission, or another fault of the disk; what was there before is untouched.
    """
    target = folder / f"step-{step}"
    with disk_errors(target, f"checkpoint step-{step} was not written"):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder))
        try:
            written = {f"{name}.safetensors": _packed(tensors) for name, tensors in files.items()}
            written[STATE] = json.dumps(state, indent=2).encode()
            manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": {}}
            for name, content in written.items():
                write_synced(aside / name, content)
                manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            write_synced(aside / MANIFEST, json.dumps(manifest, indent=2).encode())
            sync_folder(aside)
            if target.exists():  # a damaged one: whoever saves step N again has come through N
                target.rename(Path(tempfile.mkdtemp(prefix=_ASIDE, dir=folder)) / target.name)
            aside.chmod(0o755)
            aside.rename(target)
            sync_folder(folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _remove_leftovers(folder)
        for later in [other for other in steps_of(folder) if other > step]:
            passed_over = folder / f"passed-over-step-{later}"
            shutil.rmtree(passed_over, ignore_errors=True)
            (folder / f"step-{later}").rename(passed_over)
        if keep:
            for old in steps_of(folder)[keep:]:
                shutil.rmtree(folder / f"step-{old}", ignore_errors=True)
    return target


def steps_of(folder: Path) -> list[int]:
    """The steps of the folders called `step-N`, latest first, whole or not."""
    if not folder.is_dir():
        return []
    matches = [_STEP.fullmatch(entry.name) for entry in folder.iterdir()]
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this folder, after every file was held against the manifest.

    Raises:
        CheckpointError: it is damaged, cut off or no checkpoint of this library; names it and says why.
    """
    match = _STEP.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: a folder called step-N is one")
    step = int(match[1])
    manifest = _json(path, MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("step") != step or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"checkpoint {path} is foreign: its {MANIFEST} is not of format {FORMAT} and step {step}")
    for name, expected in manifest["files"].items():
        if "/" in name or "\\" in name:
            raise CheckpointError(f"checkpoint {path} is foreign: its {MANIFEST} names {name!r}")
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        try:
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"checkpoint {path} is damaged: {name} has {size:,} bytes, not {expected['bytes']:,} (cut off?)"
                )
            with open(open_own(file), "rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read: {error.strerror or error}") from None
        except (KeyError, TypeError):
            raise CheckpointError(f"checkpoint {path} is foreign: its {MANIFEST} does not describe {name}") from None
        if digest != expected["sha256"]:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} does not have the checksum in {MANIFEST}")
    if STATE not in manifest["files"]:
        raise CheckpointError(f"checkpoint {path} is foreign: it has no {STATE}")
    return Checkpoint(path, step, _json(path, STATE))


def last_checkpoint(
    folder: Path, note: Callable[[str], None], usable: Callable[[Checkpoint], str | None] = lambda checkpoint: None
) -> Checkpoint | None:
    """The latest whole checkpoint of a `checkpoints` folder; `note` is told of each one that is passed over, and why.

    Args:
        usable: says why a whole checkpoint cannot be used here, or None.
    """
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


def whole_checkpoint(folder: Path, note: Callable[[str], None] | None = None) -> Checkpoint:
    """The latest whole checkpoint of a `checkpoints` folder; `note` is told of those that are passed over for it.

    Raises:
        RunError: there is none; one line, which names the latest one that cannot be used.
    """
    passed: list[str] = []
    checkpoint = last_checkpoint(folder, passed.append)
    if checkpoint is None:
        why = passed[0] if passed else "the run has not saved yet"
        others = f" (and {len(passed) - 1} older ones are no better)" if len(passed) > 1 else ""
        raise RunError(f"{folder.parent} has no whole checkpoint: {why}{others}")
    if note:
        for line in passed:
            note(line)
    return checkpoint


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file on the CPU; those stored once for several names come back under each name.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safetensors.safe_open(within(file.parent, file.name), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
        aliases = json.loads(metadata.get(_ALIASES, "{}"))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    return {**tensors, **{name: tensors[kept] for name, kept in aliases.items()}}


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    """safetensors content; of tensors that are views of the same storage one is kept, the others' names are noted."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        kept[name] = tensor.cpu().contiguous()
    storages: set[int] = set()
    for name, tensor in kept.items():  # views of one storage that differ in shape or place: each on its own
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.numel() and pointer in storages:
            kept[name] = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(pointer)
    metadata = {"format": "pt", **({_ALIASES: json.dumps(aliases)} if aliases else {})}
    return safetensors.torch.save(kept, metadata=metadata)


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        values = read_json(path / name)
    except RunError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {str(error).removeprefix(f'{path}/')}") from None
    if values is None:
        raise CheckpointError(f"checkpoint {path} is damaged or foreign: it has no {name}")
    return values


def _remove_leftovers(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name.startswith(_ASIDE):
            shutil.rmtree(entry, ignore_errors=True)
