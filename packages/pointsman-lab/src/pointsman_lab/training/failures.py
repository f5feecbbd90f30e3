"""Where a number first stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.ops.exchange import local_part


def first_bad_layer(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Runs `forward` again, without gradients, and names the first layer whose output is not finite."""
    found: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and any(not tensor.isfinite().all() for tensor in tensors_in(output)):
                found.append(name)

        return look

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if name:
                stack.callback(module.register_forward_hook(hook(name)).remove)
        forward()
    return found[0] if found else None


def first_bad_gradient(parameters: Mapping[str, nn.Parameter]) -> str | None:
    """The parameter nearest to the loss whose gradient is not finite: backward met it first.

    Of several ranks each looks at the parts that it holds.
    """
    for name, parameter in reversed(list(parameters.items())):
        gradient = local_part(parameter.grad)
        if gradient is not None and not gradient.isfinite().all():
            return name
    return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returned: tensors, tuples, dicts, dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name))
