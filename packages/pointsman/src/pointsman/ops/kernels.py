"""Which kernels compute: one active choice, which everything inside `with using(kernels):` follows; where ours can run.

Kernels differ in the last bits. What is to be continued, or compared with another bit for bit, therefore keeps its
choice. Nothing is timed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pointsman._errors import did_you_mean

OLDEST = (3, 3)  # Triton's versions before lack operations that the kernels use
_ALLOWED = {"path": ("fast", "plain"), "gpu": ("torch", "triton")}


@dataclass(frozen=True)
class Kernels:
    """How experts and scores are computed.

    Attributes:
        path: "fast", or "plain": the reference, one expert after the other through autograd.
        gpu: on a GPU, "torch" (its operators, `F.grouped_mm` for the experts) or "triton" (our kernels for
            experts, wherever they take the work).
    """

    path: str = "fast"
    gpu: str = "torch"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"kernels: {name}={value!r}: {did_you_mean(value, allowed)}")


PLAIN = Kernels("plain")
"""The reference path: what deterministic runs take."""

_DEFAULT = Kernels()
_own: ContextVar[Kernels | None] = ContextVar("kernels", default=None)
_entered: list[tuple[Token[Kernels | None], Kernels]] = []  # by all threads; one without a choice takes the last


@contextmanager
def using(kernels: Kernels | None) -> Iterator[None]:
    """Everything inside computes with these kernels; None: with the default, `Kernels()`.

    A choice belongs to its thread. Threads that have made none, such as autograd's on a GPU, follow the one entered
    last. A backward pass follows its forward. A graph of torch.compile keeps what was active when it was traced.
    """
    kernels = kernels or Kernels()
    token = _own.set(kernels)
    _entered.append((token, kernels))
    try:
        yield
    finally:
        _entered.remove((token, kernels))
        _own.reset(token)


def active() -> Kernels:
    """The active choice of this thread. Code traced by torch.compile calls one of the functions below instead."""
    return _own.get() or (_entered[-1][1] if _entered else _DEFAULT)


def as_constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`; where torch.compile traces, a constant of the graph."""
    if torch.compiler.is_compiling():
        from pointsman.ops.tracing import constant

        return constant(function, *arguments)
    return function(*arguments)


def exporting() -> bool:
    """Whether torch.export traces; traced by torch.compile, older versions of torch say so of every graph."""
    return torch.compiler.is_compiling() and bool(as_constant(torch.compiler.is_exporting))


def plain_wanted() -> bool:
    """Whether the active choice is the plain path."""
    return bool(as_constant(_chosen, "path", "plain"))


def with_triton(tensor: Tensor) -> bool:
    """Whether our kernels are chosen (`Kernels.gpu`), for work on the device of this tensor; ValueError if they are and
    cannot run there."""
    if not tensor.is_cuda or plain_wanted() or not as_constant(_chosen, "gpu", "triton"):
        return False
    as_constant(_check, tensor.device)
    return True


def _check(device: torch.device) -> None:
    if why := without_triton(torch.cuda.get_device_capability(device)):
        raise ValueError(f"kernels: gpu='triton': {why}; gpu='torch' runs here")


@cache
def without_triton(capability: tuple[int, int] | None) -> str | None:
    """Why Triton's kernels cannot run on a device of this compute capability (None: no CUDA device); None: they can."""
    try:
        import triton
    except ImportError:
        return "the package triton is not installed: pip install 'pointsman[gpu]'"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, OLDEST))}"
    if capability is not None and capability < (8, 0):
        return f"compute capability {'.'.join(map(str, capability))} is below 8.0"
    return None


def _chosen(what: str, value: str) -> bool:
    return bool(getattr(active(), what) == value)
