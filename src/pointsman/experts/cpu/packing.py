"""Expert weights a second time, in the layout in which oneDNN multiplies: for evaluation on a CPU.

oneDNN rearranges a weight for every product. With few rows that takes up to a third of the time, and where weights no
longer change it can be done once. What is packed belongs to a parameter and ends with it. It is made anew when the
parameter has changed: every optimizer's step drops it, and besides its version, its address and a sample of its values
are compared at each use (what writes through `.data`, or in inference mode, counts no version).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from pointsman.experts.cpu.memory import owner
from pointsman.experts.reference import ExpertParameters
from pointsman.ops.gemm import IN_CACHE, ONEDNN, Gemm, onednn_linear, onednn_works
from pointsman.ops.kernels import Kernels, fastest, few_and_large, in_columns, measure_kernels

ROWS = 32  # for which the layout is asked; it is the same from 8 to 64, and good beyond


@dataclass
class Packs:
    """The packed matrices of one parameter, by their address, and the state of the parameter of which they are."""

    state: tuple[int, int] = (-1, 0)
    sample: Tensor | None = None
    matrices: dict[int, Tensor] = field(default_factory=dict)

    def follow(self, whole: Tensor) -> None:
        """Drops what is packed if the parameter is no longer what it was."""
        state = -1 if whole.is_inference() else whole._version, whole.data_ptr()
        sample = _sample(whole)
        if self.sample is None or self.state != state or not torch.equal(sample, self.sample):
            self.matrices.clear()
            self.state, self.sample = state, sample


_lock = threading.Lock()
_packs: Any = WeakTensorKeyDictionary()  # parameter -> its packs: a cache, and the wish to have it


def pack(parameter: Tensor, parts: int = 1, kernels: Kernels | None = None) -> int:
    """From now on this parameter [E, parts * out, in] multiplies packed, if that pays. Returns the bytes this takes.

    Args:
        parts: how many matrices an expert has in it: 2 where gate and up are fused.
        kernels: those of its experts; None: what `measure_kernels` chooses for this process.
    """
    if parameter.device.type != "cpu" or parameter.dim() != 3 or not works(parameter.dtype):
        return 0
    elements = parameter[0].numel() // parts
    if not parameter[0].is_contiguous() or not pays(elements, parameter.dtype, kernels or measure_kernels()):
        return 0
    _listen_to_optimizers()
    with _lock:
        _packs[parameter] = Packs()
    return parameter.nbytes


def pays(elements: int, dtype: torch.dtype, kernels: Kernels) -> bool:
    """Whether matrices of so many elements are multiplied packed."""
    return elements > IN_CACHE and (dtype != torch.float32 or kernels.gemm == "onednn")


def unpack(parameter: Tensor) -> None:
    """Takes `pack` back."""
    with _lock:
        _packs.pop(parameter, None)


@cache
def _listen_to_optimizers() -> None:
    register_optimizer_step_post_hook(lambda *_: drop())


def drop() -> None:
    """Lets go of everything that is packed. What is used again is packed again."""
    with _lock:
        for packs in _packs.values():
            packs.matrices.clear()


def products(gemm: Gemm, parameters: ExpertParameters) -> Gemm:
    """`gemm`, with packed weights for those of `parameters` that are to be packed."""
    if not _packs or (parameters.w_in.dtype == torch.float32 and gemm is not ONEDNN):
        return gemm
    found: dict[int, Packs] = {}
    with _lock:
        for weight in (parameters.w_in, parameters.w_gate, parameters.w_out):
            packs = None if weight is None else _packs.get(owner(weight))
            if packs is None or weight is None or not weight[0].is_contiguous() or weight[0].numel() <= IN_CACHE:
                continue
            if id(packs) not in found:
                packs.follow(owner(weight))
            if weight.data_ptr() not in packs.matrices:
                packs.matrices.update({matrix.data_ptr(): _packed(matrix) for matrix in weight.detach().unbind(0)})
            found[id(packs)] = packs
    return Packed(gemm, [packs.matrices for packs in found.values()]) if found else gemm


class Packed:
    """The products of `gemm`, of packed weights where there are."""

    def __init__(self, gemm: Gemm, matrices: list[dict[int, Tensor]]) -> None:
        self._gemm, self._matrices = gemm, matrices

    def _pack(self, weight: Tensor) -> Tensor | None:
        address = weight.data_ptr()
        return next((pack for matrices in self._matrices if (pack := matrices.get(address)) is not None), None)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
        pack = self._pack(weight)
        return self._gemm.linear(rows, weight, bias, relu) if pack is None else onednn_linear(rows, pack, bias, relu)

    def linear_into(self, output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        pack = self._pack(weight)
        if pack is None:
            self._gemm.linear_into(output, rows, weight, bias)
        else:
            output.copy_(onednn_linear(rows, pack, bias))

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._gemm.product(rows, weight)

    def product_into(self, output: Tensor, rows: Tensor, weight: Tensor) -> None:
        self._gemm.product_into(output, rows, weight)

    def accumulate(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return self._gemm.accumulate(total, rows, weight)

    def weight_gradient(self, output: Tensor, gradient: Tensor, rows: Tensor, add: bool = False) -> None:
        self._gemm.weight_gradient(output, gradient, rows, add)


@cache
def beats_columns(dtype: torch.dtype) -> bool:
    """Whether few rows are faster with a packed weight than as columns with a plain one (`Kernels.few`).

    A timing of this process, which no run records: packing is for serving.
    """
    rows, weight = few_and_large(dtype)
    packs = [_packed(one) for one in weight]
    ways = {
        "packed": lambda: [onednn_linear(*pair) for pair in zip(rows, packs, strict=True)],
        "columns": lambda: in_columns(rows, weight),
    }
    return fastest(ways, 5) == "packed"


def _sample(whole: Tensor) -> Tensor:
    """Values from every expert, in rows and columns that differ."""
    each = whole.detach().flatten(1)
    step = each.shape[1] // max(4, 256 // len(each)) - 1  # not a divisor of the rows' width
    return each[:, :: max(1, step)].contiguous()


def _packed(matrix: Tensor) -> Tensor:
    pack: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)
    return pack


@cache
def works(dtype: torch.dtype) -> bool:
    """Whether packing, which is not public, exists here, and a packed product gives what a plain one gives."""
    if dtype not in (torch.float32, torch.bfloat16) or not onednn_works(dtype):
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 40), (56, 40), (56,)))
    exact = (rows.double() @ weight.double().t() + bias.double()).relu()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            pack = _packed(weight)
            error = (onednn_linear(rows, pack, bias, True).double() - exact).norm()
            return bool(error <= (1e-5 if dtype == torch.float32 else 2e-2) * exact.norm()) and torch.equal(
                pack.to_dense(), weight
            )
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
