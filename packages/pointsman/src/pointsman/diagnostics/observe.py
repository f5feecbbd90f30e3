"""Hooks on a model's forward and backward: inputs and decisions of routers, gradients of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pointsman.control import named_routers
from pointsman.delivery import without_losses
from pointsman.layer import MoE
from pointsman.ops.linear import in_backward
from pointsman.routing import RoutingContext


@contextmanager
def observe_mixing(model: nn.Module, observe: Callable[[str, Tensor, Tensor, RoutingContext], None]) -> Iterator[None]:
    """Calls observe(name, S[i, i] [B, T], effective number of tokens [B, T], context) at every forward of a mixer."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(mixer: Any, args: tuple[Any, ...], output: Any) -> None:
            if not in_backward():  # which repeats what is checkpointed
                own, effective = mixer.neighbours(*args)
                observe(name, own, effective, args[2])

        return hook

    with ExitStack() as hooks:
        for name, router in named_routers(model):
            if router.mix is not None and hasattr(router.mix, "neighbours"):
                hooks.enter_context(router.mix.register_forward_hook(hook_of(name)))
        yield


class LayerGradient(NamedTuple):
    """The input `hidden` [B, T, dim] of an MoE layer, the `gradient` [B*T, dim] of its output, its router's context."""

    hidden: Tensor
    gradient: Tensor
    context: RoutingContext | None


def layer_gradients(model: nn.Module, loss: Callable[[], Tensor | None]) -> dict[str, LayerGradient]:
    """Gradients of a loss with respect to every MoE layer's output. No parameter's `.grad` changes.

    Args:
        loss: runs the model's forward, without auxiliary losses, and returns a scalar, or None for no gradients.

    Raises:
        ValueError: no MoE layer ran.
    """
    inputs: dict[str, tuple[Tensor, RoutingContext | None]] = {}
    outputs: dict[str, Tensor] = {}

    def input_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs[name] = (args[0].detach(), args[1] if len(args) > 1 else kwargs.get("context"))

        return hook

    def output_hook(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            own, *routing = output if isinstance(output, tuple) else (output,)
            outputs[name] = own if own.requires_grad else own.detach().requires_grad_()
            return (outputs[name], *routing) if routing else outputs[name]

        return hook

    with ExitStack() as stack:
        for name, layer in named_layers(model).items():
            stack.enter_context(layer.router.register_forward_hook(input_hook(name), with_kwargs=True))
            stack.enter_context(layer.register_forward_hook(output_hook(name)))
        stack.enter_context(without_losses(model))
        stack.enter_context(torch.enable_grad())
        value = loss()
        if value is None:
            return {}
        if not outputs:
            raise ValueError(f"layer_gradients: no MoE layer of {type(model).__name__} ran")
        found = torch.autograd.grad(value, list(outputs.values()), allow_unused=True)
    return {
        name: LayerGradient(inputs[name][0], gradient.detach().flatten(0, -2), inputs[name][1])
        for name, gradient in zip(outputs, found, strict=True)
        if gradient is not None
    }


def named_layers(model: nn.Module) -> dict[str, MoE]:
    """Every MoE layer of a model by its name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@contextmanager
def evaluating(module: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Evaluation mode inside the `with`, and, with a seed, a generator state of its own; all as before afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    devices = [device for device in {p.device for p in module.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        module.eval()
        try:
            yield
        finally:
            for submodule, training in modes:
                submodule.training = training
