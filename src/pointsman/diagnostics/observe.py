"""Looking into a model's forward and backward: what routers see and decide, and the gradients of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
def observe_mixing(model: nn.Module, take: Callable[[str, Tensor, Tensor, RoutingContext], None]) -> Iterator[None]:
    """take(name, S[i, i] [B, T], effective number of neighbours [B, T], context) at every forward of a mixer."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(mixer: Any, args: tuple[Any, ...], output: Any) -> None:
            own, effective = mixer.neighbours(*args)
            take(name, own, effective, args[2])

        return hook

    mixers = [(name, router.mix) for name, router in named_routers(model) if hasattr(router.mix, "neighbours")]
    handles = [mixer.register_forward_hook(hook_of(name)) for name, mixer in mixers if mixer is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class LayerGradient(NamedTuple):
    """What one MoE layer saw, and what its output owes to a loss.

    Attributes:
        hidden: [B, T, dim], the layer's input.
        gradient: [B*T, dim], the gradient of its output.
        context: what its router may look at.
    """

    hidden: Tensor
    gradient: Tensor
    context: RoutingContext | None


def layer_gradients(model: nn.Module, loss: Callable[[], Tensor | None]) -> dict[str, LayerGradient]:
    """Gradients of a loss with respect to every MoE layer's output; no parameter's `.grad` is touched.

    Args:
        loss: runs the model's forward and returns a scalar; None: there are no gradients then. Auxiliary losses are not
            attached meanwhile.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    inputs: dict[str, tuple[Tensor, RoutingContext | None]] = {}
    outputs: dict[str, Tensor] = {}

    def routed_by(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs[name] = (args[0].detach(), args[1] if len(args) > 1 else kwargs.get("context"))

        return hook

    def computed_by(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            outputs[name] = output if output.requires_grad else output.detach().requires_grad_()
            return outputs[name]

        return hook

    handles = [layer.router.register_forward_hook(routed_by(n), with_kwargs=True) for n, layer in layers.items()]
    handles += [layer.experts.register_forward_hook(computed_by(n)) for n, layer in layers.items()]
    attached = [(layer, layer.attach_losses) for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.attach_losses = False
        with torch.enable_grad():
            value = loss()
            if value is None:
                return {}
            names = list(outputs)
            found = torch.autograd.grad(value, [outputs[name] for name in names], allow_unused=True)
    finally:
        for layer, attach in attached:
            layer.attach_losses = attach
        for handle in handles:
            handle.remove()
    return {
        name: LayerGradient(inputs[name][0], gradient.detach(), inputs[name][1])
        for name, gradient in zip(names, found, strict=True)
        if gradient is not None
    }


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
