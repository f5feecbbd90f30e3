"""The router as one kernel (`triton/route.py`): product, gate, top-k and combine weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.kernels.choice import TRITON, Case, tokens_of, with_triton
from pointsman.ops.kernels import plain_wanted
from pointsman.ops.linear import upcast
from pointsman.ops.selection import top_k

MOST_EXPERTS, MOST_K = 256, 32


def route(
    rows: Tensor, weight: Tensor, bias: Tensor | None, gate: str, scale: Tensor | None, k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Logits and probabilities [N, E], experts [N, k] and weights [N, k]; None where the kernel does not take these.

    Args:
        rows: [N, dim], of any floating-point type but float64.
        weight, bias: [E, dim] and [E]; the logits are z = rows W' + b.
        gate: p = "softmax" or "sigmoid" of scale z.
        renormalize: whether a token's k weights are divided by their sum.
    """
    if k > MOST_K or len(weight) > MOST_EXPERTS or torch.float64 in (rows.dtype, weight.dtype):
        return None
    from pointsman.kernels.triton.route import Setting
    from pointsman.kernels.triton.route import route as kernel

    weight, bias = upcast(weight), None if bias is None else upcast(bias)
    scale = weight.new_ones(()) if scale is None else scale
    return kernel(rows, weight, bias, scale, Setting(k, gate, renormalize))


def wanted(hidden: Tensor, num_experts: int, k: int) -> bool:
    """Whether the active choice is the kernel, on the device of these hidden states [..., dim]."""
    if not hidden.is_cuda:
        return False

    def case() -> Case:
        *tokens, dim = hidden.shape
        return tokens_of(math.prod(tokens)), dim, num_experts, k

    return with_triton("gpu_router", hidden, work, case) and not plain_wanted()


def work(name: str, device: torch.device, tokens: int, dim: int, num_experts: int, k: int) -> Callable[[], object]:
    """Forward and backward of a linear router on bfloat16 hidden states."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, dim, device=device, generator=generator, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(num_experts, dim, device=device, generator=generator).mul_(dim**-0.5).requires_grad_()
    gradient = torch.randn(tokens, k, device=device, generator=generator)

    def run() -> object:
        if name == TRITON:
            found = route(hidden, weight, None, "softmax", None, k, True)
            assert found is not None
            weights = found[3]
        else:
            logits = F.linear(hidden.float(), weight)
            weights = torch.softmax(logits, -1).gather(-1, top_k(logits, k))
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.autograd.grad(weights, [hidden, weight], gradient)

    return run
