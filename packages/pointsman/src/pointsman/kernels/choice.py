"""Whether our kernels or torch's operators do the work on a GPU: as the run says, or by a timing of that very work."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pointsman.ops.kernels import active_gpu, as_constant

OLDEST = (3, 3)  # Triton's versions before lack operations that the kernels use
TRITON, TORCH, GROUPED_MM = "triton", "torch", "grouped_mm"  # the last in place of "torch" for the experts
TOKENS = 8192
"""Of a timing at most, and where their number is not known: in a graph of torch.compile, or before a run begins."""
ENOUGH = 0.3  # seconds of one comparison

Case = tuple[Any, ...]
"""The sizes of some work. It decides which way is the faster, so each case has a timing of its own."""
Work = Callable[..., Callable[[], object]]
"""(`TRITON` or another name, device, *case) -> a function that does such work once, forward and backward."""


@cache
def without_triton(capability: tuple[int, int] | None) -> str | None:
    """Why Triton's kernels cannot be used on a device of this compute capability (None: no CUDA device); None if they
    can."""
    try:
        import triton
    except ImportError:
        return "the package triton is not installed: pip install 'pointsman[gpu]'"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, OLDEST))}"
    if capability is not None and capability < (8, 0):
        return f"compute capability {'.'.join(map(str, capability))} is below 8.0"
    return None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def with_triton(what: str, tensor: Tensor, work: Work, case: Callable[[], Case]) -> bool:
    """Whether our kernel does this work, on the device of this tensor.

    Args:
        what: the field of `Kernels` that says so; "auto": as `measured`.
        case: asked only where a timing decides.
    """
    if not tensor.is_cuda or without_triton(capability(tensor.device)):
        return False
    chosen = active_gpu(what)
    if chosen == "auto" and torch.compiler.is_compiling() and what != "gpu":
        return False  # the compiler fuses torch's operators itself, all but grouped products
    return (measured(what, tensor.device, work, case()) if chosen == "auto" else chosen) == TRITON


def measured(what: str, device: torch.device, work: Work, case: Case) -> str:
    """`TRITON` or torch's way, whichever is the faster at this work on a CUDA device. Timed once for each case.

    What cannot run is named in a warning and left out.
    """
    return str(as_constant(_measured, what, device, work, case))


@cache
def _measured(what: str, device: torch.device, work: Work, case: Case) -> str:
    otherwise = GROUPED_MM if what == "gpu" else TORCH
    if without_triton(capability(device)):
        return otherwise
    running: dict[str, Callable[[], object]] = {}
    for name in (TRITON, otherwise):
        run = awaited(work(name, device, *case), device)
        try:
            run()
        except Exception as error:  # the compiler's, the driver's, whatever it is
            told = str(error).partition("\n")[0]
            warnings.warn(f"{what}={name} does not run here on {case}: {told}", stacklevel=2)
        else:
            running[name] = run
    return fastest(running) if running else otherwise


def fastest(ways: Mapping[str, Callable[[], object]]) -> str:
    """The name of the way that has the fastest of 15 calls, of slow ones of fewer."""
    best = dict.fromkeys(ways, float("inf"))
    begin = time.perf_counter()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for turn in range(15):  # interleaved: another program's burst meets all
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                best[name] = min(best[name], time.perf_counter() - start)
            if turn and time.perf_counter() - begin > ENOUGH:  # the first calls are also the slowest
                break
    return min(best, key=lambda name: best[name])


def awaited(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work, until the device has finished."""

    def run() -> object:
        with torch.enable_grad():
            found = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    return run


def tokens_of(count: int) -> int:
    """So many tokens (or sequences) for a case: the next power of 2, so that batches of all sizes are few cases."""
    return TOKENS if torch.compiler.is_compiling() else min(TOKENS, 1 << max(0, count - 1).bit_length())
