"""Which kernels compute: one active choice, which everything inside `with using(kernels):` follows.

Kernels differ in the last bits. What is to be continued, or compared with another bit for bit, therefore keeps its
choice. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch

from pointsman._errors import did_you_mean

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
    return _own.get() or (_entered[-1][1] if _entered else Kernels())


def as_constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`; where torch.compile traces, a constant of the graph."""
    if torch.compiler.is_compiling():
        from pointsman.ops.tracing import constant

        return constant(function, *arguments)
    return function(*arguments)


def exporting() -> bool:
    """Whether torch.export traces; traced by torch.compile, older versions of torch say so of every graph."""
    return bool(as_constant(torch.compiler.is_exporting))


def plain_wanted() -> bool:
    """Whether the active choice is the plain path."""
    return bool(as_constant(_chosen, "path", "plain"))


def triton_wanted() -> bool:
    """Whether the active choice is our kernels on a GPU, and not the plain path."""
    return bool(as_constant(_chosen, "gpu", "triton")) and not plain_wanted()


def _chosen(what: str, value: str) -> bool:
    return bool(getattr(active(), what) == value)
