"""Linear routers with top-k selection: SMoE (Shazeer et al. 2017) and Switch (Fedus et al. 2022)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from pointsman.ops.drawing import own_rows, randn_like
from pointsman.ops.linear import upcast
from pointsman.routers.frame.entries import LayerSpec, NotNegative, Probability, Whole, register_router
from pointsman.routers.frame.scoring import linear
from pointsman.routers.frame.stages import Product, Scorer, Sigmoid, Softmax, Stages
from pointsman.routers.frame.virtual import Kind, virtual_experts
from pointsman.routing import RoutingContext

INIT_STD = 0.02


class LinearScorer(Scorer):
    """z = W h + b, W ~ N(0, 0.02^2), b = 0.

    Args:
        noise: standard deviation of Gaussian noise on the logits, in training only.
        jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter); experts see the clean one.
    """

    accepts_half = True

    def __init__(
        self, dim: int, num_experts: int, *, bias: bool = True, noise: float = 0.0, jitter: float = 0.0
    ) -> None:
        super().__init__()
        self.noise = noise
        self.jitter = jitter
        self.training_stochastic = noise > 0 or jitter > 0
        self.weight = nn.Parameter(torch.randn(num_experts, dim) * INIT_STD)
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor:
        if self.training and self.jitter:
            hidden = upcast(hidden)
            hidden = hidden * own_rows(
                lambda shape: hidden.new_empty(shape).uniform_(1 - self.jitter, 1 + self.jitter),
                hidden.shape,
                self.ranks,
            )
        logits = linear(hidden, self.weight, self.bias)
        if self.training and self.noise:
            logits = logits + self.noise * randn_like(logits, self.ranks)
        return logits

    def plain_linear(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def product(self, hidden: Tensor, context: RoutingContext) -> Product | None:
        return None if self.training and (self.noise or self.jitter) else Product(hidden, self.weight, self.bias)


@register_router("smoe", paper="Shazeer et al. 2017, arXiv 1701.06538; the baseline of all three papers")
def smoe(
    layer: LayerSpec,
    *,
    gate: Literal["softmax", "sigmoid"] = "softmax",
    bias: bool = True,
    noise: NotNegative = 0.0,
    nulls: Whole = 0,
    kind: Kind = "zero",
) -> Stages:
    """A trainable linear router: p = softmax(W h + b), top-k, weights renormalised over the k.

    gate: softmax over all experts, or a sigmoid for each.
    bias: whether the linear map has one.
    noise: standard deviation of Gaussian noise on the logits in training (V-MoE uses 1/E).
    nulls: virtual experts that may be chosen besides the E experts.
    kind: what they give: nothing (zero: AdaMoE), the input (copy), a mix of it and a trained vector (constant), or
        one zero, one copy and the rest constants (mixed: MoE++).
    """
    virtual = virtual_experts("smoe", nulls, kind)
    return Stages(
        LinearScorer(layer.dim, layer.num_experts + nulls, bias=bias, noise=noise),
        Sigmoid() if gate == "sigmoid" else Softmax(),
        virtual=virtual,
    )


@register_router(
    "switch",
    paper="Fedus et al. 2022, arXiv 2101.03961",
    balance=0.01,
    renormalize=False,
    starts_at=lambda layer: 1,
)
def switch(
    layer: LayerSpec, *, gate: Literal["softmax", "sigmoid"] = "softmax", bias: bool = True, jitter: Probability = 0.0
) -> Stages:
    """Switch Transformer: top-1, the weight is the expert's probability, balance loss 0.01.

    gate: softmax over all experts, or a sigmoid for each (X-MoE's sigmoid-gated SMoE: gate=sigmoid:bias=false).
    bias: whether the linear map has one.
    jitter: in training the router's input is multiplied by U(1 - jitter, 1 + jitter) (the paper: 0.01).
    """
    return Stages(
        LinearScorer(layer.dim, layer.num_experts, bias=bias, jitter=jitter),
        Sigmoid() if gate == "sigmoid" else Softmax(),
    )
