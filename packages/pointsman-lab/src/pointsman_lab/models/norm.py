"""RMSNorm in few passes over memory: torch makes it of a dozen operations on a CPU.

Shapes: D is the width of the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops.linear import autocast_enabled, transformed

SMALL = 1 << 13  # elements up to which calls bound the time: torch's are all in C++


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last dimension: [..., D], [D] -> [..., D]."""
    exact = hidden.dtype == weight.dtype and hidden.dtype in (torch.float32, torch.float64)
    if hidden.device.type != "cpu" or not exact or autocast_enabled("cpu") or _is_traced():
        return F.rms_norm(hidden, weight.shape, weight, eps)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        if hidden.numel() <= SMALL:
            return F.rms_norm(hidden, weight.shape, weight, eps)
        return (hidden * _scale(hidden, eps)).mul_(weight)
    output: Tensor = _RMSNorm.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]
    return output


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or transformed()


def _scale(hidden: Tensor, eps: float) -> Tensor:
    """[..., 1]: 1 / sqrt(mean x^2 + eps)."""
    length: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    return length.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = _scale(hidden, eps)
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # layer norm's backward about a mean of 0, in one pass, has the same gradients but for the mean it takes away
        hidden, weight, scale = ctx.saved_tensors
        gradient = gradient.contiguous()
        zero = torch.zeros_like(scale)
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        d_hidden, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, hidden.contiguous(), weight.shape, zero, scale, weight, None, wanted
        )
        if d_hidden is not None:
            taken = (gradient.view(-1, hidden.shape[-1]) @ (weight / hidden.shape[-1])).view(scale.shape)
            d_hidden.add_(taken.mul_(scale))
        return d_hidden, d_weight, None
