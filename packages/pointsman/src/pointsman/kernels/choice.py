"""Whether Triton's kernels can be used on a GPU, and which of several ways is the fastest that runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from pointsman.ops.kernels import active_gpu, fastest

OLDEST = (3, 3)  # Triton's versions before lack operations that the kernels use
TRITON, TORCH = "triton", "torch"


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


def with_triton(what: str, tensor: Tensor, measured: Callable[[torch.device], str]) -> bool:
    """Whether the active choice for `what` (a field of `Kernels`) is our kernel, on the device of this tensor.

    Args:
        measured: the faster way on a device, where the choice is left to a timing; not while torch.compile traces,
            which then fuses torch's operators itself.
    """
    if not tensor.is_cuda or (chosen := active_gpu(what)) == TORCH or without_triton(capability(tensor.device)):
        return False
    if chosen == "auto":
        return not torch.compiler.is_compiling() and measured(tensor.device) == TRITON
    return True


def fastest_that_runs(what: str, ways: Mapping[str, Callable[[], object]], otherwise: str) -> str:
    """The name of the fastest way by a timing. One that fails is named in a warning and left out; `otherwise` if all
    do."""
    running: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        try:
            way()
        except Exception as error:
            warnings.warn(f"the {what} {name!r} do not run here: {str(error).partition(chr(10))[0]}", stacklevel=3)
        else:
            running[name] = way
    return fastest(running, 15) if running else otherwise
