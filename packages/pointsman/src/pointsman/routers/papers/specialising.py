"""Losses that keep experts apart (Guo et al. 2025, arXiv 2505.22323): options of `smoe`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pointsman.ops.linear import upcast
from pointsman.routers.frame.stage_values import LossInput, Scored
from pointsman.routers.frame.stages import Scorer
from pointsman.routing import RoutingContext

EPS = 1e-6


class Answering(Scorer):
    """The scores, and in training the products of all experts' outputs of each token [N, E, E]."""

    one_process = "with orthogonality each token runs all experts where it is"
    may_need_responses = True
    accepts_half = True

    @property
    def needs_responses(self) -> bool:  # type: ignore[override]
        return self.training

    def forward(self, hidden: Tensor, context: RoutingContext) -> Tensor | Scored:
        found = super().forward(hidden, context)
        if not self.training:
            return found
        if context.responses is None:
            raise ValueError("orthogonality: it asks the experts of the MoE layer: the router is not in one")
        scored = Scored.of(found)
        (products,) = context.responses(_products)
        return replace(scored, extra={**scored.extra, "products": products})


def _products(outputs: Tensor) -> tuple[Tensor]:
    outputs = upcast(outputs)
    return (outputs @ outputs.mT,)


def projections(given: LossInput) -> Tensor:
    """Mean over tokens of sum_(i, j chosen, i != j) |<E_i, E_j> / (<E_j, E_j> + eps) E_j|; virtual experts left out."""
    if "products" not in given.extra:
        return given.logits.new_zeros(())
    products = given.extra["products"].to(given.logits.dtype)
    squares = products.diagonal(dim1=1, dim2=2)  # [N, E]
    each = products.abs() * (squares.clamp_min(EPS**2).sqrt() / (squares + EPS))[:, None]
    chosen = torch.zeros_like(given.logits).scatter_add(
        1, given.experts.clamp_min(0), (given.experts >= 0).to(each.dtype)
    )
    chosen = chosen[:, : given.num_experts]
    others = 1 - torch.eye(given.num_experts, dtype=each.dtype, device=each.device)
    return given.token_mean((each * others * chosen[:, :, None] * chosen[:, None]).sum((1, 2))[:, None]).sum()


def score_variance(given: LossInput) -> Tensor:
    """Minus the sum over experts of the variance of their scores over the real tokens."""
    mean = given.token_mean(given.unmixed)
    return -given.token_mean((given.unmixed - mean).square()).sum()
