"""The contract of a router's flags: what its routing depends on is what it declares. One function a promise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from pointsman.routers.frame.router import Router
from pointsman.routing import Routing, RoutingContext
from pointsman.testing.case import Case, context_for, declared, expect, expect_close, route, segment


@torch.no_grad()
def modes_of_weights(case: Case) -> Iterator[tuple[str, list[Router]]]:
    """In evaluation, then in training: the router, and it with random scoring weights.

    Initial weights that are zero or even can hide what a flag speaks of.
    """
    for (mode, router), (_, other) in zip(case.modes(), case.modes(), strict=True):
        torch.default_generator.manual_seed(11)
        for parameter in other.score.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter))
        yield mode, [router, other]


def by_token(routing: Routing) -> dict[str, Tensor]:
    """Everything in a routing that belongs to a token, [tokens, ...]."""
    found = {name: getattr(routing, name) for name in ("experts", "weights", "probs", "logits")}
    found |= {name: one.reshape(len(routing.probs), -1) for name, one in routing.combine.weights().items()}
    return found


@torch.no_grad()
def causal_flag(case: Case) -> None:
    """`causal` and `training_causal` are true exactly if a change at token t changes no routing before t."""
    for mode, routers in modes_of_weights(case):
        causal = declared(routers[0], "causal")
        changed = False
        for router in routers:
            before = route(router, case.hidden())
            torch.default_generator.manual_seed(0)
            for t in range(1, case.length):
                other = case.hidden()
                other[:, t:] = 3 * torch.randn(case.batch, case.length - t, case.dim)
                after = route(router, other)  # with equal draws
                theirs = by_token(after)
                for name, of_token in by_token(before).items():
                    left = of_token.view(case.batch, case.length, -1)[:, :t]
                    right = theirs[name].view(case.batch, case.length, -1)[:, :t]
                    same = torch.allclose(left, right, atol=1e-6)
                    told = f"declared causal in {mode}, but {name} before token {t} changed with token {t}"
                    expect(same or not causal, told)
                    changed = changed or not same
            if changed:
                break
        expect(changed or causal or not case.must_show, f"declared not causal in {mode}, but no earlier token changed")


def segments(case: Case) -> None:
    """A causal router routes a token at a time, or in segments with the state carried over, as the whole sequence."""
    router, hidden = case.router().eval(), case.hidden()
    if router.stochastic or not router.causal:
        return
    context = context_for(router, hidden)

    def rows(routing: Routing) -> dict[str, Tensor]:
        chosen = torch.zeros(len(routing.probs), case.num_experts + 1).scatter(1, routing.experts + 1, 1)
        given = {"probs": routing.probs, "logits": routing.logits}
        if router.capacity is None and router.batch_invariant:  # else the choice may go by the number of tokens
            given["experts"] = chosen[:, 1:]
        return given

    whole = rows(router(hidden, context))
    for cuts in (range(case.length + 1), (0, 4, 5, case.length)):
        past = None
        for start, stop in pairwise(cuts):
            attention = None if context.attention is None else segment(context.attention, start, stop)
            ids = None if context.token_ids is None else context.token_ids[:, start:stop]
            below = context.below and {name: state[:, start:stop] for name, state in context.below.items()}
            seen = RoutingContext(attention=attention, token_ids=ids, past=past, below=below)
            part = router(hidden[:, start:stop], seen)
            for name, one in rows(part).items():
                expected = whole[name].view(case.batch, case.length, -1)[:, start:stop].flatten(0, 1)
                what = f"{name} of tokens {start} to {stop - 1}, routed after the earlier ones"
                expect_close(one, expected, what, atol=1e-6, rtol=1e-5)
            past = part.carry
            for name, one in (past or {}).items():  # of which models keep the newest positions
                fits = one.dim() > 1 and len(one) == case.batch and one.shape[1] <= stop
                expect(fits, f"carry {name!r}, {list(one.shape)} after {stop} tokens, is not [B, S, ...] of S so far")


@torch.no_grad()
def batch_invariant_flag(case: Case) -> None:
    """`batch_invariant` and `training_batch_invariant` are true exactly if other sequences change nothing."""
    for mode, routers in modes_of_weights(case):
        invariant, stochastic = (declared(routers[0], flag) for flag in ("batch_invariant", "stochastic"))
        hidden, rows, changed, scored = case.hidden(), slice(case.length), set[str](), False
        for router, seed in ((router, seed) for router in routers for seed in range(4)):
            generator = torch.Generator().manual_seed(seed)
            other = 3 * torch.randn(hidden.shape, generator=generator)
            other[0] = hidden[0]
            left, right = route(router, hidden), route(router, other)
            scored |= bool(left.logits.any())
            changed |= _changed(left, right, rows, rows)
            if not stochastic:
                turned = route(router, hidden.flip(0))  # the place in the batch is of the other sequences, too
                changed |= _changed(left, turned, rows, slice(len(turned.experts) - case.length, None))
        if invariant:
            told = f"declared batch invariant in {mode}, but another sequence changed {', '.join(sorted(changed))}"
            expect(not changed, told)
        elif scored and case.must_show:  # equal scores of all experts (THOR's): no mixing changes them
            expect(bool(changed), f"declared not batch invariant in {mode}, but no other sequence changed anything")


def _changed(left: Routing, right: Routing, rows: slice, others: slice) -> set[str]:
    """What differs between the rows of one routing and others of another."""
    return {
        name
        for name in ("experts", "weights", "probs")
        if not torch.allclose(getattr(left, name)[rows], getattr(right, name)[others], 1.3e-6, 1e-5)
    }


@torch.no_grad()
def stochastic_flag(case: Case) -> None:
    """`stochastic` and `training_stochastic` are true exactly if two seeds give two routings; else nothing is drawn."""
    for mode, routers in modes_of_weights(case):
        stochastic, same = declared(routers[0], "stochastic"), True
        # far from uniform probabilities a draw may leave a choice alone; near to it, it shows
        for hidden, router in ((scale * case.hidden(), router) for scale in (100, 1) for router in routers):
            left, right = (route(router, hidden, seed=seed) for seed in (3, 4))
            for name in ("experts", "weights", "probs"):
                same &= torch.equal(*(getattr(one, name).nan_to_num() for one in (left, right)))  # some overflow
        ended = torch.get_rng_state()
        drawn = not torch.equal(ended, torch.default_generator.manual_seed(4).get_state())  # how the last routing began
        expect(stochastic or not drawn, f"declared in {mode} not stochastic, but torch's generator moved")
        told = "stochastic, but two seeds agree" if same else "not stochastic, but two seeds differ"
        expect(same != stochastic or (same and not case.must_show), f"declared in {mode} {told}")
