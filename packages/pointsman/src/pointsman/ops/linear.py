"""A linear map whose input may be of lower precision than its weight, and what autocast and transforms ask for."""

from contextlib import AbstractContextManager, nullcontext
from traceback import walk_stack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

HALF = (torch.bfloat16, torch.float16)


def in_backward() -> bool:
    """Whether a backward pass runs, in which activation checkpointing does forwards again; while compiling: no."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def in_function() -> bool:
    """Whether the forward of a `torch.autograd.Function` runs, as that of a reentrant checkpoint."""
    first = (next(iter(frame.f_locals.values()), None) for frame, _ in walk_stack(None))
    return any(isinstance(one, FunctionCtx) for one in first)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """No autocast on this type of device in the block."""
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def autocast_enabled(kind: str) -> bool:
    """Whether autocast is on for this type of device; the meta device, which torch does not know there, has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes their product in; None: it is off, or both are float64, which it leaves."""
    kind = hidden.device.type
    if not autocast_enabled(kind) or hidden.dtype == weight.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def upcast(tensor: Tensor) -> Tensor:
    """bf16 and half become float32; float32 and float64 stay."""
    return tensor.float() if tensor.dtype in HALF else tensor


def orthogonal_(weight: Tensor, gain: float = 1.0) -> Tensor:
    """`nn.init.orthogonal_`, also of half precision, which torch's QR refuses."""
    return weight.detach().copy_(nn.init.orthogonal_(upcast(weight.detach()), gain))


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: hidden [..., in], weight [out, in], bias [out] -> [..., out]; hidden in half precision is upcast to
    float32 where the weight is."""
    if hidden.dtype != weight.dtype and not autocast_enabled(hidden.device.type):
        hidden = upcast(hidden)
    return F.linear(hidden, weight, bias)


def transformed() -> bool:
    """Whether derivatives are taken, or tensors batched, in ways that only plain operations know.

    These are `torch.func`'s, and forward mode, whose tangents a fast path would drop without a word.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_second_derivatives(what: str = "the experts' fast path", plain: bool = True) -> None:
    """To be called in a backward pass, where gradients are enabled only under `create_graph=True`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        path = ", or compute the forward inside `with using(PLAIN):` (pointsman.ops.kernels)" if plain else ""
        raise RuntimeError(f"{what} has no second derivatives: leave create_graph=True out{path}")
