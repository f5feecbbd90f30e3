"""Matrix products on a CPU: through BLAS, or through oneDNN.

The torch wheel contains both. On AMD processors oneDNN's float32 kernels are about twice as fast as MKL; on others
they may not be. `Kernels.gemm` says which one a run uses; `measure_kernels` chooses it by a timing. In bfloat16 both
names mean oneDNN.

Shapes: `rows` [n, d], weights in nn.Linear's layout [out, in].
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Maybe = Tensor | None


class Gemm(Protocol):
    """The products that a feed-forward expert needs. Nothing here is differentiable."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Maybe = None, relu: bool = False, out: Maybe = None) -> Tensor:
        """rows weight' + bias, through a ReLU if `relu`: [n, out]; written into `out` if given."""
        ...

    def product(self, rows: Tensor, weight: Tensor, out: Maybe = None) -> Tensor:
        """rows weight: [n, in], the gradient of `linear`'s rows; written into `out` if given."""
        ...

    def accumulate(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        """total + rows weight'; may overwrite `total`."""
        ...

    def weight_gradient(self, output: Tensor, gradient: Tensor, rows: Tensor, add: bool = False) -> None:
        """output = gradient' rows: [out, in], the gradient of `linear`'s weight; with `add`, output += the same."""
        ...


class Blas:
    """torch.mm: MKL or OpenBLAS in float32, oneDNN in bfloat16."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Maybe = None, relu: bool = False, out: Maybe = None) -> Tensor:
        columns = weight.t()
        output = torch.mm(rows, columns, out=out) if bias is None else torch.addmm(bias, rows, columns, out=out)
        return output.relu_() if relu else output

    def product(self, rows: Tensor, weight: Tensor, out: Maybe = None) -> Tensor:
        return torch.mm(rows, weight, out=out)

    def accumulate(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return total.addmm_(rows, weight.t())

    def weight_gradient(self, output: Tensor, gradient: Tensor, rows: Tensor, add: bool = False) -> None:
        if add:
            output.addmm_(gradient.t(), rows)
        else:
            torch.mm(gradient.t(), rows, out=output)


class BlasRelu(Blas):
    """torch.mm, with oneDNN's rectified linear product: bfloat16."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Maybe = None, relu: bool = False, out: Maybe = None) -> Tensor:
        return onednn_linear(rows, weight, bias, relu) if relu else super().linear(rows, weight, bias, out=out)


class Batched:
    """torch.bmm: weights of several experts [E, out, in]. Each expert has the same number of consecutive rows."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Maybe = None, relu: bool = False, out: Maybe = None) -> Tensor:
        output = rows.new_empty(len(rows), weight.shape[1]) if out is None else out
        each, inputs = _apart(output, len(weight)), _apart(rows, len(weight))
        if bias is None:
            torch.bmm(inputs, weight.mT, out=each)
        else:
            torch.baddbmm(bias[:, None], inputs, weight.mT, out=each)
        return output.relu_() if relu else output

    def product(self, rows: Tensor, weight: Tensor, out: Maybe = None) -> Tensor:
        each = None if out is None else _apart(out, len(weight))
        return torch.bmm(_apart(rows, len(weight)), weight, out=each).view(len(rows), -1)

    def accumulate(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        _apart(total, len(weight)).baddbmm_(_apart(rows, len(weight)), weight.mT)
        return total

    def weight_gradient(self, output: Tensor, gradient: Tensor, rows: Tensor, add: bool = False) -> None:
        columns, inputs = _apart(gradient, len(output)).mT, _apart(rows, len(output))
        if add:
            output.baddbmm_(columns, inputs)
        else:
            torch.bmm(columns, inputs, out=output)


class OneDNN:
    """oneDNN's linear product, float32. A transposed weight is fast, a slice of wider rows very slow.

    A call costs about 10 us more than BLAS's, so small products go to BLAS.
    """

    def linear(self, rows: Tensor, weight: Tensor, bias: Maybe = None, relu: bool = False, out: Maybe = None) -> Tensor:
        count, width = rows.shape
        small = _small(rows, weight)
        if 2 <= count <= 4 and width <= 1024 and (out is None or not small):
            result = _as_columns(rows, weight, bias, relu)
        elif small or (count <= 7 and weight.numel() <= IN_CACHE):
            return BLAS.linear(rows, weight, bias, relu, out)
        else:
            result = onednn_linear(rows, weight, bias, relu)
        return result if out is None else out.copy_(result)

    def product(self, rows: Tensor, weight: Tensor, out: Maybe = None) -> Tensor:
        if _small(rows, weight):
            return BLAS.product(rows, weight, out)
        result = onednn_linear(rows, weight.t())
        return result if out is None else out.copy_(result)

    def accumulate(self, total: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, total, weight, None, "add")
        return result

    def weight_gradient(self, output: Tensor, gradient: Tensor, rows: Tensor, add: bool = False) -> None:
        if len(rows) * output.numel() <= 2 * SMALL:  # twice the bound, because oneDNN copies its inputs here
            BLAS.weight_gradient(output, gradient, rows, add)
            return
        result = _onednn_weight_gradient(gradient, rows)
        if add:
            output.add_(result)
        else:
            output.copy_(result)


IN_CACHE = 1 << 19
"""Elements of a weight up to which the calls take longer than reading it."""
SMALL = 1 << 21
"""Multiply-accumulates up to which BLAS is faster than oneDNN."""


def _small(rows: Tensor, weight: Tensor) -> bool:
    return len(rows) * weight.numel() <= SMALL


def _apart(rows: Tensor, experts: int) -> Tensor:
    """[experts, n, width]: each expert's rows."""
    return rows.view(experts, -1, rows.shape[1])


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """rows weight' + bias, rectified if asked: oneDNN's."""
    bias = None if bias is None else bias.contiguous()  # its strides would be ignored
    output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "relu" if relu else "none", [], "")
    return output


