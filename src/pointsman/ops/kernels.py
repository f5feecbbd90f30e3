"""Which kernels a run uses: chosen once by a timing, recorded, and reused.

They differ in the last bits. A run that is to be continued, or compared with another bit for bit, therefore
keeps its choice: `Kernels.to_dict` goes into the run's record, `Kernels.from_dict` brings it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman.ops import dots
from pointsman.ops.gemm import BATCHED, Gemm, choose, onednn_works

_ROW, _FEW = ("dots", "mv"), ("rows", "columns")
_ALLOWED = {
    "path": ("fast", "plain"),
    "gemm": ("blas", "onednn"),
    "row": _ROW,
    "few": _FEW,
    "row_bf16": _ROW,
    "few_bf16": _FEW,
    "batched_bf16": ("small", "padded"),
}


class Decoding(NamedTuple):
    """How few rows meet the weights of experts, where no backward follows: `row` and `few` of `Kernels`."""

    row: str
    few: str


@dataclass(frozen=True)
class Kernels:
    """How experts and scores are computed.

    Attributes:
        path: "fast", or "plain": the reference, one expert after the other through autograd.
        gemm: on a CPU in float32, matrix products of the fast path through "blas" or "onednn".
        row: without gradients in float32, an expert's only row through "dots" (`ops.dots`) or through "mv" (torch.mv).
        few: the same for few rows and a large weight: "rows", as `gemm` does, or "columns", the weight times them.
        row_bf16: `row` for bfloat16.
        few_bf16: `few` for bfloat16.
        batched_bf16: in bfloat16, which experts of many tokens one torch.bmm computes: only "small" ones, for which
            calls would take the time, or all that are "padded" to the same number of rows by up to a fifth.
    """

    path: str = "fast"
    gemm: str = "blas"
    row: str = "dots"
    few: str = "rows"
    row_bf16: str = "dots"
    few_bf16: str = "rows"
    batched_bf16: str = "small"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"kernels: {name}={getattr(self, name)!r}: {did_you_mean(getattr(self, name), allowed)}"
                )

    @cached_property
    def code(self) -> str:
        """All of it in a word, for operators that take no objects."""
        return ",".join(astuple(self))

    @staticmethod
    def decoded(code: str) -> Kernels:
        """Back from `code`; "": what `measure_kernels` chooses for this process."""
        return _decoded(code) if code else measure_kernels()

    def decoding(self, dtype: torch.dtype) -> Decoding:
        """Those for few rows of a dtype."""
        if dtype == torch.bfloat16:
            return Decoding(self.row_bf16, self.few_bf16)
        return Decoding(self.row, self.few)

    def to_dict(self) -> dict[str, str]:
        """For environment.json and checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, str]) -> Kernels:
        """What `to_dict` gave."""
        for name in values:
            if name not in _ALLOWED:
                raise ValueError(f"unknown kernels {name!r}: {did_you_mean(name, _ALLOWED)}")
        return cls(**values)


@cache
def _decoded(code: str) -> Kernels:
    return Kernels(*code.split(","))


PLAIN = Kernels("plain", "blas")
"""The reference path: what deterministic runs take."""


@cache
def measure_kernels() -> Kernels:
    """The faster kernels of this process, timed at the first call (about 0.3 s) and remembered."""
    gemm = _measure_products()
    row, few = _measure_decoding(torch.float32, choose(gemm, torch.float32))
    half = choose(gemm, torch.bfloat16)
    row_bf16, few_bf16 = _measure_decoding(torch.bfloat16, half)
    return Kernels("fast", gemm, row, few, row_bf16, few_bf16, _measure_batches(half))


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


def _measure_decoding(dtype: torch.dtype, gemm: Gemm) -> Decoding:
    """The faster way for one row, and for few rows, of each of some experts, whose weights fill more than a cache."""
    rows, weight = few_and_large(dtype)
    single, index = rows[:, 0].contiguous(), torch.arange(len(rows), device="cpu")
    ways: dict[str, Callable[[], object]] = {
        "dots": lambda: dots.linear(single, index, weight, index),
        "mv": lambda: [torch.mv(*pair) for pair in zip(weight, single, strict=True)],
    }
    row = fastest(ways, 5) if dots.suits(weight) else "mv"
    ways = {
        "rows": lambda: [gemm.linear(*pair) for pair in zip(rows, weight, strict=True)],
        "columns": lambda: in_columns(rows, weight),
    }
    return Decoding(row, fastest(ways, 5))


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


def few_and_large(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What decoding is timed on: a few rows [8, 6, 1024] for each of some weights [8, 1024, 1024]."""
    experts, several, width = 8, 6, 1024
    weight = torch.full((experts, width, width), 0.5, dtype=dtype, device="cpu")
    return torch.full((experts, several, width), 0.5, dtype=dtype, device="cpu"), weight


def in_columns(rows: Tensor, weight: Tensor) -> list[Tensor]:
    """Each weight times its rows as columns: [out, rows]."""
    return [torch.mm(one, inputs.t()) for inputs, one in zip(rows, weight, strict=True)]


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


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Makes all experts, routers and layers of a model use these kernels."""
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels  # type: ignore[assignment]
