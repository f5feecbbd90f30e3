"""Looking into a model's forward and backward: what routers see and decide, and the gradients of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.control import named_routers
from pointsman.layer import MoE
from pointsman.routing import Routing, RoutingContext

Taker = Callable[[str, Routing, RoutingContext | None, Tensor], None]


@contextmanager
def observe_routing(model: nn.Module, take: Taker) -> Iterator[None]:
    """`record_routing` that also hands on what the router saw: take(name, routing, context, hidden [tokens, dim])."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> None:
            context = args[1] if len(args) > 1 else kwargs.get("context")
            hidden = args[0] if args else kwargs["hidden"]
            with torch.no_grad():
                take(name, routing.detach(), context, hidden.detach().reshape(-1, hidden.shape[-1]))

        return hook

    handles = [router.register_forward_hook(hook_of(name), with_kwargs=True) for name, router in named_routers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def gradients(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor, RoutingContext | None]]]:
    """Within a forward and backward: layer -> (hidden [B, T, dim], gradient of the output [B*T, dim], context)."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    names = {id(layer.router): name for name, layer in layers.items()}
    names |= {id(layer.experts): name for name, layer in layers.items()}
    seen: dict[str, tuple[Tensor, RoutingContext | None]] = {}
    found: dict[str, tuple[Tensor, Tensor, RoutingContext | None]] = {}

    def routed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        context = args[1] if len(args) > 1 else kwargs.get("context")
        seen[names[id(module)]] = (args[0].detach(), context)

    def computed(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        name = names[id(module)]

        def keep(gradient: Tensor) -> None:
            hidden, context = seen[name]
            found[name] = (hidden, gradient.detach(), context)

        if output.requires_grad:
            output.register_hook(keep)  # type: ignore[no-untyped-call]

    handles = [layer.router.register_forward_hook(routed, with_kwargs=True) for layer in layers.values()]
    handles += [layer.experts.register_forward_hook(computed) for layer in layers.values()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; each part's own mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
