"""Joining the processes of a job."""

import os
from datetime import timedelta

from pointsman._errors import RunError
from pointsman.parallel import STORE
from pointsman.ranks import ALONE, Ranks

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank that does not come."""


def start(device: str = "cpu", timeout: timedelta = TIMEOUT) -> Ranks:
    """Joins the job that torchrun (or --processes) started, and returns its place in it; `ALONE` without one.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, and gloo for what lies on the CPU).
        timeout: how long a collective waits.

    Raises:
        RunError: RANK or WORLD_SIZE are no numbers that fit together, or another device.
    """
    if "WORLD_SIZE" not in os.environ:
        return ALONE
    count, rank = _number("WORLD_SIZE"), _number("RANK")
    if not 0 <= rank < count:
        raise RunError(f"RANK={rank}: allowed are 0 to {count - 1} (WORLD_SIZE={count})")
    if count == 1:
        return ALONE
    if (backend := BACKENDS.get(device.partition(":")[0])) is None:
        raise RunError(f"device {device!r}: several processes run on {' or '.join(BACKENDS)}")
    import torch.distributed as dist

    where = f"file://{os.environ[STORE]}" if STORE in os.environ else "env://"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=count, timeout=timeout)
    return Ranks(rank, count)


def _number(name: str) -> int:
    if not ((text := os.environ.get(name, "")).isascii() and text.isdigit()):
        raise RunError(f"{name}={text!r}: allowed are whole numbers; torchrun sets it")
    return int(text)
