"""The router as one kernel (`triton/route.py`): product, gate, top-k and combine weights."""

from __future__ import annotations

import torch
from torch import Tensor

from pointsman.ops.linear import upcast

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
    from pointsman.kernels.triton.route import forward

    weight, bias = upcast(weight), None if bias is None else upcast(bias)
    scale = weight.new_ones(()) if scale is None else scale
    found: tuple[Tensor, Tensor, Tensor, Tensor] = forward(rows, weight, bias, scale, k, gate, renormalize)
    return found
