"""Kernels, precision and random numbers of a run."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pointsman._errors import RunError
from pointsman.ops.kernels import without_triton
from pointsman_lab.training.config import RunConfig


def check_kernels(config: RunConfig, device: torch.device) -> None:
    """Refuses our kernels where they cannot run.

    Raises:
        RunError: the device is no CUDA device, or too old, or the package triton is missing or too old.
    """
    if config.gpu_kernels == "triton":
        why = f"only a CUDA device has them, and the run is to be on {device}"
        if device.type == "cuda":
            why = without_triton(torch.cuda.get_device_capability(device)) or ""
        if why:
            raise RunError(f"gpu_kernels=triton: {why}")


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
