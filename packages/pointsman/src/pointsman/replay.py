"""Replay of a recorded routing: the same experts again, with the weights of now."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman.control import named_routers
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing


class replay_routing:  # noqa: N801 - used like a function
    """`with replay_routing(model, experts): …`: every forward inside takes these experts, whatever the scores.

        with record_routing(model) as records:
            model(tokens)                               # by whoever generated the text
        with replay_routing(model, records):
            loss = criterion(model(tokens), targets)    # the same experts; weights and gradients are of now

    Scores, weights, losses and gradients are computed as always; only the choice is replaced. It is not limited by
    `capacity` again (weights are then renormalised over the experts that are left), and statistics of the choice (the
    counts of `loss-free`) are not gathered. A forward under activation checkpointing is done again in backward, which
    must lie inside, too.

    Args:
        model: any model with MoE layers, a layer or a router.
        experts: layer name, as `record_routing` names it -> a `Routing`, or experts [tokens, k] int64 with -1 for none
            and E + v for virtual expert v, the tokens of all sequences in order. Layers that are not named choose
            themselves.

    Raises:
        ValueError: a layer that the model does not have, experts that are no such tensor, or a router whose weights are
            no function of the experts (`sparsemixer`, `soft`); in a forward of other tokens.
    """

    def __init__(self, model: nn.Module, experts: Mapping[str, Tensor | Routing]) -> None:
        routers = dict(named_routers(model))
        self._replayed: list[tuple[Router, Tensor]] = []
        for name, recorded in experts.items():
            if name not in routers:
                raise ValueError(f"replay_routing: no layer {name!r}: {did_you_mean(name, routers)}")
            if isinstance(recorded, Routing):
                recorded = recorded.chosen
            _check(name, routers[name], recorded)
            self._replayed.append((routers[name], recorded))

    def __enter__(self) -> None:
        for router, experts in self._replayed:
            router.replayed = experts

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for router, _ in self._replayed:
            router.replayed = None


def _check(name: str, router: Router, experts: Tensor) -> None:
    where = f"replay_routing: layer {name!r}"
    if not isinstance(experts, Tensor) or experts.dtype != torch.int64 or experts.dim() != 2:
        found = f"{experts.dtype} {list(experts.shape)}" if isinstance(experts, Tensor) else type(experts).__name__
        raise ValueError(f"{where}: experts must be int64 [tokens, k], got {found}")
    if not experts.numel():
        return
    last = router.num_experts + len(router.virtual) - 1
    if int(experts.min()) < -1 or int(experts.max()) > last:
        raise ValueError(f"{where}: allowed experts are 0 to {last}, and -1 for none")
    ordered = experts.sort(-1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError(f"{where}: a token has an expert twice")
