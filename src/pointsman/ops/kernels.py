"""Which kernels a run uses: chosen once by a timing, recorded, and reused.

oneDNN and BLAS differ in the last bits. A run that is to be continued, or compared with another bit for bit, therefore
keeps its choice: `Kernels.to_dict` goes into the run's record, `Kernels.from_dict` brings it back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor, nn

from pointsman._errors import did_you_mean
from pointsman.ops.gemm import Gemm, choose, onednn_works

_ALLOWED = {"path": ("fast", "plain"), "gemm": ("blas", "onednn")}


@dataclass(frozen=True)
class Kernels:
    """How experts and scores are computed.

    Attributes:
        path: "fast", or "plain": the reference, one expert after the other through autograd.
        gemm: on a CPU in float32, matrix products of the fast path through "blas" or "onednn".
    """

    path: str = "fast"
    gemm: str = "blas"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"kernels: {name}={getattr(self, name)!r}: {did_you_mean(getattr(self, name), allowed)}"
                )

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


PLAIN = Kernels("plain", "blas")
"""The reference path: what deterministic runs take."""


@cache
def measure_kernels() -> Kernels:
    """The faster kernels of this process, timed at the first call (about 0.1 s) and remembered."""
    if not onednn_works(torch.float32):
        return Kernels(gemm="blas")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    rows, weight, gradient, output = draw(1024, 256), draw(512, 256), draw(1024, 512), draw(512, 256)

    def seconds(gemm: Gemm) -> float:
        start = time.perf_counter()
        gemm.linear(rows, weight, None, relu=True)
        gemm.product(gradient, weight)
        gemm.weight_gradient(output, gradient, rows)
        return time.perf_counter() - start

    best = {"blas": float("inf"), "onednn": float("inf")}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(9):  # interleaved: another program's burst meets both
            for name in best:
                best[name] = min(best[name], seconds(choose(name, torch.float32)))
    return Kernels(gemm=min(best, key=lambda name: best[name]))


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Makes all experts, routers and layers of a model use these kernels."""
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels  # type: ignore[assignment]
