"""Whether our kernels do the work on a GPU, and why they may not be able to."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from pointsman.ops.kernels import as_constant, triton_wanted

OLDEST = (3, 3)  # Triton's versions before lack operations that the kernels use


@cache
def without_triton(capability: tuple[int, int] | None) -> str | None:
    """Why Triton's kernels cannot run on a device of this compute capability (None: no CUDA device); None: they can."""
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


def with_triton(tensor: Tensor) -> bool:
    """Whether our kernels are chosen (`Kernels.gpu`), for work on the device of this tensor; ValueError if they are and
    cannot run there."""
    if not tensor.is_cuda or not triton_wanted():
        return False
    as_constant(_check, tensor.device)
    return True


def _check(device: torch.device) -> None:
    if why := without_triton(torch.cuda.get_device_capability(device)):
        raise ValueError(f"kernels: gpu='triton': {why}; gpu='torch' runs here")
