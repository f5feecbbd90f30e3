"""Outputs that are no views: a module that `fully_shard` has divided may not return a view that trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoView(torch.autograd.Function):
    """The identity, whose output has the same memory and is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def no_view(tensor: Tensor) -> Tensor:
    """The tensor as no view."""
    if not tensor.requires_grad or torch.compiler.is_compiling() or not tensor._is_view():
        return tensor
    owned: Tensor = NoView.apply(tensor)  # type: ignore[no-untyped-call]
    return owned
