"""What a compiled graph takes as a constant. Imported while compiling only: the decorator imports torch's compiler."""

from __future__ import annotations

import torch

from pointsman.experts.on_gpu import measured


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def measured_constant(device: torch.device) -> str:
    """`on_gpu.measured`."""
    return measured(device)
