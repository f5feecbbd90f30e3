"""What the adapters share: a router that the engine's layer can carry, and the delivery of what it returns.

B sequences, T tokens each, E experts, k chosen ones.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import added_up
from pointsman.control import step_end as step_end_of
from pointsman.delivery import Deliver
from pointsman.parallel.shard import without_scalars
from pointsman.ranks import every_rank
from pointsman.routers.frame.registry import build_router, parse_spec
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing

PROBE = 256
"""Tokens that a router is tried on."""


def carried(
    engine: str, spec: str, *, dim: int, num_experts: int, top_k: int, ragged: bool = False, dropped: bool = False,
    trains: bool = True,
) -> Router:  # fmt: skip
    """The router of a spec, if an engine can carry it.

    Args:
        engine: its name, for messages.
        ragged: whether its layer takes another number of experts for each token, and experts that choose tokens.
        dropped: whether its layer takes a token without an expert.
        trains: whether it trains the router.

    Raises:
        ValueError: the spec is none, or the engine's layer hands over less than the router needs, or takes less than it
            returns.
    """

    def refuse(why: str) -> ValueError:
        return ValueError(f"{engine}: router {spec!r}: {why}")

    parsed = parse_spec(spec)
    if parsed.mixer is not None:
        raise refuse("a mixer reads the attention before the layer and earlier tokens, which this layer does not get")
    router = build_router(spec, dim=dim, num_experts=num_experts, top_k=top_k, vocab_size=2).train(trains)
    if router.needs:
        raise refuse(f"it needs {', '.join(sorted(router.needs))}, which this layer does not get")
    if router.objective is not None:
        raise refuse(f"its objective, {router.objective}, takes two passes a step, which the engine does not make")
    if router.score.may_need_responses:
        raise refuse("it asks all experts for their outputs, which this layer computes after the choice")
    if router.virtual:
        raise refuse("it has virtual experts, which this layer does not have")
    if not dropped and {"capacity", "eval_capacity"} & {*parsed.options, *parsed.choice_options}:
        raise refuse("capacity drops assignments, and this layer takes k experts for every token")
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        routing = router(100 * torch.randn(1, PROBE, dim))  # sure choices
    if routing.above is not None:
        raise refuse("it hands a state to the sparse layer above, which the engine does not pass on")
    if routing.carry is not None or not router.score.causal:
        raise refuse("its scores look at other tokens of the sequence, which this layer does not tell apart")
    if router.needs_moe and not (ragged and not routing.requested):
        raise refuse("its experts' outputs are not combined by a weighted sum of k, the only one that this layer has")
    if not ragged and (router.ragged or routing.experts.shape[-1] != top_k):
        raise refuse("the number of experts differs between tokens, and this layer takes k for every token")
    if not (ragged or dropped or routing.experts.is_meta) and bool((routing.experts < 0).any()):
        raise refuse("it drops choices, and this layer takes k experts for every token")
    without_scalars(router)  # the engines' FSDP refuses parameters without dimensions
    return router


def deliver(weights: Tensor, router: Router, routing: Routing, scale: Tensor) -> Tensor:
    """The same combine weights, whose backward sends `scale` into each loss and gathers the router's statistics, once.

    Under activation checkpointing that backward runs once, too.
    """
    losses = [*routing.losses.values()]
    gather = router.gather if router.training and routing.statistics else None
    if not (losses or gather) or not torch.is_grad_enabled() or not (weights.requires_grad or gather):
        return weights
    weights = weights if weights.requires_grad else weights.detach().requires_grad_()  # of frozen scores: for `gather`
    found: Tensor = Deliver.apply(weights, scale, gather, routing.statistics, None, *losses)  # type: ignore[no-untyped-call]
    return found


def dense(routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights [B * T, E], 0 where an expert was not chosen, and the choice [B * T, E] bool."""
    weight, token, expert = routing.assignments
    tokens, count = routing.probs.shape[0], routing.num_experts
    if token is None:
        token = torch.arange(tokens, device=expert.device)[:, None].expand_as(expert)
    place = (token * (count + 1) + expert + 1).reshape(-1)  # column 0 is for none
    zeros = weight.new_zeros(tokens * (count + 1))
    chosen = zeros.detach().bool().index_fill(0, place, True).view(tokens, -1)[:, 1:]
    return zeros.index_add(0, place, weight.reshape(-1)).view(tokens, -1)[:, 1:], chosen


def step_end(model: nn.Module, group: Any = None) -> None:
    """Once after each optimizer step: `pointsman.step_end`, with what was counted added up over ranks; where these ran
    other layers in this step it does not count, with a warning.

    Args:
        group: the process group of the ranks that hold the same layers; None: all. Pipeline parallelism needs it.
    """
    step_end_of(model, added_up(model, every_rank(group)))
