"""Which kernels a run uses: one active choice, made once by a timing, recorded, and reused.

Kernels differ in the last bits. A run that is to be continued, or compared with another bit for bit, therefore keeps
its choice: `Kernels.to_dict` goes into the run's record, `Kernels.from_dict` reads it, and everything computed inside
`with using(kernels):` follows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from pointsman._errors import did_you_mean
from pointsman.ops import dots
from pointsman.ops.gemm import BATCHED, GEMMS, Gemm, choose, onednn_works

_ROW = ("dots", "mv")
_OTHERS = ("auto", "triton", "torch")
_ALLOWED = {
    "path": ("fast", "plain"),
    "gemm": ("blas", "onednn"),
    "row": _ROW,
    "row_bf16": _ROW,
    "batched_bf16": ("small", "padded"),
    "gpu": ("auto", "triton", "grouped_mm"),
    "gpu_decode": _OTHERS,
    "gpu_router": _OTHERS,
    "gpu_attention": _OTHERS,
    "gpu_mixing": _OTHERS,
}
_RETIRED = ("few", "few_bf16")
"""Choices that earlier records may hold and that no longer exist."""


@dataclass(frozen=True)
class Kernels:
    """How experts and scores are computed.

    Attributes:
        path: "fast", or "plain": the reference, one expert after the other through autograd.
        gemm: on a CPU in float32, the matrix products: "blas" or "onednn".
        row: without gradients in float32, an expert's only row: "dots" (`ops.dots`) or "mv" (torch.mv).
        row_bf16: `row` for bfloat16.
        batched_bf16: in bfloat16, which experts with many tokens share a torch.bmm: only "small" ones, where the calls
            would take the time, or all, "padded" to the same number of rows by up to a fifth.
        gpu: the experts on a GPU: "triton" (our kernels) or "grouped_mm" (torch's); "auto" times both at the first use
            of each shape.
        gpu_decode: the experts on a GPU for a few assignments without gradients: "triton" (kernels of their own) or
            "torch" (as `gpu` says); "auto" as above.
        gpu_router: routers on a GPU: "triton" (one kernel) or "torch"; "auto" as above.
        gpu_attention: Transformer-XL's attention on a GPU: the same choice.
        gpu_mixing: the mixers on a GPU: the same choice.
    """

    path: str = "fast"
    gemm: str = "blas"
    row: str = "dots"
    row_bf16: str = "dots"
    batched_bf16: str = "small"
    gpu: str = "auto"
    gpu_decode: str = "auto"
    gpu_router: str = "auto"
    gpu_attention: str = "auto"
    gpu_mixing: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"kernels: {name}={value!r}: {did_you_mean(value, allowed)}")

    @cached_property
    def code(self) -> str:
        """All choices as one string, for custom operators, whose arguments cannot be objects."""
        return ",".join(astuple(self))

    @staticmethod
    @cache
    def decoded(code: str) -> Kernels:
        """Back from `code`."""
        return Kernels(*code.split(","))

    def row_of(self, dtype: torch.dtype) -> str:
        """`row` for a dtype."""
        return self.row_bf16 if dtype == torch.bfloat16 else self.row

    def to_dict(self) -> dict[str, str]:
        """For environment.json and checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Kernels:
        """What `to_dict` gave, also in an earlier version."""
        for name in values:
            if name not in _ALLOWED and name not in _RETIRED:
                raise ValueError(f"unknown kernels {name!r}: {did_you_mean(name, _ALLOWED)}")
        known = {name: value for name, value in values.items() if name in _ALLOWED}
        return cls(**_FIRST | known)  # where there was no choice, what there was


_FIRST = {"gpu": "grouped_mm", **dict.fromkeys(("gpu_decode", "gpu_router", "gpu_attention", "gpu_mixing"), "torch")}
PLAIN = Kernels("plain", "blas", **_FIRST)
"""The reference path: what deterministic runs take."""

_own: ContextVar[Kernels | None] = ContextVar("kernels", default=None)
_entered: list[Kernels] = []  # by all threads; a thread without its own choice uses the last


@contextmanager
def using(kernels: Kernels | None) -> Iterator[None]:
    """Everything inside computes with these kernels; None: with those that `measure_kernels` chooses.

    A choice belongs to its thread. Threads that have made none, such as autograd's on a GPU, follow the one entered
    last. A backward pass follows its forward. A graph of torch.compile keeps what was active when it was traced.
    """
    kernels = kernels or measure_kernels()
    token = _own.set(kernels)
    _entered.append(kernels)
    try:
        yield
    finally:
        _entered.remove(kernels)
        _own.reset(token)


def _chosen() -> Kernels | None:
    return _own.get() or (_entered[-1] if _entered else None)


def active() -> Kernels:
    """The active choice of this thread. Code traced by torch.compile calls one of the functions below instead."""
    return _chosen() or measure_kernels()


def as_constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`; where torch.compile traces, a constant of the graph."""
    if torch.compiler.is_compiling():
        from pointsman.ops.tracing import constant

        return constant(function, *arguments)
    return function(*arguments)


def plain_wanted() -> bool:
    """Whether the active choice is the plain path. Measures nothing."""
    return active_gpu("path") == "plain"


def active_code() -> str:
    """`active().code`, also where torch.compile traces."""
    return str(as_constant(_code))


def active_gpu(what: str = "gpu") -> str:
    """`gpu` (or `gpu_router`, …) of the active choice, "auto" if there is none; also where torch.compile traces.
    Measures nothing."""
    return str(as_constant(_field, what))


def active_gemm(dtype: torch.dtype) -> Gemm:
    """The active matrix products on a CPU for a dtype, also where torch.compile traces."""
    return GEMMS[as_constant(_gemm, dtype)]


def _code() -> str:
    return active().code


def _field(what: str) -> str:
    kernels = _chosen()
    return "auto" if kernels is None else str(getattr(kernels, what))


def _gemm(dtype: torch.dtype) -> str:
    gemm = choose(active().gemm, dtype)
    return next(name for name, one in GEMMS.items() if one is gemm)


@cache
def measure_kernels() -> Kernels:
    """The faster kernels of this process, timed at the first call (about 0.3 s) and remembered."""
    gemm = _measure_products()
    row, row_bf16 = _measure_row(torch.float32), _measure_row(torch.bfloat16)
    return Kernels("fast", gemm, row, row_bf16, _measure_batches(choose(gemm, torch.bfloat16)))


def _measure_products() -> str:
    """The faster float32 products, forward and backward, of as many rows as an expert has in training."""
    if not onednn_works(torch.float32):
        return "blas"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    rows, weight, gradient, output = draw(1024, 256), draw(512, 256), draw(1024, 512), draw(512, 256)

    def with_products(gemm: Gemm) -> Callable[[], None]:
        def run() -> None:
            gemm.linear(rows, weight, None, relu=True)
            gemm.product(gradient, weight)
            gemm.weight_gradient(output, gradient, rows)

        return run

    return fastest({name: with_products(choose(name, torch.float32)) for name in ("blas", "onednn")}, 15, LEAD)


def _measure_row(dtype: torch.dtype) -> str:
    """The faster way for one row of each of some experts, whose weights fill more than a cache."""
    experts, width = 8, 1024
    weight = torch.full((experts, width, width), 0.5, dtype=dtype, device="cpu")
    rows, index = torch.full((experts, width), 0.5, dtype=dtype, device="cpu"), torch.arange(experts, device="cpu")
    if not dots.suits(weight):
        return "mv"
    ways: dict[str, Callable[[], object]] = {
        "dots": lambda: dots.linear(rows, index, weight, index),
        "mv": lambda: [torch.mv(*pair) for pair in zip(weight, rows, strict=True)],
    }
    return fastest(ways, 5)


def _measure_batches(gemm: Gemm) -> str:
    """Whether some experts' bfloat16 products are faster in one torch.bmm, even of an eighth more rows."""
    experts, apart, padded, width, dim = 8, 512, 576, 512, 256

    def draw(*shape: int) -> Tensor:
        return torch.full(shape, 0.5, dtype=torch.bfloat16, device="cpu")

    weight, gradient = draw(experts, width, dim), draw(experts, width, dim)
    rows, inner = draw(experts * padded, dim), draw(experts * padded, width)

    def one_by_one() -> None:
        parts = (tensor.view(experts, padded, -1)[:, :apart].unbind(0) for tensor in (rows, inner))
        for each, of_inner, of_weight, of_gradient in zip(*parts, weight, gradient, strict=True):
            gemm.linear(each, of_weight)
            gemm.product(of_inner, of_weight)
            gemm.weight_gradient(of_gradient, of_inner, each)

    def at_once() -> None:
        BATCHED.linear(rows, weight)
        BATCHED.product(inner, weight)
        BATCHED.weight_gradient(gradient, inner, rows)

    return fastest({"small": one_by_one, "padded": at_once}, 5, LEAD)


LEAD = 0.1  # of what is usual for products: what is ahead of it in one shape may be behind in others
ENOUGH = 0.3  # seconds of one comparison


def fastest(ways: Mapping[str, Callable[[], object]], rounds: int, lead: float = 0.0) -> str:
    """The name of the way that has the fastest of `rounds` calls, of slow ones of fewer.

    Args:
        lead: by what share another must be ahead of the first way. Near ties then fall the same way in every run, also
            beside another program.
    """
    best = dict.fromkeys(ways, float("inf"))
    begin = time.perf_counter()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for turn in range(rounds):  # interleaved: another program's burst meets all
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                best[name] = min(best[name], time.perf_counter() - start)
            if turn and time.perf_counter() - begin > ENOUGH:  # the first calls are also the slowest
                break
    first = next(iter(ways))
    return min(best, key=lambda name: best[name] * (1 - lead if name == first else 1))
