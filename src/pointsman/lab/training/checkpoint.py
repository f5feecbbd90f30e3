"""The tensors of checkpoints, as safetensors files; no pickle anywhere. The folder itself: `lab.runs.checkpoints`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pointsman._files import parse_json, within
from pointsman.lab.runs.checkpoints import Checkpoint, CheckpointError, write_folder

_ALIASES = "aliases"

Files = Mapping[str, Mapping[str, Tensor]]
"""The tensors of a checkpoint: file name without its ending -> tensor name -> tensor."""


def write_checkpoint(folder: Path, step: int, files: Files, state: Mapping[str, Any], keep: int = 0) -> Path:
    """Writes the checkpoint `folder/step-N`; tensors that share storage are stored once. Else as `write_folder`."""
    packed = {f"{name}.safetensors": _packed(tensors) for name, tensors in files.items()}
    return write_folder(folder, step, packed, state, keep)


def checkpoint_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, on the CPU; shared ones under each of their names."""
    return read_tensors(checkpoint.path / f"{name}.safetensors")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file on the CPU; those stored once for several names come back under each name.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safetensors.safe_open(within(file.parent, file.name), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
        aliases = parse_json(metadata.get(_ALIASES, "{}"))
        return {**tensors, **{name: tensors[kept] for name, kept in aliases.items()}}
    except (AttributeError, KeyError, TypeError, OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


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
