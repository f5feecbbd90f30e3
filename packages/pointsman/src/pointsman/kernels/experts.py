"""The experts on a GPU: our Triton kernels, or torch's grouped_mm; for a few assignments kernels of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from pointsman.kernels import grouped_mm
from pointsman.kernels.choice import with_triton
from pointsman.ops.feed_forward import ExpertParameters

MOST_FEW = 64  # assignments that the kernels for decoding take


def apply(
    hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor, parameters: ExpertParameters, activation: str,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The experts' combined output on the kernels that are active; arguments are those of `grouped_mm.apply`."""
    if token is not None or not with_triton(hidden):
        return grouped_mm.apply(hidden, weight, token, expert, parameters, activation, dropout)
    if not dropout and _few(hidden, weight, expert, parameters):
        from pointsman.kernels.triton import decode

        output: Tensor = decode.decode(hidden, weight, expert, *parameters, activation)
        return output
    from pointsman.kernels.triton import function

    return function.apply(hidden, weight, expert, parameters, activation, dropout)


def _few(hidden: Tensor, weight: Tensor, expert: Tensor, parameters: ExpertParameters) -> bool:
    """Whether the kernels for decoding take these assignments."""
    given = (hidden, weight, *parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        return False
    weights = (parameters.w_in, parameters.w_out, parameters.w_gate)  # read where they lie: each expert's contiguous
    return takes_few(hidden, expert) and all(one is None or one.stride()[1:] == (one.shape[2], 1) for one in weights)


def takes_few(hidden: Tensor, expert: Tensor) -> bool:
    """Whether so few assignments without gradients have kernels of their own on the device of `hidden`."""
    return expert.numel() <= MOST_FEW and with_triton(hidden)
