"""Random expert layers, and their float64 answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pointsman.experts import reference
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.routing import Combine, Routing


@dataclass
class Problem:
    """Inputs of `apply_experts`, all leaves that want gradients."""

    hidden: Tensor
    weights: Tensor
    routing: Routing
    parameters: ExpertParameters
    activation: str

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weights, *(tensor for tensor in self.parameters if tensor is not None)]

    def exact(self) -> Problem:
        """The same in float64."""

        def leaf(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().double().requires_grad_()

        hidden, weights = leaf(self.hidden), leaf(self.weights)
        assert hidden is not None
        assert weights is not None
        routing = replace(self.routing, weights=weights)
        if (flat := self.routing.combine.flat) is not None:
            routing = replace(routing, how=Combine(replace(flat, weight=weights)))
        parameters = ExpertParameters(*(leaf(tensor) for tensor in self.parameters))
        return Problem(hidden, weights, routing, parameters, self.activation)

    def reference(self, gradient: Tensor) -> list[Tensor]:
        """Output and gradients of the float64 reference."""
        exact = self.exact()
        output = reference.apply_experts(exact.hidden, exact.routing, exact.parameters, exact.activation)
        return [output.detach(), *torch.autograd.grad(output, exact.leaves, gradient.double())]

    def check(self, apply: Callable[[Problem], Tensor], gradient: Tensor | None = None) -> None:
        """`apply`'s output and all gradients against the float64 reference."""
        if gradient is None:
            gradient = torch.randn_like(self.hidden)
        output = apply(self)
        assert output.dtype == self.hidden.dtype
        results = [output.detach(), *torch.autograd.grad(output, self.leaves, gradient)]
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2, torch.float16: 4e-3}[output.dtype]
        for got, expected in zip(results, self.reference(gradient), strict=True):
            error = float((got.double() - expected).norm())
            assert error <= tolerance * (float(expected.norm()) + math.sqrt(expected.numel()))


def make_problem(
    tokens: int = 40,
    dim: int = 24,
    hidden_dim: int = 32,
    num_experts: int = 6,
    k: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    activation: str = "relu",
    gated: bool = False,
    bias: bool = True,
    dropped: float = 0.0,
    pairs: bool = False,
    favourite: float = 0.0,
    seed: int = 0,
) -> Problem:
    """A random layer with a random routing.

    Args:
        dropped: share of the assignments that go to -1.
        pairs: the routing as (token, expert) pairs, as when experts choose tokens.
        favourite: added to the scores of expert 0: a large value leaves experts without tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

    inward, outward = dim**-0.5, hidden_dim**-0.5
    parameters = ExpertParameters(
        leaf(num_experts, hidden_dim, dim, scale=inward),
        leaf(num_experts, dim, hidden_dim, scale=outward),
        leaf(num_experts, hidden_dim, scale=0.3) if bias else None,
        leaf(num_experts, dim, scale=0.3) if bias else None,
        leaf(num_experts, hidden_dim, dim, scale=inward) if gated else None,
        leaf(num_experts, hidden_dim, scale=0.3) if bias and gated else None,
    )
    logits = torch.randn(tokens, num_experts, generator=generator)
    logits[:, 0] += favourite
    values, experts = logits.topk(k, -1)
    weights = values.softmax(-1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    if dropped:
        experts = experts.masked_fill(torch.rand(experts.shape, generator=generator) < dropped, -1)
    weights.requires_grad_()
    routing = Routing(experts, weights, logits.softmax(-1), logits)
    if pairs:
        flat = routing.pairs
        weights = flat.weight.detach().requires_grad_()
        routing = replace(routing, weights=weights, how=Combine(replace(flat, weight=weights)))
    return Problem(leaf(tokens, dim), weights, routing, parameters, activation)


@pytest.fixture(scope="session")
def problem() -> Callable[..., Problem]:
    return make_problem
