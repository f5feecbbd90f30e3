"""Attention with relative positions on a GPU: one aligned product of positions, the rest as flash kernels.

The equation is that of `triton/flash.py`. Shapes: H heads, B sequences, T queries, S keys, D head width.
No probabilities are stored; for a moment there are position products [H B, T, W], in forward and, with their gradient,
in backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pointsman.kernels.choice import with_triton

WIDEST = 128  # head
MOST = 2**30  # position products at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """The arguments of `traced_attention`."""

    query: Tensor
    key_value: Tensor
    positions: Tensor
    content_bias: Tensor
    position_bias: Tensor


def suits(query: Tensor, positions: Tensor, dropout: float) -> bool:
    """Whether the kernels are active and take this attention. They drop no probabilities."""
    heads, batch, length, width = query.shape
    few = heads * batch * length * (positions.shape[1] + 8) <= MOST
    return few and not dropout and width <= WIDEST and query.dtype in DTYPES and with_triton(query)


def _products(inputs: Inputs, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Content queries [H B, T, D], position queries [H, B T, D], positions [H, W, D] and their products [H B, T, W]."""
    query, _, positions, content_bias, position_bias = inputs
    heads, batch, length, width = query.shape
    content, position = (
        ((query + bias[:, None, None]) * scale).contiguous()
        if torch.compiler.is_compiling()  # which loses the strides of `out`
        else torch.add(query, bias[:, None, None], out=query.new_empty(query.shape)).mul_(scale)
        for bias in (content_bias, position_bias)
    )
    position = position.view(heads, batch * length, width)
    more = -positions.shape[1] % 8  # rows of whole 16 bytes
    positions = torch.cat([positions, positions.new_zeros(heads, more, width)], 1) if more else positions.contiguous()
    products = torch.bmm(position, positions.transpose(1, 2)).view(heads * batch, length, -1)
    return content.view(heads * batch, length, width), position, positions, products


def forward(inputs: Inputs, scale: float, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """[H, B, T, D] with the strides of a contiguous [B, T, H, D], and what backward needs."""
    from pointsman.kernels.triton import flash_ops

    content, _, _, products = _products(inputs, scale)
    key, value = (part.flatten(0, 1) for part in inputs.key_value.contiguous().unbind(0))
    given = content, key, value, None, products, key_mask, None
    output, most, total = flash_ops.forward(*given, True, 0.0, len(inputs.query))
    return output.permute(2, 0, 1, 3), most, total


def backward(
    gradient: Tensor, output: Tensor, most: Tensor, total: Tensor, inputs: Inputs, scale: float, key_mask: Tensor | None
) -> Inputs:
    """Gradients of the inputs."""
    from pointsman.kernels.triton import flash_ops

    heads, batch, length, width = inputs.query.shape
    content, position, positions, products = _products(inputs, scale)
    key, value = (part.flatten(0, 1) for part in inputs.key_value.contiguous().unbind(0))
    upper = gradient.contiguous()
    delta = (upper.float() * output).sum(-1).view(heads * batch, length)
    upper = upper.view(heads * batch, length, width)
    given = content, key, value, None, products, key_mask, None
    found = flash_ops.backward(*given, True, 0.0, heads, upper, delta, most, total)
    d_content, d_key, d_value, d_products = found
    d_products = d_products.view(heads, batch * length, -1)
    d_position = torch.bmm(d_products, positions)
    d_positions = torch.bmm(d_products.transpose(1, 2), position)[:, : inputs.positions.shape[1]]
    of_biases = [part.view(heads, -1, width).sum(1, dtype=torch.float32) * scale for part in (d_content, d_position)]
    d_query = d_content.view_as(inputs.query).add_(d_position.view_as(inputs.query)).mul_(scale)
    d_key_value = torch.stack([d_key, d_value]).view_as(inputs.key_value)
    return Inputs(d_query, d_key_value, d_positions, *(part.to(d_query.dtype) for part in of_biases))
