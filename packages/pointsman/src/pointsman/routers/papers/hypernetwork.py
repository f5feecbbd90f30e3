"""The fixed random hypernetwork of HyperRouter, with its two initialisations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pointsman.routers.frame.stages import Stage
from pointsman.routers.papers.topk import INIT_STD


class FrozenLinear(Stage):
    """A linear map whose weight and bias never train: buffers, so that nothing can thaw them.

    The weight is drawn from N(0, std^2), 0.02 by default; `std` may be a column, [width_out, 1].
    """

    def __init__(self, width_in: int, width_out: int, std: float | Tensor = INIT_STD) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", torch.randn(width_out, width_in) * std)
        self.register_buffer("bias", torch.zeros(width_out))

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


def build_hypernetwork(
    embed_dim: int, hyper_dim: int, dim: int, outputs: int, init: str, each: bool, bias: bool = True
) -> nn.Module:
    """H(e) = W2 relu(W1 e + b1) + b2 for `outputs` experts; see `hyperrouter` for `init`."""
    if init == "normal":
        return nn.Sequential(
            FrozenLinear(embed_dim, hyper_dim), nn.ReLU(), FrozenLinear(hyper_dim, outputs * (dim + 1))
        )
    # E[relu^2] is the mean square of what enters: 1, or 2 for e + a_i
    units = hyper_dim * (2 if each else 1)
    std = torch.full((outputs, dim + 1, 1), ((2 if bias else 1) * dim * units) ** -0.5)
    std[:, -1] = (2 * units) ** -0.5
    return nn.Sequential(
        FrozenLinear(embed_dim, hyper_dim, (2 / embed_dim) ** 0.5),
        nn.ReLU(),
        FrozenLinear(hyper_dim, outputs * (dim + 1), std.view(-1, 1)),
    )
