"""Kernels, precision and random numbers of a run. A resumed run, and all runs of a comparison, use the same kernels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.kernels.choice import without_triton
from pointsman.ops.kernels import PLAIN, Kernels
from pointsman_lab.runs.checkpoints import Checkpoint
from pointsman_lab.training.config import RunConfig


def recorded_kernels(values: Mapping[str, Any], where: Path) -> Kernels:
    """The kernels recorded in a checkpoint or comparison."""
    try:
        return Kernels.from_dict(values)
    except (TypeError, ValueError) as error:
        raise RunError(f"{where}: its kernels cannot be used here: {error}") from None


def choose_kernels(config: RunConfig, given: Kernels | None = None, device: torch.device | None = None) -> Kernels:
    """The kernels of a new run: the plain ones if it is to be deterministic, those given to it, or its settings'."""
    if config.gpu_kernels == "triton":
        why = "deterministic=true takes the plain kernels" if config.deterministic else None
        if device is not None and device.type != "cuda":
            why = f"only a CUDA device has them, and the run is to be on {device}"
        elif device is not None:
            why = why or without_triton(torch.cuda.get_device_capability(device))
        if why:
            raise RunError(f"gpu_kernels=triton: {why}")
    return PLAIN if config.deterministic else given or Kernels(gpu=config.gpu_kernels)


def saved_kernels(config: RunConfig, checkpoint: Checkpoint, device: torch.device | None = None) -> Kernels:
    """Those of a checkpoint; chosen as for a new run where an older version wrote it. Errors as in recorded_kernels."""
    recorded = checkpoint.state.get("kernels")
    if recorded is None:
        return choose_kernels(config, None, device)
    return recorded_kernels(recorded, checkpoint.path)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms inside, if wanted; the setting is as before afterwards.

    With them cuBLAS refuses to work unless this variable says how much room it has, before its first product.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        if torch.cuda.is_available():
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def autocast(config: RunConfig, device: torch.device) -> torch.autocast:
    """A context in which models compute in bfloat16 where the settings ask for it; "auto": on CUDA."""
    return torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16(config, device))


def in_bfloat16(config: RunConfig, device: torch.device) -> bool:
    """Whether models compute under autocast."""
    return config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")


def seed_step(seed: int, step: int) -> None:
    """Seeds the default generators for one step, so that its masks and noise follow from (seed, step) alone."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
