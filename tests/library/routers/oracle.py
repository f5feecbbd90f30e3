"""What the oracles of routers share: a case to route, transcriptions by loops, and the comparison with a router."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pointsman import Router, RoutingContext, build_router
from pointsman.routing import Routing

DIM, EXPERTS, BATCH, LENGTH = 5, 6, 3, 7


@dataclass
class Expected:
    """What a transcription says.

    Attributes:
        experts: of each token, best first; [] for padding.
        weights: of each token, one scalar an expert.
        losses: name -> weighted scalar.
    """

    experts: list[list[int]]
    weights: list[list[Tensor]]
    losses: Mapping[str, Tensor] = field(default_factory=dict)


def router_for(spec: str, k: int = 2, seed: int = 0, experts: int = EXPERTS) -> Router:
    """A float64 router in training whose parameters are N(0, 1): ties and near-ties hide no mistake."""
    torch.manual_seed(seed)
    router = build_router(spec, dim=DIM, num_experts=experts, top_k=k, vocab_size=64).double()
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    return router


def inputs(seed: int = 0, batch: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Hidden states [B, T, dim] in float64, and a mask with padding in the middle and at the end."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, DIM, dtype=torch.float64, generator=generator)
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, length // 2] = mask[-1, length - 1] = length < 2
    return hidden, mask


def ranked(row: Tensor | Sequence[float], k: int) -> list[int]:
    """The k largest, best first; of equal ones the lowest index."""
    values = [float(value) for value in (row.detach() if isinstance(row, Tensor) else row)]
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def softmax(row: Tensor) -> Tensor:
    powers = torch.exp(row - row.detach().max())
    return powers / powers.sum()


def balance_loss(probs: Sequence[Tensor], counted: Sequence[Sequence[int]]) -> Tensor:
    """E sum_i f_i P_i over these tokens: their probabilities, and the experts of each that f counts."""
    num_experts = len(probs[0])
    counts = [sum(experts.count(i) for experts in map(list, counted)) for i in range(num_experts)]
    mean = torch.stack(list(probs)).sum(0) / len(probs)
    return num_experts * sum((count / sum(counts) * mean[i] for i, count in enumerate(counts)), torch.zeros(()))


def compare(router: Router, hidden: Tensor, mask: Tensor, expected: Expected, routing: Routing) -> None:
    """Experts as ranked, weights and losses to 1e-12, and the gradients of all of them.

    `hidden` must be what both were computed from, with requires_grad.
    """
    width = routing.experts.shape[1]
    for got, weight, experts, weights in zip(
        routing.experts.tolist(), routing.weights, expected.experts, expected.weights, strict=True
    ):
        assert got == experts + [-1] * (width - len(experts)) or [e for e in got if e >= 0] == experts
        kept = [place for place, expert in enumerate(got) if expert >= 0]
        assert not weight[[place for place in range(width) if place not in kept]].any()
        for place, wanted in zip(kept, weights, strict=True):
            torch.testing.assert_close(weight[place], wanted, rtol=1e-12, atol=1e-12)
    assert routing.losses.keys() == expected.losses.keys()
    for name, value in expected.losses.items():
        torch.testing.assert_close(routing.losses[name], value, rtol=1e-12, atol=1e-12)
    # one scalar of everything, with coefficients that tell weights apart
    theirs, ours = [], []
    for token, (experts, weights) in enumerate(zip(expected.experts, expected.weights, strict=True)):
        coefficients = [1 / (1 + token + 3 * expert) for expert in experts]
        theirs += [c * weight for c, weight in zip(coefficients, weights, strict=True)]
        row = routing.experts[token].tolist()
        ours += [c * routing.weights[token, row.index(expert)] for c, expert in zip(coefficients, experts, strict=True)]
    theirs += expected.losses.values()
    ours += routing.losses.values()
    wanted = [hidden, *(parameter for parameter in router.parameters() if parameter.requires_grad)]
    left = torch.autograd.grad(torch.stack(ours).sum(), wanted, allow_unused=True, retain_graph=True)
    right = torch.autograd.grad(torch.stack(theirs).sum(), wanted, allow_unused=True)
    for one, other, tensor in zip(left, right, wanted, strict=True):
        zero = torch.zeros_like(tensor)
        torch.testing.assert_close(
            zero if one is None else one, zero if other is None else other, rtol=1e-9, atol=1e-11
        )


def route(router: Router, hidden: Tensor, mask: Tensor | None = None, seed: int = 3) -> Routing:
    """The router's answer with a seeded generator."""
    torch.manual_seed(seed)
    routing: Routing = router(hidden, RoutingContext(padding_mask=mask))
    return routing
