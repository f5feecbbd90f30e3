"""Routers on a GPU as one Triton kernel: product, gate, top-k and combine weights (`ops/triton/route.py`).

It takes routers whose logits are a product with the experts' weights, without mixer, and whose selection is plain
top-k. The others, and those whose kernel does not pay, go stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from pointsman.ops.kernels import plain_wanted
from pointsman.ops.linear import transformed, upcast
from pointsman.ops.on_gpu import TORCH, TRITON, capability, fastest_that_runs, with_triton, without_triton
from pointsman.ops.selection import top_k
from pointsman.routers.frame.select import TopK
from pointsman.routers.frame.stage_values import Selection
from pointsman.routing import RoutingContext

if TYPE_CHECKING:
    from pointsman.routers.frame.router import Router

MOST_EXPERTS, MOST_K = 256, 32
SHAPE = 8192, 1024, 64, 8  # of the timing: tokens, dim, num_experts, k


class Routed(NamedTuple):
    """What the kernel gives: logits and probabilities [B, T, E], and the selection."""

    logits: Tensor
    probs: Tensor
    selection: Selection


def route(router: Router, hidden: Tensor, context: RoutingContext) -> Routed | None:
    """hidden [B, T, dim]; None where the stages are to be run one after the other."""
    if not wanted(hidden) or router.mix is not None or router.replayed is not None or type(router.select) is not TopK:
        return None
    gate = router.normalize.gate_and_scale()
    if (
        gate is None
        or plain_wanted()
        or transformed()
        or torch.compiler.is_exporting()
        or not hidden.numel()
        or router.top_k > MOST_K
    ):
        return None
    product = router.score.product(hidden, context)
    if product is None or len(product.weight) > MOST_EXPERTS or torch.float64 in (hidden.dtype, product.weight.dtype):
        return None
    rows, weight, bias = product
    if not {type(one) for one in (rows, weight, bias) if one is not None} <= {Tensor, Parameter}:
        return None  # sharded over processes
    from pointsman.ops.triton.route import Setting
    from pointsman.ops.triton.route import route as kernel

    name, scale = gate
    flat, shape = rows.reshape(-1, rows.shape[-1]), (*hidden.shape[:2], -1)
    weight, bias = upcast(weight), None if bias is None else upcast(bias)
    scale = weight.new_ones(()) if scale is None else scale
    setting = Setting(router.top_k, name, bool(router.select.renormalize))
    logits, probs, experts, weights = kernel(flat, weight, bias, scale, setting)
    return Routed(logits.view(shape), probs.view(shape), Selection(experts, weights))


def wanted(hidden: Tensor) -> bool:
    """Whether the active choice is the kernel, on this device."""
    return with_triton("gpu_router", hidden, measured)


@cache
def measured(device: torch.device) -> str:
    """The faster of "triton" and "torch" on a CUDA device: forward and backward of a linear router in bfloat16."""
    if without_triton(capability(device)):
        return TORCH
    return fastest_that_runs("router kernels", {name: candidate(name, device) for name in (TRITON, TORCH)}, TORCH)


def candidate(name: str, device: torch.device, shape: tuple[int, int, int, int] = SHAPE) -> Callable[[], object]:
    """Forward and backward of a linear router of this shape, until the device has finished."""
    tokens, dim, num_experts, k = shape
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, dim, device=device, generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(num_experts, dim, device=device, generator=generator).mul_(dim**-0.5).requires_grad_()
    gradient = torch.randn(tokens, k, device=device, generator=generator)
    one = weight.new_ones(())

    def run() -> object:
        with torch.enable_grad():
            if name == TRITON:
                from pointsman.ops.triton.route import SOFTMAX, Setting
                from pointsman.ops.triton.route import route as kernel

                weights = kernel(hidden, weight, None, one, Setting(k, SOFTMAX, True))[3]
            else:
                logits = F.linear(hidden.float(), weight)
                weights = torch.softmax(logits, -1).gather(-1, top_k(logits, k))
                weights = weights / weights.sum(-1, keepdim=True)
            found = torch.autograd.grad(weights, [hidden, weight], gradient)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return found

    return run
