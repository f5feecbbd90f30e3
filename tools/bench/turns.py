"""Implementations in turn on the same new inputs, in every round in another order: rates, ratios to a peer, and memory.

A rate is the median over rounds, a ratio the median of the ratios round by round. On one thread (OMP_NUM_THREADS=1)
the clock is this process's processor time, so that other programs on the machine matter little.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointsman import __version__
from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid, wrapped
from pointsman_lab.runs.environment import commit, processor

Call = Callable[[], object]


def drawn(draw: Callable[[torch.Generator], Any], device: str = "cpu") -> Callable[[], Any]:
    """Calls `draw` with a generator that begins the same for every implementation."""
    generator = torch.Generator(device).manual_seed(1)
    return lambda: draw(generator)


def measured(calls: Mapping[str, Call], rounds: int, seconds: float = math.inf) -> dict[str, list[float]]:
    """Seconds of each call, one a round, after a round of warm-up; on a GPU with all that it has begun.

    Args:
        seconds: no further round begins after so many, but for the first three.
    """
    cuda = torch.cuda.is_available()
    clock = time.process_time if torch.get_num_threads() == 1 and not cuda else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.monotonic()
    for turn in range(-1, rounds):
        if turn >= 3 and time.monotonic() - start > seconds:
            break
        names = list(calls)
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            began = clock()
            calls[name]()
            if cuda:
                torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(clock() - began)
    return times


def ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of the other's time over this one's: above 1 this one is faster."""
    return statistics.median(theirs / mine for mine, theirs in zip(own, other, strict=True))


def table(title: str, calls: Mapping[str, Call], rounds: int, count: int, unit: str, peers: Sequence[str]) -> Grid:
    """Rates, and the time of the fastest peer over each."""
    times = measured(calls, rounds)
    base = times[min(peers, key=lambda peer: statistics.median(times[peer]))]
    rows = [[name, f"{count / statistics.median(own):,.0f}", f"{ratio(own, base):.2f}"] for name, own in times.items()]
    fastest = next(name for name, own in times.items() if own is base)
    return Grid([title, f"{unit} a second", f"times {fastest}"], rows, code=False)


def kept_bytes(run: Callable[[], Tensor], known: Sequence[Tensor]) -> int:
    """Bytes that the graph of `run` keeps for backward, each storage once, apart from those of `known`."""
    before = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()
    del alive
    return sum(kept.values())


def machine() -> dict[str, str]:
    """Versions, processor and threads, on which the figures depend."""
    info = {
        "pointsman": __version__,
        "commit": commit() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
    }
    if torch.cuda.is_available():
        info["GPU"] = torch.cuda.get_device_name()
    return info


def page(command: str, grids: Sequence[Grid], out: Path | None) -> None:
    """Prints the tables below the command and the machine, and writes them to `out` where asked."""
    where = [f"- {name}: {value}" for name, value in machine().items()]
    text = "\n".join([f"# `{command}`", "", *where, *(f"\n{grid.markdown()}" for grid in grids), ""])
    print(text)
    if out:
        write_whole(out, wrapped(text))
