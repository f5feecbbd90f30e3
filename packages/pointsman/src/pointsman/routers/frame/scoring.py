"""Router scores: a tall, narrow matrix product, which torch.compile treats as one opaque node (the same product gives
the same bits, and so the same choice of experts); on a GPU score, gate and selection are one kernel (`route`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from pointsman.kernels import router as kernel
from pointsman.ops import linear as plain
from pointsman.ops.gemm import choose
from pointsman.ops.kernels import active_code
from pointsman.routers.frame.stage_values import Scores, Selection
from pointsman.routers.frame.stages import Normalizer, Scorer, Selector, TopK
from pointsman.routing import RoutingContext

FEW = 256  # rows up to which the faster product saves less than its call costs


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., dim] times weight [E, dim] transposed, plus bias [E]: [..., E], in at least float32.

    Args:
        hidden: of any precision; upcast to at least float32, like weight and bias.
    """
    dtype = torch.float32 if hidden.dtype in plain.HALF else hidden.dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if torch.compiler.is_exporting() or hidden.numel() <= FEW * hidden.shape[-1]:  # exported: for any number of rows
        return F.linear(hidden if hidden.dtype == dtype else hidden.to(dtype), weight, bias)
    if torch.compiler.is_compiling() and plain.suits(hidden, weight):
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        scores: Tensor = score(rows, weight.contiguous(), bias, active_code().split(",")[1])
        return scores.view(*hidden.shape[:-1], -1)
    return plain.linear(hidden, weight, bias)


@torch.library.custom_op("pointsman::score", mutates_args=())
def score(rows: Tensor, weight: Tensor, bias: Tensor | None, gemm: str) -> Tensor:
    """rows [n, dim], contiguous, times weight [E, dim] transposed, plus bias; `gemm` as of `Kernels`."""
    return plain.forward(rows, weight, bias, choose(gemm, weight.dtype))


@score.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, gemm: str) -> Tensor:
    return weight.new_empty(rows.shape[0], weight.shape[0])


@torch.library.custom_op("pointsman::score_backward", mutates_args=())
def score_backward(gradient: Tensor, rows: Tensor, weight: Tensor, gemm: str) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight."""
    d_rows, d_weight = plain.backward(gradient.contiguous(), rows, weight, (True, True), choose(gemm, weight.dtype))
    assert d_rows is not None
    assert d_weight is not None
    return d_rows, d_weight


@score_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, gemm: str) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, bias, ctx.gemm = inputs
    ctx.bias = bias is not None
    ctx.save_for_backward(rows, weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight = score_backward(gradient, *ctx.saved_tensors, ctx.gemm)
    return rows, weight, gradient.sum(0) if ctx.bias else None, None


score.register_autograd(_backward, setup_context=_setup_context)


def route(
    stages: tuple[Scorer, Normalizer, Selector], top_k: int, hidden: Tensor, context: RoutingContext
) -> tuple[Scores, Selection] | None:
    """hidden [B, T, dim]; None where the stages are to be run one after the other.

    The kernel takes logits that are a product with the experts' weights, a plain top-k, and no mixer.
    """
    score, normalize, select = stages
    gate = normalize.gate_and_scale() if type(select) is TopK else None
    if gate is None or plain.transformed() or torch.compiler.is_exporting() or not hidden.numel():
        return None
    product = score.product(hidden, context)
    if product is None:
        return None
    rows, weight, bias = product
    if not {type(one) for one in (rows, weight, bias) if one is not None} <= {Tensor, Parameter}:
        return None  # sharded over processes
    found = kernel.route(rows.reshape(-1, rows.shape[-1]), weight, bias, *gate, top_k, bool(select.renormalize))
    if found is None:
        return None
    logits, probs, experts, weights = found
    shape = (*hidden.shape[:2], -1)
    logits = logits.view(shape)
    return Scores(logits, probs.view(shape), logits), Selection(experts, weights)
