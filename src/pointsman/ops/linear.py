"""A linear map through the run's matrix products: on a CPU in float32 twice as fast where oneDNN's are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from pointsman.ops.gemm import ONEDNN, choose
from pointsman.ops.kernels import Kernels, measure_kernels


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, kernels: Kernels | None = None) -> Tensor:
    """`F.linear`: hidden [..., in], weight [out, in], bias [out] -> [..., out].

    Args:
        kernels: what `measure_kernels` chose for this run; None: what it chooses for this process.
    """
    if torch.compiler.is_compiling() or not suits(hidden, weight):
        return F.linear(hidden, weight, bias)
    if choose((kernels or measure_kernels()).gemm, torch.float32) is not ONEDNN:
        return F.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    output: Tensor = _Linear.apply(rows.contiguous(), weight.contiguous(), bias)  # type: ignore[no-untyped-call]
    return output.view(*hidden.shape[:-1], -1)


def suits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the products of `ops.gemm` can take these: plain float32 tensors on a CPU, at least one row."""
    return (
        hidden.device.type == "cpu"
        and hidden.dtype == weight.dtype == torch.float32
        and hidden.numel() > 0
        and {type(hidden), type(weight)} <= {Tensor, Parameter}  # not one that is sharded over processes
        and not torch.is_autocast_enabled("cpu")
        and not transformed()
    )


def transformed() -> bool:
    """Whether derivatives are taken, or tensors batched, in ways that only plain operations know.

    These are `torch.func`'s, and forward mode, whose tangents a fast path would drop without a word.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bias = bias is not None
        return ONEDNN.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        d_rows = d_weight = None
        twice = torch.is_grad_enabled()  # create_graph=True: through products that have derivatives themselves
        if ctx.needs_input_grad[0]:
            d_rows = gradient @ weight if twice else ONEDNN.product(gradient, weight)
        if ctx.needs_input_grad[1] and twice:
            d_weight = gradient.t() @ rows
        elif ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            ONEDNN.weight_gradient(d_weight, gradient, rows)
        return d_rows, d_weight, gradient.sum(0) if ctx.bias else None
