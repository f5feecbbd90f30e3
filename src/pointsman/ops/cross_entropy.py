"""Cross entropy of a linear output layer over a large vocabulary, in chunks of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops.gemm import BLAS, Gemm, choose
from pointsman.ops.kernels import Kernels, measure_kernels

ELEMENTS = 2**25  # logits that live at once: 128 MB in float32


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, kernels: Kernels | None = None
) -> Tensor:
    """-log softmax(W h + b)[target] for each token, without keeping the logits.

    Args:
        hidden: [tokens, dim].
        weight, bias: [vocabulary, dim], [vocabulary].
        targets: [tokens] int64, each in the vocabulary.
        kernels: what `measure_kernels` chose for this run; None: what it chooses for this process.

    Returns:
        [tokens], nats, at least float32. Under autocast the products run in autocast's dtype.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    gemm = choose((kernels or measure_kernels()).gemm, dtype) if device == "cpu" else BLAS
    losses: Tensor = _LinearCrossEntropy.apply(hidden.to(dtype), weight, bias, targets, gemm)  # type: ignore[no-untyped-call]
    return losses


def _logits(rows: Tensor, weight: Tensor, bias: Tensor, gemm: Gemm) -> Tensor:
    logits = gemm.linear(rows, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.add_(bias.to(logits.dtype))


def _rows(tokens: int, vocabulary: int) -> int:
    return max(1, min(tokens, ELEMENTS // vocabulary))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, gemm: Gemm) -> Tensor:
        losses, normalizers = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            size = _rows(len(hidden), len(weight))
            for start in range(0, len(hidden), size):
                rows = slice(start, start + size)
                logits = _logits(hidden[rows], cast, bias, gemm)
                normalizer = torch.logsumexp(logits, -1)
                normalizers.append(normalizer)
                losses.append(normalizer - logits.gather(1, targets[rows, None])[:, 0])
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(normalizers))
        ctx.gemm = gemm
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers = ctx.saved_tensors
        gemm: Gemm = ctx.gemm
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight)
        part = weight.new_empty(weight.shape, dtype=hidden.dtype)
        d_bias = torch.zeros_like(bias)
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            size = _rows(len(hidden), len(weight))
            for start in range(0, len(hidden), size):
                rows = slice(start, start + size)
                d_logits = _logits(hidden[rows], cast, bias, gemm).sub_(normalizers[rows, None]).exp_()
                d_logits.scatter_add_(1, targets[rows, None], d_logits.new_full((len(d_logits), 1), -1))
                d_logits.mul_(gradient[rows, None])
                d_bias += d_logits.sum(0).to(bias.dtype)
                d_logits = d_logits.to(hidden.dtype)
                gemm.product_into(d_hidden[rows], d_logits, cast)
                gemm.weight_gradient(part, d_logits, hidden[rows])
                d_weight += part
        return d_hidden, d_weight, d_bias, None, None
