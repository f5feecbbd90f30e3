"""Replay of a recorded routing: the same experts again, with the weights of now."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman.control import is_huggingface, routers_by_layer
from pointsman.recording import KNOWN, uncompiled
from pointsman.routers.frame.router import Router
from pointsman.routing import Routing


class RouterPlace:
    """A router of this library, also one that `hf.replace_routers` gave a rule of its own, as a place to replay in.

    `first` and `last` bound its expert numbers (-1: none is allowed).
    """

    def __init__(self, router: Router) -> None:
        self.module, self._before, self._now = router, list[Tensor | None](), router.replayed
        self.first, self.last = -1, router.num_experts + len(router.virtual) - 1

    def replay(self, experts: Tensor | None) -> None:
        """From now on the router takes these experts; None: those of a replay around this one, or its own."""
        if not self._before:
            self._before.append(self.module.replayed)
        elif experts is not None and self.module.replayed is not self._now:
            return  # a replay inside this one goes first
        self.module.replayed = self._now = self._before.pop() if experts is None else experts


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

    In a mixture of experts of transformers the class's own code weighs the replayed experts: its `topk` gives them.
    There -1 cannot be replayed, and what `torch.compile` has compiled runs uncompiled.

    Args:
        model: any model with MoE layers, a layer or a router; a mixture of experts of transformers.
        experts: layer name, as `record_routing` names it -> a `Routing`, or experts [tokens, k] int64 with -1 for none
            and E + v for virtual expert v, the tokens of all sequences in order. Layers that are not named choose
            themselves.

    Raises:
        ValueError: a layer that the model does not have, experts that are no such tensor, or a router whose weights are
            no function of the experts (`sparsemixer`, `soft`); in a forward of other tokens.
    """

    def __init__(self, model: nn.Module, experts: Mapping[str, Tensor | Routing]) -> None:
        places: Mapping[str, Any]  # `RouterPlace`, or the same of a gate
        if is_huggingface(model):
            from pointsman.hf.replay import places as of_gates  # transformers is imported only for its own models

            places = of_gates(model)
        else:
            places = {name: RouterPlace(router) for name, router in routers_by_layer(model).items()}
        if not places:
            raise ValueError(f"replay_routing: {type(model).__name__} has no MoE layer, no router and no gate: {KNOWN}")
        self._replayed: list[tuple[Any, Tensor]] = []
        self._hf, self._inside = is_huggingface(model), ExitStack()
        for name, recorded in experts.items():
            if name not in places:
                raise ValueError(f"replay_routing: no layer {name!r}: {did_you_mean(name, places)}")
            if isinstance(recorded, Routing):
                recorded = recorded.chosen
            check_experts(f"replay_routing: layer {name!r}", places[name], recorded, recorded)
            self._replayed.append((places[name], recorded))

    def __enter__(self) -> None:
        if self._hf:
            self._inside.enter_context(uncompiled())
        for place, experts in self._replayed:
            place.replay(experts)

    def __exit__(self, *error: object) -> None:
        self._inside.close()
        for place, _ in self._replayed:
            place.replay(None)


def check_experts(where: str, place: Any, experts: Tensor, known: Tensor) -> None:
    """ValueError unless a place can take experts [tokens, k]; `known`: without the choices that are left to it."""
    if not isinstance(experts, Tensor) or experts.dtype != torch.int64 or experts.dim() != 2:
        found = f"{experts.dtype} {list(experts.shape)}" if isinstance(experts, Tensor) else type(experts).__name__
        raise ValueError(f"{where}: experts must be int64 [tokens, k], got {found}")
    if known.numel() and (int(known.min()) < place.first or int(known.max()) > place.last):
        none = ", and -1 for none" if place.first < 0 else ""
        raise ValueError(f"{where}: allowed experts are 0 to {place.last}{none}")
    ordered = experts.sort(-1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError(f"{where}: a token has an expert twice")
