"""Hooks on a model's forward and backward: inputs and decisions of routers, gradients of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pointsman.control import named_routers
from pointsman.layer import MoE
from pointsman.routing import Routing, RoutingContext

Observer = Callable[[str, Routing, RoutingContext | None, Tensor], None]


@contextmanager
def attached(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes hooks on exit."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def observe_routing(model: nn.Module, observe: Observer) -> Iterator[None]:
    """Calls observe(name, routing, context, input [tokens, dim]) at every forward of a router."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> None:
            context = args[1] if len(args) > 1 else kwargs.get("context")
            hidden = args[0] if args else kwargs["hidden"]
            with torch.no_grad():
                observe(name, routing.detach(), context, hidden.detach().reshape(-1, hidden.shape[-1]))

        return hook

    routers = list(named_routers(model))
    with attached([router.register_forward_hook(hook_of(name), with_kwargs=True) for name, router in routers]):
        yield


@contextmanager
def observe_mixing(model: nn.Module, observe: Callable[[str, Tensor, Tensor, RoutingContext], None]) -> Iterator[None]:
    """Calls observe(name, S[i, i] [B, T], effective number of tokens [B, T], context) at every forward of a mixer."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(mixer: Any, args: tuple[Any, ...], output: Any) -> None:
            own, effective = mixer.neighbours(*args)
            observe(name, own, effective, args[2])

        return hook

    mixers = [(name, router.mix) for name, router in named_routers(model) if hasattr(router.mix, "neighbours")]
    with attached([mixer.register_forward_hook(hook_of(name)) for name, mixer in mixers if mixer is not None]):
        yield


class LayerGradient(NamedTuple):
    """The input of one MoE layer and the gradient of a loss with respect to its output.

    Attributes:
        hidden: [B, T, dim], the layer's input.
        gradient: [B*T, dim], the gradient of its output.
        context: the context of its router.
    """

    hidden: Tensor
    gradient: Tensor
    context: RoutingContext | None


def layer_gradients(model: nn.Module, loss: Callable[[], Tensor | None]) -> dict[str, LayerGradient]:
    """Gradients of a loss with respect to every MoE layer's output. No parameter's `.grad` changes.

    Args:
        loss: runs the model's forward, without auxiliary losses, and returns a scalar, or None for no gradients.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    inputs: dict[str, tuple[Tensor, RoutingContext | None]] = {}
    outputs: dict[str, Tensor] = {}

    def input_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs[name] = (args[0].detach(), args[1] if len(args) > 1 else kwargs.get("context"))

        return hook

    def output_hook(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            outputs[name] = output if output.requires_grad else output.detach().requires_grad_()
            return outputs[name]

        return hook

    handles = [layer.router.register_forward_hook(input_hook(n), with_kwargs=True) for n, layer in layers.items()]
    handles += [layer.experts.register_forward_hook(output_hook(n)) for n, layer in layers.items()]
    before = [(layer, layer.attach_losses) for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.attach_losses = False
        with attached(handles), torch.enable_grad():
            value = loss()
            if value is None:
                return {}
            names = list(outputs)
            found = torch.autograd.grad(value, [outputs[name] for name in names], allow_unused=True)
    finally:
        for layer, attach in before:
            layer.attach_losses = attach
    return {
        name: LayerGradient(inputs[name][0], gradient.detach(), inputs[name][1])
        for name, gradient in zip(names, found, strict=True)
        if gradient is not None
    }


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the `with`; restores the mode of every submodule on exit."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
