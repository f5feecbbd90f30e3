"""The two terms of an MoE layer's Jacobian: the gradient through the experts and the gradient through the router."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from pointsman.diagnostics.base import Diagnostic, Moments, chosen, number, ratio
from pointsman.diagnostics.observe import evaluating
from pointsman.layer import MoE
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext

TERMS = ("j1", "j2", "both")


class JacobianTerms(Diagnostic):
    """dy/dh = J1 + J2 of y = sum_j w_j E_j(h), for gradients g = dL/dy.

    HyperRouter, Eqs. 3 to 5 (and X-MoE, Eqs. 4 to 6, whose J1 has the residual connection's identity on top):
        J1 = sum_j w_j dE_j/dh,        J2 = sum_j E_j(h) (dw_j/dh)^T,
        J2^T g = sum_i c_i W_i,        c_i = sum_j w_j (1[i=j] - w_i) (E_j(h)^T g) for softmax weights of a linear
    router W over the chosen k. Both are computed by autograd, for any router and experts, y as a function of h and w:
    J1 with constant weights, J2 through the weights alone. Weights are also those on the experts' inputs
    (`weigh=input`), of virtual experts, of means (`default`) and of slots (`soft`). Shared experts and auxiliary losses
    do not contribute. J2 = 0 at k = 1 with renormalised weights and for routers without a gradient. With a mixer, J2^T
    g of a token includes the gradients of other tokens through mixing.

    `gradient` for J1^T g, J2^T g and their sum: `norm_mean` over tokens; `rank` of the [tokens, dim] matrix (singular
    values s above dim eps max(s), eps that of the hidden states' dtype, and above sqrt(dim eps_64) max(s));
    `effective_rank` = exp(H(s^2 / sum s^2)); `in_span`: the share of the sum of squares that lies in the router's span.
    That is the span of the rows W_i (X-MoE's cosine: of the projection's); `span_rank` is its dimension, `span_share` =
    span_rank / dim is the value of a random direction. For a linear router J2's `in_span` is 1 by Eq. 3; also for
    HyperRouter, whose W = H(e) is constant in h, but training e changes the span. Ranks need at least float32; else
    None.

    Args:
        layer: the MoE layer.
    """

    def __init__(self, layer: MoE) -> None:
        self.layer: MoE | None = layer
        self.eps = 0.0
        span = router_span(layer.router)
        self._basis = None if span is None or not span.isfinite().all() else _row_basis(span)
        self.moments = {name: Moments() for name in TERMS}
        self.second: Tensor | None = None  # [3, dim, dim]: sums of outer products of the gradients

    def __getstate__(self) -> dict[str, Any]:
        """The state without the layer, for merging in another process."""
        return {**vars(self), "layer": None}

    def merge(self, other: Self) -> Self:
        for name, moments in self.moments.items():
            moments.merge(other.moments[name])
        if other.second is not None:
            self._add(second=other.second)
        self.eps = max(self.eps, other.eps)
        return self

    def update(
        self, hidden: Tensor, gradient: Tensor, context: RoutingContext | None = None, mask: Tensor | None = None
    ) -> None:
        """Adds one forward: `hidden` [B, T, dim], the layer's input, and `gradient`, that of its output.

        `mask` [B, T] bool, True for tokens that count; padding never counts.
        """
        assert self.layer is not None, "merged states take no updates"
        layer = self.layer
        hidden = hidden.detach().to(next(layer.experts.parameters()).dtype)  # under autocast the dtypes may differ
        hidden = hidden[None] if hidden.dim() == 2 else hidden
        flat = hidden.flatten(0, 1)
        gradient = gradient.detach().to(flat.dtype).reshape(flat.shape)
        with evaluating(layer), torch.enable_grad():
            into_router = hidden.clone().requires_grad_()
            routing: Routing = layer.router(into_router, context)
            into_experts = flat.clone().requires_grad_()
            weights = {name: one.detach().clone().requires_grad_() for name, one in _weights(routing).items()}
            own = routing.detach()
            given = replace(own, weights=weights["weights"], how=own.combine.weighted(weights))
            output: Tensor = given.combine(layer, into_experts, given)[0]
            first, *of_weights = torch.autograd.grad(
                output, (into_experts, *weights.values()), gradient, allow_unused=True, materialize_grads=True
            )
            second = _vjp(tuple(_weights(routing).values()), into_router, of_weights).flatten(0, 1)
            real = (chosen(routing, None, virtual=True) >= 0).any(-1)
            real = real if mask is None else real & mask.reshape(-1)
            terms = torch.stack([first, second, first + second.to(first.dtype)]).double().masked_fill(~real[:, None], 0)
            for term, values in zip(TERMS, terms, strict=True):
                self.moments[term].add(values.norm(dim=-1), real)
            self._add(second=terms.mT @ terms)
        self.eps = max(self.eps, torch.finfo(hidden.dtype).eps)

    def result(self) -> dict[str, Any]:
        gradient: dict[str, dict[str, Any]] = {}
        traces = [] if self.second is None else [float(one.trace()) for one in self.second]
        least = max(traces, default=0.0) * min(self.eps, torch.finfo(torch.float32).eps) ** 2  # rounding
        for index, term in enumerate(TERMS):
            second = None if self.second is None else self.second[index].cpu()
            gradient[term] = {"norm_mean": self.moments[term].mean, **self._spectrum(second, least)}
        span = None if self._basis is None else self._basis.shape[0]
        width = None if self.second is None else self.second.shape[-1]
        return {
            "tokens": self.moments["j1"].count,
            "gradient": gradient,
            "norm_ratio": ratio(gradient["j2"]["norm_mean"], gradient["j1"]["norm_mean"]),
            "span_rank": span,
            "span_share": ratio(span, width),
        }

    def _spectrum(self, second: Tensor | None, least: float) -> dict[str, Any]:
        found: dict[str, Any] = {"rank": None, "effective_rank": None, "in_span": None}
        if second is None or not second.isfinite().all():
            return found
        squares = torch.linalg.eigvalsh(second).clamp_min(0)
        total = squares.sum()
        if not total > least:
            return {**found, "rank": 0}
        relative = second.shape[0] * self.eps
        if relative < 0.01:
            floor = second.shape[0] * torch.finfo(torch.float64).eps  # the rounding error of eigvalsh
            found["rank"] = int((squares > max(relative**2, floor) * squares.max()).sum())
        found["effective_rank"] = number(torch.special.entr(squares / total).sum().exp())
        if self._basis is not None:
            basis = self._basis.cpu()
            found["in_span"] = number(((basis @ second) * basis).sum() / second.trace())
        return found


@torch.no_grad()
def router_span(router: Router) -> Tensor | None:
    """Rows [r, dim] whose span contains every gradient of the router's logits by a token; None if unknown."""
    linear = router.score.plain_linear()
    if linear is not None:
        return linear[0].detach()
    projection = getattr(router.score, "projection", None)
    return projection.weight.detach() if isinstance(projection, nn.Linear) else None


def _weights(routing: Routing) -> dict[str, Tensor]:
    """All weights that enter the output, by name: [tokens, …], of slots [B, T, E, P]."""
    return {"weights": routing.weights, **routing.combine.weights()}


def _vjp(outputs: Sequence[Tensor], inputs: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    used = [(one, vector) for one, vector in zip(outputs, vectors, strict=True) if one.requires_grad]
    if not used:
        return torch.zeros_like(inputs)
    sources, given = zip(*used, strict=True)
    (found,) = torch.autograd.grad(sources, inputs, given, retain_graph=True, materialize_grads=True)
    return found


def _row_basis(rows: Tensor) -> Tensor:
    """Orthonormal basis [rank, dim] of the span of rows, float64."""
    _, singular, right = torch.linalg.svd(rows.double(), full_matrices=False)
    limit = max(rows.shape) * torch.finfo(rows.dtype).eps * singular[0]
    basis: Tensor = right[singular > limit]
    return basis
