"""The experts on a GPU: our Triton kernels, or torch's grouped_mm; for a few assignments kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pointsman.kernels import grouped_mm
from pointsman.kernels.choice import TRITON, Case, tokens_of, with_triton
from pointsman.ops.feed_forward import ExpertParameters

MOST_FEW = 64  # assignments that the kernels for decoding take


def apply(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
) -> Tensor:
    """The experts' combined output on the kernels that are active; arguments are those of `grouped_mm.apply`."""
    if token is None and not dropout and _few(hidden, weight, expert, parameters):
        from pointsman.kernels.triton import decode

        return decode.apply(hidden, weight, expert, parameters, activation)
    return _many(hidden, weight, token, expert, parameters, activation, dropout)


def _many(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
) -> Tensor:
    if token is None and with_triton("gpu", hidden, work, lambda: case_of(hidden, expert.shape[1], parameters)):
        from pointsman.kernels.triton import function

        return function.apply(hidden, weight, expert, parameters, activation, dropout)
    return grouped_mm.apply(hidden, weight, token, expert, parameters, activation, dropout)


def _few(hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters) -> bool:
    """Whether the kernels for decoding take these assignments."""
    given = (hidden, weight, *parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return False
    weights = (parameters.w_in, parameters.w_out, parameters.w_gate)  # read where they lie: each expert's contiguous
    return takes_few(hidden, expert, parameters) and all(
        one is None or one.stride()[1:] == (one.shape[2], 1) for one in weights
    )


def takes_few(hidden: Tensor, expert: Tensor, parameters: ExpertParameters) -> bool:
    """Whether so few assignments without gradients have kernels of their own on the device of `hidden`."""
    return expert.numel() <= MOST_FEW and with_triton(
        "gpu_decode", hidden, work_few, lambda: case_of(hidden, expert.shape[1], parameters)
    )


def case_of(hidden: Tensor, k: int, parameters: ExpertParameters) -> Case:
    """The case of `work`: tokens, dim, hidden_dim, experts, k, gated, dtype."""
    experts, hidden_dim, dim = parameters.w_in.shape
    return tokens_of(len(hidden)), dim, hidden_dim, experts, k, parameters.w_gate is not None, hidden.dtype


def _draw(
    device: torch.device, tokens: int, dim: int, hidden_dim: int, experts: int, k: int, gated: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, None, Tensor, ExpertParameters, str, float]:
    """Arguments of `apply`."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(size, device=device, generator=generator, dtype=dtype)
        return drawn.mul_(size[-1] ** -0.5).requires_grad_()

    gate = draw(experts, hidden_dim, dim) if gated else None
    parameters = ExpertParameters(draw(experts, hidden_dim, dim), draw(experts, dim, hidden_dim), w_gate=gate)
    values, expert = torch.rand(tokens, experts, device=device, generator=generator).topk(k, -1)
    return draw(tokens, dim), values.requires_grad_(), None, expert, parameters, "silu" if gated else "relu", 0.0


def work(name: str, device: torch.device, *case: Any) -> Callable[[], object]:
    """Forward and backward of a layer."""
    hidden, weight, _, expert, parameters, activation, _ = given = _draw(device, *case)
    leaves = [hidden, weight, *(one for one in parameters if one is not None)]

    def run() -> object:
        if name == TRITON:
            from pointsman.kernels.triton import function

            output = function.apply(hidden, weight, expert, parameters, activation, 0.0)
        else:
            output = grouped_mm.apply(*given)
        return torch.autograd.grad(output, leaves, output.detach())

    return run


def work_few(name: str, device: torch.device, *case: Any) -> Callable[[], object]:
    """Forward of a few tokens without gradients, through the kernels for decoding or those of many."""
    hidden, weight, _, expert, parameters, activation, _ = given = _draw(device, *case)

    def run() -> object:
        from pointsman.kernels.triton import decode

        with torch.no_grad():
            return decode.apply(hidden, weight, expert, parameters, activation) if name == TRITON else _many(*given)

    return run
