"""The tensors of checkpoints, as safetensors files; no pickle anywhere. The folder itself: `lab.runs.checkpoints`."""

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from pointsman.ops.exchange import local_part
from pointsman_lab._files import open_own, parse_json
from pointsman_lab._shapes import check_shape
from pointsman_lab.runs.checkpoints import FORMAT, Checkpoint, CheckpointError, write_folder

_ALIASES = "aliases"

Files = Mapping[str, Mapping[str, Tensor]]
"""The tensors of a checkpoint: file name without its ending -> tensor name -> tensor."""


def write_checkpoint(folder: Path, step: int, files: Files, state: Mapping[str, Any]) -> Path:
    """Writes the checkpoint `folder/step-N`; tensors that share storage are stored once. Else as `write_folder`."""
    packed = {f"{name}.safetensors": _packed(tensors) for name, tensors in files.items()}
    return write_folder(folder, step, packed, state)


def checkpoint_tensors(checkpoint: Checkpoint, name: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """The whole tensors of one file of a checkpoint, on the CPU; shared ones under each of their names.

    Raises:
        CheckpointError: the file, or the folder of parts, cannot be read.
    """
    if checkpoint.format == FORMAT and only is None:
        file = checkpoint.path / f"{name}.safetensors"
        with open_tensors(file) as opened:
            tensors = {one: opened.get_tensor(one) for one in opened.keys()}  # noqa: SIM118
            return _with_aliases(tensors, _noted(opened), file)
    stored = stored_tensors(checkpoint, name)
    wanted = {one: torch.empty_like(meta, device="cpu") for one, meta in stored.items() if only is None or one in only}
    read_into(checkpoint, name, wanted)
    return wanted


def stored_tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    """The same on the meta device: shapes and types alone.

    Raises:
        CheckpointError: the file, or the folder of parts, cannot be read.
    """
    try:
        known = _reader(checkpoint, name).read_metadata().state_dict_metadata
        names: Iterable[str] = known
        if checkpoint.format == FORMAT:  # the reader sees all files of the folder
            with open_tensors(checkpoint.path / f"{name}.safetensors") as opened:
                names = opened.keys()
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{checkpoint.path / name} cannot be read: {error}") from None
    found = {one: torch.empty(known[one].size, dtype=known[one].properties.dtype, device="meta") for one in names}
    return _with_aliases(found, _aliases(checkpoint, name), checkpoint.path)


def read_into(checkpoint: Checkpoint, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors, or this rank's parts of them, in place.

    Raises:
        CheckpointError: one is missing or of another shape; [] and [1] fit each other.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    stored, aliases = stored_tensors(checkpoint, name), _aliases(checkpoint, name)
    request: dict[str, Tensor] = {}
    copies: list[tuple[Tensor, str]] = []
    for one, tensor in tensors.items():
        kept = aliases.get(one, one)
        if kept in request or (one in stored and stored[one].dim() != tensor.dim() and tensor.numel() == 1):
            request.setdefault(kept, torch.empty_like(stored[one], device="cpu")) if one in stored else None
            copies.append((tensor, kept))
        elif tensor.numel():
            request[kept] = tensor
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no rank needs another one for this
            load(request, storage_reader=_reader(checkpoint, name), no_dist=True)
    except CheckpointException as error:
        why = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"checkpoint {checkpoint.path} is foreign: {str(why).splitlines()[0]}") from None
    for tensor, kept in copies:
        part, value = local_part(tensor), local_part(request[kept])
        assert part is not None
        assert value is not None
        if part.numel() and part is not value:
            part.copy_(value.view(part.shape))


def _reader(checkpoint: Checkpoint, name: str) -> Any:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(checkpoint.path if checkpoint.format == FORMAT else checkpoint.path / name))


def _aliases(checkpoint: Checkpoint, name: str) -> Mapping[str, str]:
    if checkpoint.format != FORMAT:
        return checkpoint.aliases.get(name, {})
    with open_tensors(checkpoint.path / f"{name}.safetensors") as opened:
        return _noted(opened)


def _noted(opened: Any) -> dict[str, str]:
    """Further names of tensors, as the metadata of a file has them."""
    found: dict[str, str] = parse_json((opened.metadata() or {}).get(_ALIASES, "{}"))
    check_shape(found, {"*": str}, _ALIASES)
    return found


def _with_aliases(tensors: Mapping[str, Tensor], aliases: Mapping[str, str], where: Path) -> dict[str, Tensor]:
    if strange := sorted({*aliases.values()} - tensors.keys()):
        raise CheckpointError(f"{where} is foreign: it has another name for {strange[0]}, which it lacks")
    return {**tensors, **{name: tensors[kept] for name, kept in aliases.items()}}


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file of a run, open for reading; CheckpointError where it is a link, or cannot be read."""
    try:
        os.close(open_own(file))
        with safetensors.safe_open(file, framework="pt") as opened:
            yield opened
    except CheckpointError:
        raise
    except (OSError, ValueError, safetensors.SafetensorError) as error:
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


def fitting_model(build: Callable[[], Any], layers: int, checkpoint: Checkpoint) -> Any:
    """What `build` makes, with the weights of a checkpoint, whose names and shapes are compared first.

    The settings that `build` follows may be a stranger's: they must not ask for more memory than their weights take.

    Raises:
        CheckpointError: the weights are another model's.
    """
    stored = stored_tensors(checkpoint, "model")
    if layers > len(stored):
        wrong: str | None = f"it has {len(stored)} tensors, its settings {layers:,} layers"
    else:
        with torch.device("meta"):
            wrong = misfit(build(), stored)
    if wrong:
        raise CheckpointError(f"checkpoint {checkpoint.path} is foreign: {wrong}")
    model = build()
    load_weights(model, checkpoint)
    return model


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's weights into a model of the same settings.

    Raises:
        CheckpointError: they belong to another model.
    """
    try:
        model.load_state_dict(checkpoint_tensors(checkpoint, "model"))
    except RuntimeError as error:
        first = str(error).splitlines()[1:2]
        told = first[0].strip() if first else str(error)
        raise CheckpointError(f"checkpoint {checkpoint.path} is foreign: its weights do not fit: {told}") from None


def misfit(model: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Why weights cannot be a model's; None if they can."""
    own = model.state_dict()
    if missing := sorted(own.keys() - weights.keys()):
        return f"its weights belong to another model: {missing[0]} is missing"
    if strange := sorted(weights.keys() - own.keys()):
        return f"its weights belong to another model: this one has no {strange[0]}"
    for name, tensor in own.items():
        if not tensor.numel() or tensor.numel() == weights[name].numel() == 1:
            continue  # an empty buffer takes what it finds; [] of one process is [1] of many
        if tensor.shape != weights[name].shape:
            return f"its {name} is {list(weights[name].shape)}, this model's {list(tensor.shape)}"
    return None


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin with it, without it."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
