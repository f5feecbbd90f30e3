"""Asking all experts: a function of every expert's output, for routers that let experts compete (CompeteSMoE)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 512
"""Tokens whose experts' outputs are in memory at once; backward computes them again."""


def responses(experts: nn.Module, rows: Tensor, reduce: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`reduce` of all experts' outputs [n, E, dim], differentiable, for all rows [tokens, dim]: tensors [tokens, ...].

    It costs E / k times the chosen experts' work, and in training a second forward.
    """

    def one(chunk: Tensor) -> tuple[Tensor, ...]:
        return reduce(experts.every(chunk))  # type: ignore[operator]

    parts = [checkpoint(one, chunk, use_reentrant=False) for chunk in torch.split(rows, CHUNK)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
