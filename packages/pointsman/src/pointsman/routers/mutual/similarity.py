"""Queries, keys and values of Similarity-Inform, softmax_j(u_i' W u_j / tau), for `streaming.inform`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops.visible import Prepared

UNIT_FLOOR = 1e-6  # of a token's norm


@dataclass(frozen=True)
class Similarity:
    """Makes scores of tokens.

    Attributes:
        unit: u is the token over its norm; otherwise the token itself.
        learned: there is a W; otherwise it is the identity.
        past: there are earlier tokens.
    """

    unit: bool
    learned: bool
    past: bool

    def __call__(self, *tensors: Tensor) -> Prepared:
        """Of probs [N, T, E], tokens [N, T, dim], (past probs and tokens,) tau, (W [dim, dim])."""
        probs, tokens, *rest = tensors
        length = tokens.shape[1]
        if self.past:
            before_probs, before_tokens, *rest = rest
            probs = torch.cat([before_probs.to(probs.dtype), probs], 1)
            tokens = torch.cat([before_tokens.to(tokens.dtype), tokens], 1)
        scale = rest[0].to(probs.dtype).rsqrt()  # on both sides of the product
        tokens = unit(tokens, scale) if self.unit else tokens * scale
        query = tokens[:, tokens.shape[1] - length :]
        return Prepared(query @ rest[1].to(probs.dtype) if self.learned else query, tokens, probs)


def unit(rows: Tensor, scale: Tensor) -> Tensor:
    """scale * rows / |rows|, each row's norm at least 1e-6, with fewer passes over memory than autograd.

    `scale` gets no gradient.
    """
    units: Tensor = _Unit.apply(rows, scale)  # type: ignore[no-untyped-call]
    return units


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scale: Tensor) -> Tensor:
        factor = scale / torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(UNIT_FLOOR)
        units: Tensor = rows * factor
        ctx.save_for_backward(units, factor, scale)
        return units

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        units, factor, scale = ctx.saved_tensors
        along = torch.linalg.vecdot(units, gradient).unsqueeze(-1).div_(scale * scale)
        return torch.addcmul(gradient, units, along, value=-1).mul_(factor), None
