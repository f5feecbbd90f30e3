"""Joining the processes of a job."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from pointsman._errors import RunError
from pointsman.ranks import ALONE, Ranks

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank that does not come."""


def start(
    device: str = "cpu",
    *,
    rank: int | None = None,
    count: int | None = None,
    store: Path | None = None,
    timeout: timedelta = TIMEOUT,
) -> Ranks:
    """Joins the job that torchrun started, and returns this process's place in it; `ALONE` without one.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, and gloo for what lies on the CPU).
        rank, count: instead of RANK and WORLD_SIZE of the environment.
        store: a file through which the processes find each other, instead of MASTER_ADDR and MASTER_PORT.
        timeout: how long a collective waits.

    Raises:
        RunError: RANK or WORLD_SIZE are no numbers that fit together.
    """
    if count is None and "WORLD_SIZE" not in os.environ:
        return ALONE
    count = _number("WORLD_SIZE") if count is None else count
    rank = _number("RANK") if rank is None else rank
    if not 0 <= rank < count:
        raise RunError(f"RANK={rank}: allowed are 0 to {count - 1} (WORLD_SIZE={count})")
    if count == 1:
        return ALONE
    import torch.distributed as dist

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    where = f"file://{store}" if store is not None else "env://"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=count, timeout=timeout)
    return Ranks(rank, count)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise RunError(f"{name}={text!r}: allowed are whole numbers; torchrun sets it")
    return int(text)
