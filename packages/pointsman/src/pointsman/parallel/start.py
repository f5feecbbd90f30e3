"""Joining the processes of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count as counting
from typing import Any, TypeVar

from pointsman._errors import RunError
from pointsman.parallel.launch import STORE
from pointsman.ranks import ALONE, Ranks

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank that does not come."""
PATIENCE = 3.0
"""Seconds in which ranks that can still answer report that they are lost."""

_calls = counting()
"""Of `one_after_another`: each has a key of its own."""


def start(device: str = "cpu", timeout: timedelta = TIMEOUT) -> Ranks:
    """Joins the job that torchrun or `launch` started, and returns this process's place in it; `ALONE` without one.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, and gloo for what lies on the CPU).
        timeout: how long a collective waits.

    Raises:
        RunError: RANK or WORLD_SIZE are no numbers that fit together.
    """
    if "WORLD_SIZE" not in os.environ:
        return ALONE
    count, rank = _number("WORLD_SIZE"), _number("RANK")
    if not 0 <= rank < count:
        raise RunError(f"RANK={rank}: allowed are 0 to {count - 1} (WORLD_SIZE={count})")
    if count == 1:
        return ALONE
    import torch.distributed as dist

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    where = f"file://{os.environ[STORE]}" if STORE in os.environ else "env://"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=count, timeout=timeout)
    return Ranks(rank, count)


def one_after_another(ranks: Ranks, function: Callable[[], T]) -> T:
    """What the function returns; the first rank of each machine calls it before the others, who wait up to an hour.

    For what is made once and kept in a cache.
    """
    if ranks.count == 1:
        return function()
    machine = os.environ.get("GROUP_RANK", "0")
    key, store = f"made-{machine}-{next(_calls)}", _store()
    if os.environ.get("LOCAL_RANK", str(ranks.rank)) == "0":
        made = function()
        store.set(key, "1")
        return made
    store.wait([key], timedelta(hours=1))
    return function()


def first_to_tell(ranks: Ranks) -> bool:
    """Whether this rank is the first that reports why the job ends: rank 0 if it says anything within `PATIENCE`."""
    until = time.monotonic() + (0 if ranks.first else PATIENCE)
    try:
        while _store().add("told", 0) == 0 and time.monotonic() < until:
            time.sleep(0.05)
        return bool(_store().add("told", 1) == 1)
    except RuntimeError:  # its owner has ended
        return True


def let_others_ask(ranks: Ranks) -> None:
    """Rank 0 stays until the others have asked `first_to_tell`, at most for `PATIENCE`: torchrun's store ends with it.

    The store of `launch` is a file.
    """
    if not ranks.first or STORE in os.environ:
        return
    until = time.monotonic() + PATIENCE
    with suppress(RuntimeError):
        while _store().add("told", 0) < ranks.count and time.monotonic() < until:
            time.sleep(0.05)


def lost_ranks(ranks: Ranks) -> list[int]:
    """The ranks that report nothing within `PATIENCE`, for one that lost the connection: they ended, or they hang."""
    try:
        store = _store()
        store.set(f"lost-{ranks.rank}", "1")
        silent = [rank for rank in range(ranks.count) if rank != ranks.rank]
        until = time.monotonic() + PATIENCE
        while silent and time.monotonic() < until:
            time.sleep(0.05)
            silent = [rank for rank in silent if not store.check([f"lost-{rank}"])]
    except RuntimeError:  # the store's owner has ended
        return [0]
    return silent


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank did not come to a collective."""
    words = ("Connection closed by peer", "Connection reset by peer", "Timed out", "timeout", "pair closure", "NCCL")
    return isinstance(error, RuntimeError) and (
        type(error).__name__.startswith("Dist") or any(word in str(error) for word in words)
    )


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise RunError(f"{name}={text!r}: allowed are whole numbers; torchrun sets it")
    return int(text)
