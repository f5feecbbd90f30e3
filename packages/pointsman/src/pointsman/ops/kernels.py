"""Which kernels a run uses: one active choice, recorded, and reused.

Kernels differ in the last bits. A run that is to be continued, or compared with another bit for bit, therefore keeps
its choice: `Kernels.to_dict` goes into the run's record, `Kernels.from_dict` reads it, and everything computed inside
`with using(kernels):` follows it. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pointsman._errors import did_you_mean

_ALLOWED = {"path": ("fast", "plain"), "gpu": ("torch", "triton")}
_RETIRED = (
    "gemm", "row", "row_bf16", "batched_bf16", "few", "few_bf16", "gpu_decode", "gpu_router", "gpu_attention",
    "gpu_mixing",
)  # fmt: skip
"""Choices that committed records hold and that no longer exist."""


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

    def to_dict(self) -> dict[str, str]:
        """For environment.json and checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Kernels:
        """What `to_dict` gave, also in an earlier version, whose other choices for a GPU were torch's on a CPU."""
        for name in values:
            if name not in _ALLOWED and name not in _RETIRED:
                raise ValueError(f"unknown kernels {name!r}: {did_you_mean(name, _ALLOWED)}")
        gpu = values.get("gpu", "torch")
        return cls(values.get("path", "fast"), "torch" if gpu in ("auto", "grouped_mm") else gpu)


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


def plain_wanted() -> bool:
    """Whether the active choice is the plain path."""
    return bool(as_constant(_chosen, "path", "plain"))


def triton_wanted() -> bool:
    """Whether the active choice is our kernels on a GPU, and not the plain path."""
    return bool(as_constant(_chosen, "gpu", "triton")) and not plain_wanted()


def _chosen(what: str, value: str) -> bool:
    return bool(getattr(active(), what) == value)
