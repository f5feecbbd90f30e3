"""Products of single rows with the weights of experts: [1, in] times [out, in] transposed, many at once.

A row costs one read of its expert's weight and one call. One operation of torch takes the inner products of listed
pairs of rows in parallel: the gradient of `embedding_bag`'s weights. It computes all rows of all experts in one call.
Whether that or one torch.mv for each row is faster depends on the processor (`Kernels.row`).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

DTYPES = {torch.float32, torch.bfloat16}


def linear(rows: Tensor, source: Tensor, weight: Tensor, expert: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each row times its expert's weight transposed: [S, out].

    Args:
        rows: [n, in], contiguous.
        source: [S], which row.
        weight: [E, out, in], each expert's contiguous.
        expert: [S], whose weight.
        bias: [E, out].
    """
    count, out, width = weight.shape
    outputs = torch.arange(out, device="cpu")
    apart = weight.stride(0) // width
    lines = weight.as_strided(((count - 1) * apart + out, width), (width, 1))
    line = torch.add(outputs, expert[:, None], alpha=apart)
    bag = source[:, None].expand(-1, out).contiguous()
    output = _dots(rows, lines, line.view(-1), bag.view(-1)).view(-1, out)
    return output if bias is None else output.add_(bias.index_select(0, expert))


def each(left: Tensor, right: Tensor) -> Tensor:
    """left[i] . right[i] of rows [n, width]: [n], without storing left * right."""
    if left.dtype not in DTYPES or not works():
        return (left * right).sum(-1)
    rows = torch.arange(len(left), device="cpu")
    return _dots(left, right, rows, rows)


def suits(weight: Tensor) -> bool:
    """Whether `linear` takes this weight."""
    return weight.dtype in DTYPES and weight[0].is_contiguous() and not weight.stride(0) % weight.shape[2] and works()


def _dots(left: Tensor, right: Tensor, line: Tensor, bag: Tensor) -> Tensor:
    """left[bag] . right[line], of each pair."""
    output: Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(left, right, line, bag, bag, 0)
    return output


@cache
def works() -> bool:
    """Whether this torch has the private operation, and its result equals torch.mm's."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(3, 40, generator=generator, dtype=torch.float32, device="cpu")
    right = torch.randn(7, 40, generator=generator, dtype=torch.float32, device="cpu")
    bag, line = torch.tensor([2, 0, 0, 1], device="cpu"), torch.tensor([6, 6, 1, 3], device="cpu")
    expected = (left.double() @ right.double().t())[bag, line]
    try:
        with torch.no_grad():
            return all(
                bool((_dots(left.to(dtype), right.to(dtype), line, bag).double() - expected).norm() <= bound)
                for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.3))
            )
    except (AttributeError, RuntimeError, TypeError):
        return False
