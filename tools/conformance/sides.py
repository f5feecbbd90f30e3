"""Both sides of a row: the sizes and inputs that they share, what our router says, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pointsman import RoutingContext, build_router
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing

DIM, EXPERTS, K, TOKENS, VOCABULARY = 16, 8, 2, 96, 40


@dataclass
class Case:
    """What one side computed.

    Attributes:
        weights: [N, columns], the combine weight of every expert at every token.
        losses: by name.
        leaves: what gradients are taken of, by name; the same names on both sides.
    """

    weights: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    leaves: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row: `compare`, given the folder of originals, computes both sides.

    Attributes:
        original: its name in the table; where: from where it is.
    """

    spec: str
    original: str
    where: str
    compare: Callable[[Path | None], tuple[Case, Case]]


def hidden_states() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, TOKENS, DIM, dtype=torch.float64, generator=generator)


def ids() -> Tensor:
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(4))


def ours(spec: str, k: int = K) -> Any:
    """Our router in float64; Any, as its stages have parameters of their own."""
    torch.manual_seed(1)
    return build_router(spec, dim=DIM, num_experts=EXPERTS, top_k=k, vocab_size=VOCABULARY).double()


def routed(router: Router, leaves: Mapping[str, Tensor], training: bool = True) -> Case:
    """What our router says of the hidden states."""
    hidden = hidden_states().requires_grad_()
    torch.manual_seed(3)
    routing: Routing = router.train(training)(hidden, RoutingContext(token_ids=ids()))
    return Case(routing.dense_weights, routing.losses, {"hidden": hidden, **leaves})


def scattered(weights: Tensor, experts: Tensor, columns: int) -> Tensor:
    """[N, columns] of weights and experts [N, k]."""
    return weights.new_zeros(len(weights), columns).scatter_add(1, experts, weights)


def beside(router: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and the weight for the other side's computation, which our linear router takes too."""
    with torch.no_grad():
        router.score.weight.copy_(weight)
    return hidden_states().requires_grad_(), weight.detach().clone().requires_grad_()


def both(
    router: Any, hidden: Tensor, weight: Tensor, weights: Tensor, losses: Mapping[str, Tensor] | None = None
) -> tuple[Case, Case]:
    """Our linear router's case, and the other side's with these weights and losses."""
    return routed(router, {"weight": router.score.weight}), Case(
        weights, losses or {}, {"hidden": hidden, "weight": weight}
    )
