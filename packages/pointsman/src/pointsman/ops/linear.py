"""A linear map through the run's choice of matrix products (`ops.gemm`).

Half-precision rows meet float32 weights (a router's) block by block: each block is upcast while it is in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from pointsman.ops.gemm import ONEDNN, Gemm
from pointsman.ops.kernels import active_gemm

HALF = (torch.bfloat16, torch.float16)
BLOCK = 1 << 19  # elements upcast at a time, if that is enough rows for a product


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """No autocast on this type of device in the block."""
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def autocast_enabled(kind: str) -> bool:
    """Whether autocast is on for this type of device; the meta device, which torch does not know there, has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes their product in; None: it is off, or both are float64, which it leaves."""
    kind = hidden.device.type
    if not autocast_enabled(kind) or hidden.dtype == weight.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def upcast(tensor: Tensor) -> Tensor:
    """bf16 and half become float32; float32 and float64 stay."""
    return tensor.float() if tensor.dtype in HALF else tensor


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: hidden [..., in], weight [out, in], bias [out] -> [..., out].

    Args:
        hidden: in the dtype of `weight`; or in half precision, with a float32 weight: then it is upcast.
    """
    known = weight.dtype == torch.float32 and hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    if not known or active_gemm(torch.float32) is not ONEDNN or not suits(hidden, weight):
        return _plain(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    output: Tensor = _Linear.apply(rows.contiguous(), weight.contiguous(), bias)  # type: ignore[no-untyped-call]
    return output.view(*hidden.shape[:-1], -1)


def linears(hidden: Tensor, maps: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, ...]:
    """`linear` of the same hidden states with several (weight, bias).

    In backward the products add up in one gradient, which saves tensors where they cost as much as small products.
    """
    trains = torch.is_grad_enabled() and hidden.requires_grad and not torch.compiler.is_compiling()
    together = trains and len(maps) > 1 and hidden.dtype == torch.float32
    weights = [weight for weight, _ in maps]
    if not together or not all(suits(hidden, one) for one in weights) or active_gemm(torch.float32) is ONEDNN:
        return tuple(linear(hidden, *one) for one in maps)
    rows = hidden.reshape(-1, hidden.shape[-1])
    outputs: tuple[Tensor, ...] = _Linears.apply(rows, *weights, *(bias for _, bias in maps))  # type: ignore[no-untyped-call]
    return tuple(output.view(*hidden.shape[:-1], -1) for output in outputs)


def _plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if hidden.dtype != weight.dtype and not autocast_enabled(hidden.device.type):
        hidden = upcast(hidden)
    return F.linear(hidden, weight, bias)


def suits(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the products of `ops.gemm` can take these: plain tensors on a CPU, a float32 weight, at least one row."""
    return (
        hidden.device.type == "cpu"
        and weight.dtype == torch.float32
        and hidden.dtype in (torch.float32, *HALF)
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


def refuse_second_derivatives(what: str = "the experts' fast path") -> None:
    """To be called in a backward pass, where gradients are enabled only under `create_graph=True`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} has no second derivatives: leave create_graph=True out, or compute the forward inside "
            "`with using(PLAIN):` (pointsman.ops.kernels)"
        )


def forward(rows: Tensor, weight: Tensor, bias: Tensor | None, products: Gemm) -> Tensor:
    """rows [n, in] times weight [out, in] transposed, plus bias."""
    if rows.dtype == weight.dtype:
        return products.linear(rows, weight, bias)
    output = weight.new_empty(len(rows), len(weight))
    for some in _blocks(rows):
        products.linear(rows[some].to(weight.dtype), weight, bias, out=output[some])
    return output


def backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, wanted: Sequence[bool], products: Gemm
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of rows and weight, as far as `wanted`, from that of the output (contiguous, of the weight's dtype)."""
    d_weight = torch.empty_like(weight) if wanted[1] else None
    if rows.dtype == weight.dtype:
        d_rows = products.product(gradient, weight) if wanted[0] else None
        if d_weight is not None:
            products.weight_gradient(d_weight, gradient, rows)
        return d_rows, d_weight
    d_rows = torch.empty_like(rows) if wanted[0] else None
    for some in _blocks(rows):
        if d_rows is not None:
            d_rows[some] = products.product(gradient[some], weight)
        if d_weight is not None:
            products.weight_gradient(d_weight, gradient[some], rows[some].to(weight.dtype), add=some.start > 0)
    return d_rows, d_weight


def _blocks(rows: Tensor) -> list[slice]:
    size = max(256, BLOCK // rows.shape[1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bias = bias is not None
        return forward(rows, weight, bias, ONEDNN)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        wanted = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # create_graph=True: through products that have derivatives themselves
            d_rows = (gradient @ weight).to(rows.dtype) if wanted[0] else None
            d_weight = gradient.t() @ rows.to(weight.dtype) if wanted[1] else None
        else:
            d_rows, d_weight = backward(gradient, rows, weight, wanted, ONEDNN)
        return d_rows, d_weight, gradient.sum(0) if ctx.bias else None


class _Linears(torch.autograd.Function):
    """Several linear maps of the same rows, through BLAS: weights, then as many biases or None."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *maps: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = maps[: len(maps) // 2], maps[len(maps) // 2 :]
        ctx.save_for_backward(rows, *weights)
        return tuple(F.linear(rows, *one) for one in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        wanted, *of_maps = ctx.needs_input_grad
        total = None
        for gradient, weight in zip(gradients, weights, strict=True) if wanted else ():
            if total is None:
                total = gradient @ weight
            elif torch.is_grad_enabled():  # create_graph=True
                total = torch.addmm(total, gradient, weight)
            else:
                total.addmm_(gradient, weight)
        count = len(weights)
        of_weights = (
            gradient.t() @ rows if one else None for gradient, one in zip(gradients, of_maps[:count], strict=True)
        )
        of_biases = (gradient.sum(0) if one else None for gradient, one in zip(gradients, of_maps[count:], strict=True))
        return total, *of_weights, *of_biases
