"""Kernels, precision and random numbers of a run. A resumed run, and all runs of a comparison, use the same kernels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.kernels import attention, experts, mixing, router
from pointsman.kernels.choice import TOKENS, Case, Work, measured
from pointsman.ops.kernels import PLAIN, Kernels
from pointsman.routers.mutual.streaming import informed
from pointsman_lab.models.traced_attention import attend
from pointsman_lab.runs.checkpoints import Checkpoint
from pointsman_lab.training.config import RunConfig


def recorded_kernels(values: Mapping[str, Any], where: Path) -> Kernels:
    """The kernels recorded in a checkpoint or comparison.

    Raises:
        RunError: this machine cannot use them; names `where`.
    """
    try:
        return Kernels.from_dict(values)
    except (TypeError, ValueError) as error:
        raise RunError(f"{where}: its kernels cannot be used here: {error}") from None


def choose_kernels(config: RunConfig, given: Kernels | None, device: torch.device | None = None) -> Kernels:
    """The kernels of a new run: the plain ones if it is to be deterministic, those given to it, or the default. On a
    CUDA device the faster ones by a timing, in this run's own shapes.
    """
    if config.deterministic:
        return PLAIN
    chosen = given or Kernels()
    if device is None or device.type != "cuda":
        return chosen
    open_ = {name: work for name, work in _work(config).items() if getattr(chosen, name) == "auto"}
    return replace(chosen, **{name: measured(name, device, *work) for name, work in open_.items()})


def _work(config: RunConfig) -> dict[str, tuple[Work, Case]]:
    """What the choices for a GPU are timed on: this run's own shapes, at its middle k."""
    model, schedule = config.model, config.top_k_schedule
    k, gated = (schedule.low + schedule.high) // 2, bool(getattr(model, "gated", False))
    dtype = torch.float32 if config.precision == "float32" else torch.bfloat16
    length = config.segment_length
    rows = max(1, min(config.batch_size // config.accumulation, TOKENS // length))
    layer = model.dim, model.expert_width, model.num_experts, k, gated, dtype
    keys = length + config.memory_length
    return {
        "gpu": (experts.work, (min(TOKENS, rows * length), *layer)),
        "gpu_decode": (experts.work_few, (1, *layer)),
        "gpu_router": (router.work, (min(TOKENS, rows * length), model.dim, model.num_experts, k)),
        "gpu_attention": (attention.work, (attend, model.num_heads, rows, length, keys, model.head_dim)),
        "gpu_mixing": (mixing.work, (informed, rows, length, model.dim)),
    }


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
    wanted = config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def seed_step(seed: int, step: int) -> None:
    """Seeds the default generators for one step, so that its masks and noise follow from (seed, step) alone."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
