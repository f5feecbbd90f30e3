"""Checkpoints of many ranks (format 2): each rank writes its parts, as safetensors, while the next steps go on.

    step-N/model/shard-00001-….safetensors … trainer/shard-… state.json manifest.json

A file is written by torch's distributed checkpoint writer and says in its header where its parts lie in the whole
tensors, so that any number of ranks reads what it needs. Names are those of a checkpoint of one process.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.ops.exchange import local_part
from pointsman.ranks import Ranks
from pointsman_lab._files import checksum
from pointsman_lab.runs.checkpoints import SHARDED, Checkpoint, begin_folder, complete_folder, prune, writing
from pointsman_lab.training.checkpoint import Files, checkpoint_tensors, read_into, stored_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Values = Mapping[str, Any]


class Saver:
    """Writes the checkpoints of a run of several ranks, one at a time, in a thread.

    Every rank must call the same methods in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        import torch.distributed as dist

        self.ranks = ranks
        self._own = replace(ranks, group=dist.new_group(backend="gloo"))  # the thread's collectives
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def save(self, folder: Path, step: int, model: nn.Module, files: Files, state: Values, keep: int) -> None:
        """Begins to write `folder/step-N`, after the checkpoint before it is whole; else as `write_folder`.

        The oldest are removed until `keep` are left (0 = removes none).
        """
        self.wait()
        self.ranks.agree(_replicated(files["model"]), "what every rank holds whole")
        aliases = {"model": _aliases(model, files["model"])}
        kept = {name: {n: t for n, t in of.items() if n not in aliases.get(name, {})} for name, of in files.items()}
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        copies: Files = {name: BlockingAsyncStager().stage(dict(of)) for name, of in kept.items()}
        self._writing = self._thread.submit(self._write, folder, step, copies, aliases, state, keep)

    def wait(self) -> None:
        """Returns when the last checkpoint is whole."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, folder: Path, step: int, files: Files, aliases: Values, state: Values, keep: int) -> None:
        ranks = self._own

        def begin() -> str:
            with writing(folder, step):
                return str(begin_folder(folder))

        aside = Path(ranks.by_first(begin))

        def describe() -> dict[str, Any]:
            with writing(folder, step):
                files = sorted(aside.glob("*/*"))[ranks.rank :: ranks.count]  # this rank's share
                return {f"{file.parent.name}/{file.name}": checksum(file, sync=True) for file in files}

        try:
            for name, tensors in files.items():
                _write_parts(aside / name, tensors, folder / f"step-{step}", ranks)
            described = {file: of for found in ranks.each(describe) for file, of in found.items()}
            rest = {"format": SHARDED, "world": ranks.count, "aliases": aliases}

            def complete() -> None:
                with writing(folder, step):
                    complete_folder(folder, step, aside, described, state, rest)
                prune(folder, step, keep)

            ranks.by_first(complete)
        except BaseException:
            if ranks.first:
                shutil.rmtree(aside, ignore_errors=True)
            raise


def _write_parts(folder: Path, tensors: Mapping[str, Tensor], target: Path, ranks: Ranks) -> None:
    """Each rank's parts of the tensors in a file of its own."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    ranks.by_first(lambda: folder.mkdir())
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, process_group=ranks.group)
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items(), key=lambda one: one[0])
        told = getattr(why, "strerror", None) or str(why).splitlines()[0]
        consequence = f"checkpoint {target.name} was not written; what was saved before is untouched"
        raise RunError(f"rank {rank}: {target}: {told}; {consequence}") from None


def _replicated(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksums of the tensors that are not divided: the routers' states and other buffers."""
    whole = {name: tensor for name, tensor in tensors.items() if local_part(tensor) is tensor}
    return {
        name: hashlib.blake2b(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
        for name, tensor in whole.items()
        if tensor.numel()
    }


def _aliases(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Further names of shared parameters -> the name under which each is stored."""
    first: dict[int, str] = {}
    every = dict(model.named_parameters(remove_duplicate=False))
    names = sorted(name for name in tensors if name in every)
    return {name: kept for name in names if (kept := first.setdefault(id(every[name]), name)) != name}


def restore_sharded(
    checkpoint: Checkpoint, model: nn.Module, parameters: Mapping[str, Tensor], ranks: Ranks, device: torch.device
) -> dict[str, Tensor]:
    """Reads a checkpoint of any number of ranks, or of one process, into this rank's parts of the model.

    Returns:
        This rank's parts of the trainer's tensors, by name.

    Raises:
        CheckpointError: its tensors belong to another model.
    """
    own = model.state_dict()
    read_into(checkpoint, "model", {name: tensor for name, tensor in own.items() if local_part(tensor) is not tensor})
    whole = [name for name, tensor in own.items() if local_part(tensor) is tensor]
    buffers = checkpoint_tensors(checkpoint, "model", whole)  # not in place: an empty one takes what it finds
    model.load_state_dict(buffers, strict=False)
    wanted: dict[str, Tensor] = {}
    for name, meta in stored_tensors(checkpoint, "trainer").items():
        kind, key, parameter = [*name.split(".", 2), "", ""][:3]
        if kind == "optimizer" and key != "step" and parameter in parameters:
            wanted[name] = torch.zeros_like(parameters[parameter].detach())
        elif kind == "memory":
            wanted[name] = rows_of_all(torch.zeros_like(meta, device="cpu")[ranks.rows(len(meta))], device, ranks)
        else:
            wanted[name] = torch.zeros_like(meta, device="cpu")
    read_into(checkpoint, "trainer", wanted)
    memories = {name: part for name, tensor in wanted.items()
                if name.startswith("memory.") and (part := local_part(tensor)) is not None}  # fmt: skip
    return wanted | memories


def rows_of_all(rows: Tensor, device: torch.device, ranks: Ranks) -> Tensor:
    """This rank's rows [rows, ...] as its part of the rows of all ranks."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(rows.to(device), _mesh(device.type, ranks.count), [Shard(0)], run_check=False)


@cache
def _mesh(kind: str, count: int) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (count,))
