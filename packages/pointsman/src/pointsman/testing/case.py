"""What the checks of the contract share: a router to build, inputs for it, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pointsman.layer import MoE
from pointsman.routers.frame.registry import build_router
from pointsman.routers.frame.router import Router
from pointsman.routing import AttentionTrace, Routing, RoutingContext

VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """One router spec and the sizes that it is checked at.

    Attributes:
        spec: the router, as `build_router` takes it.
        dim: width of the hidden states.
        num_experts: E.
        batch, length: sequences, and tokens in each.
        must_show: whether what a router admits (a look ahead, a draw, a loss) must be seen at these sizes.
    """

    spec: str
    dim: int = 16
    num_experts: int = 4
    batch: int = 3
    length: int = 11
    must_show: bool = True

    def router(self, *, seed: int = 1, **options: object) -> Router:
        """A router of this spec, with the same weights at every call with the same seed."""
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: 1 ms for each kind of device that is absent
        return build_router(self.spec, dim=self.dim, num_experts=self.num_experts, vocab_size=VOCABULARY, **options)  # type: ignore[arg-type]

    def layer(self, **options: object) -> MoE:
        """A layer with this router, with the same weights at every call."""
        torch.default_generator.manual_seed(1)
        return MoE(self.dim, 16, self.num_experts, router=self.spec, vocab_size=VOCABULARY, **options)  # type: ignore[arg-type]

    def hidden(self) -> Tensor:
        """Hidden states [batch, length, dim], the same at every call."""
        generator = torch.Generator().manual_seed(5)
        return torch.randn(self.batch, self.length, self.dim, generator=generator)

    def modes(self) -> Iterator[tuple[str, Router]]:
        """The router in evaluation, then in training."""
        for mode in ("evaluation", "training"):
            yield mode, self.router().train(mode == "training")


def attention_trace(hidden: Tensor, heads: int = 2, width: int = 5) -> AttentionTrace:
    """A causal attention over `hidden` [B, T, dim] with fixed weights: a query, key or value depends on one token."""
    generator = torch.Generator().manual_seed(7)

    def project(rows: int) -> Tensor:
        return torch.randn(rows, hidden.shape[-1], generator=generator).to(hidden.dtype) / 5

    query, key, value = (
        nn.functional.linear(hidden, project(heads * width)).view(*hidden.shape[:2], heads, width).transpose(1, 2)
        for _ in range(3)
    )
    out_weight = torch.randn(heads, width, hidden.shape[-1], generator=generator).to(hidden.dtype) / 5
    scores = (query @ key.transpose(-1, -2) * width**-0.5).masked_fill(
        torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).triu(1), float("-inf")
    )
    output = torch.einsum("bhtd,hdo->bto", scores.softmax(-1) @ value, out_weight)
    return AttentionTrace(query, key, value, out_weight, output, width**-0.5)


def segment(whole: AttentionTrace, start: int, stop: int) -> AttentionTrace:
    """The trace of tokens `start:stop` in a model that keeps all earlier tokens in its memory."""
    query, output = whole.query[:, :, start:stop], whole.output[:, start:stop]
    return replace(whole, query=query, key=whole.key[:, :, :stop], value=whole.value[:, :, :stop], output=output)


def context_for(router: Router, hidden: Tensor, **fields: object) -> RoutingContext:
    """A context with everything that the router needs."""
    needs = router.needs
    ids = (torch.arange(hidden.shape[1]) % VOCABULARY).expand(hidden.shape[:2])
    scales = torch.arange(1.0, router.num_experts + 1)[:, None].to(hidden.dtype)

    def fixed(reduce: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return reduce(torch.tanh(scales * hidden.flatten(0, 1)[:, None]))  # experts E_e(h) = tanh((e + 1) h)

    context = RoutingContext(
        attention=attention_trace(hidden) if "attention" in needs else None,
        token_ids=ids if "token_ids" in needs else None,
        responses=fixed if router.score.needs_responses else None,
        below={
            name: torch.linspace(-1, 1, width).to(hidden.dtype).expand(*hidden.shape[:2], width)
            for name, width in router.score.below.items()
        }
        or None,
    )
    return replace(context, **fields)  # type: ignore[arg-type]


def route(router: Router, hidden: Tensor, seed: int = 3, **fields: object) -> Routing:
    """Routes `hidden` with a seeded generator; `fields` replace those of the context."""
    before = hidden.detach().clone()
    torch.default_generator.manual_seed(seed)
    routing: Routing = router(hidden, context_for(router, hidden, **fields))
    expect_equal(hidden, before, "the router changes the hidden states in place; the layer's experts read them, too")
    return routing


def declared(router: Router, flag: str) -> bool:
    """What the router declares in its present mode: whether it is `causal`, `batch_invariant` or `stochastic`."""
    return bool(getattr(router, f"training_{flag}" if router.training else flag))


def drops(router: Router) -> bool:
    """Whether a token may have fewer than k experts: by a limit of capacity, or since k is a cap."""
    return router.capacity is not None or router.ragged


class BrokenPromiseError(AssertionError):
    """What `expect` raises: a promise that does not hold, and no assertion of a router's own."""


def expect(condition: bool | Tensor, message: str) -> None:
    """BrokenPromiseError with the message, also under `python -O`."""
    if not condition:
        raise BrokenPromiseError(message)


def expect_equal(left: Tensor, right: Tensor, what: str) -> None:
    expect(torch.equal(left, right), what)


def expect_close(left: Tensor, right: Tensor, what: str, rtol: float | None = None, atol: float | None = None) -> None:
    try:
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise BrokenPromiseError(f"{what}: {' '.join(str(error).split())}") from None


def expect_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, rtol: float, atol: float) -> None:
    """The same names on both sides, and close values under each."""
    one_side = ", ".join(sorted(found.keys() ^ wanted.keys()))
    expect(not one_side, f"{what}: only with or only without: {one_side}")
    for name, one in wanted.items():
        expect_close(found[name], one, f"{what}: {name}", rtol=rtol, atol=atol)