def _onednn_weight_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient' rows. What is transposed is copied, on one thread: the first operand, or the second and the result."""
    if gradient.numel() <= rows.numel() + gradient.shape[1] * rows.shape[1]:
        return onednn_linear(gradient.t(), rows.t())
    return onednn_linear(rows.t(), gradient.t()).t()


def _as_columns(rows: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """The same as weight rows': where measured, faster for so few rows."""
    columns = rows.t()
    output = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
    output = output.t().contiguous()
    return output.relu_() if relu else output


BLAS, BLAS_RELU, ONEDNN, BATCHED = Blas(), BlasRelu(), OneDNN(), Batched()
GEMMS: dict[str, Gemm] = {"blas": BLAS, "blas+relu": BLAS_RELU, "onednn": ONEDNN}
"""What `choose` gives, by name."""


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's products, which are not public, exist here and give what torch.mm gives on a small input."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    rows, weight, bias, total, gradient = draw(24, 40), draw(56, 40), draw(56), draw(24, 56), draw(24, 56)

    def close(got: Tensor, expected: Tensor) -> bool:
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        return bool((got.double() - expected).norm() <= tolerance * expected.norm())

    exact: Any = [tensor.double() for tensor in (rows, weight, bias, total, gradient)]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            kept = rows.clone()
            right = close(onednn_linear(rows, weight, bias, True), (exact[0] @ exact[1].t() + exact[2]).relu())
            if dtype == torch.float32:
                # not through ONEDNN, which leaves products as small as these to BLAS
                right &= close(onednn_linear(gradient, weight.t()), exact[4] @ exact[1])
                right &= close(_onednn_weight_gradient(gradient, rows), exact[4].t() @ exact[0])
                right &= close(_onednn_weight_gradient(rows, gradient), exact[0].t() @ exact[4])
                right &= close(ONEDNN.accumulate(total, rows, weight), exact[3] + exact[0] @ exact[1].t())
            return right and torch.equal(rows, kept)
    except (AttributeError, RuntimeError, TypeError):
        return False


def choose(name: str, dtype: torch.dtype) -> Gemm:
    """The products for a dtype: in float32 those of the backend `name` ("blas" or "onednn"), BLAS where oneDNN does not
    work; in bfloat16, whatever the name, torch.mm with oneDNN's rectified product where that works."""
    if (name == "onednn" or dtype == torch.bfloat16) and onednn_works(dtype):
        return ONEDNN if dtype == torch.float32 else BLAS_RELU
    return BLAS
