"""Frozen linear routers: SMoE-Dropout (Chen et al. 2023), and the controls for HyperRouter's scale and temperature."""

import math

import torch
from torch import Tensor, nn

from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stages import Scorer, Stages, linear
from pointsman.routers.papers.topk import INIT_STD
from pointsman.routing import RoutingContext


class FrozenLinearScorer(Scorer):
    """z = (W h + b) / t: W ~ N(0, std^2) and b = 0 never train; t is 1, or a learnable scalar that starts at 1."""

    accepts_half = True

    def __init__(self, dim: int, num_experts: int, *, std: float = INIT_STD, learn_temperature: bool = False) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(num_experts, dim) * std)
        self.bias = nn.Buffer(torch.zeros(num_experts))
        self.log_temperature = nn.Parameter(torch.zeros(())) if learn_temperature else None

    def plain_linear(self) -> tuple[Tensor, Tensor]:
        if self.log_temperature is None:
            return self.weight, self.bias
        sharpness = torch.exp(-self.log_temperature.to(self.weight.dtype))
        return self.weight * sharpness, self.bias * sharpness

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        return linear(hidden, *FrozenLinearScorer.plain_linear(self))  # also where a choice has extended it


@register_router("smoe-dropout", paper="Chen et al. 2023, arXiv 2303.01610")
def smoe_dropout(layer: LayerSpec) -> Stages:
    """SMoE-Dropout: a linear router drawn at random, N(0, 0.02^2), that never trains; trained with a growing k."""
    return Stages(FrozenLinearScorer(layer.dim, layer.columns))


@register_router("frozen-scaled", paper="control: HyperRouter's initial scale without its training")
def frozen_scaled(layer: LayerSpec) -> Stages:
    """A frozen linear router with the standard deviation that HyperRouter's weights start at.

    std = 0.02^2 sqrt(embed_dim * hyper_dim / 2) with embed_dim = dim and hyper_dim = 256: about 0.072 at dim 256.
    """
    return Stages(FrozenLinearScorer(layer.dim, layer.columns, std=INIT_STD**2 * math.sqrt(layer.dim * 256 / 2)))


@register_router("frozen-temperature", paper="control: HyperRouter's learnable scale without its direction")
def frozen_temperature(layer: LayerSpec) -> Stages:
    """A frozen linear router N(0, 0.02^2) with one learnable temperature t: z = W h / t, t = exp(parameter), from 1."""
    return Stages(FrozenLinearScorer(layer.dim, layer.columns, learn_temperature=True))
