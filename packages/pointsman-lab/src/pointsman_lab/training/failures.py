"""How a run ends before its last step, and where a number first stopped being finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError, Stopped
from pointsman.ops.exchange import local_part
from pointsman.ranks import Ranks


class Interrupted(Stopped):
    """The run was asked to stop and has saved."""

    def __init__(self, out: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; saved: the same command with --resume (--out {out}) goes on")
        self.out = out
        self.step = step


class Diverged(RunError):  # noqa: N818
    """The loss or the gradient is not finite; the message names the step, the layer and the last good checkpoint."""


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


def first_of_ranks(name: str | None, order: Sequence[str], ranks: Ranks) -> str | None:
    """Of the names that the ranks found, the first in this order."""
    found = [one for one in ranks.gather(name) if one is not None]
    return min(found, key=order.index, default=None)


def what_diverged(step: int, loss: float, norm: float, layer: str | None, gradient: Callable[[], str | None]) -> str:
    """In words what was not finite first."""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    if layer:
        where = f"the first output that is not finite is that of layer {layer}"
    elif not math.isfinite(loss):
        where = "every layer's output is finite, so the fault is in the softmax's loss"
    elif name := gradient():
        where = f"the first gradient that is not finite is that of {name}"
    else:
        where = "the sum over layers overflows"
    return f"step {step}: {what}; {where}"


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
