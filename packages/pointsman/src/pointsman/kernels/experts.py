"""The experts on a GPU: our Triton kernels, or torch's grouped_mm."""

from __future__ import annotations

from torch import Tensor

from pointsman.kernels import grouped_mm
from pointsman.kernels.choice import with_triton
from pointsman.ops.feed_forward import ExpertParameters


def apply(
    hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor, parameters: ExpertParameters, activation: str,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The experts' combined output on the kernels that are active; arguments are those of `grouped_mm.apply`."""
    if token is not None or not with_triton(hidden):
        return grouped_mm.apply(hidden, weight, token, expert, parameters, activation, dropout)
    from pointsman.kernels.triton import function

    return function.apply(hidden, weight, expert, parameters, activation, dropout)
