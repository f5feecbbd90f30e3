"""Flash kernels for attention with relative positions against the equations in float64: output and every gradient."""

from __future__ import annotations

import pytest
import torch

from pointsman.kernels import attention
from tests.library.kernels.relative import draw, padding, reference, through_the_kernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


CASES = [(7, 4, 5, "none"), (19, 0, 16, "left"), (1, 9, 3, "right"), (33, 20, 20, "left"), (1, 0, 5, "none")]
"""Queries, memory, head width, padding."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_against_float64(case: tuple[int, int, int, str], dtype: torch.dtype) -> None:
    length, memory, width, side = case
    inputs = draw(length=length, memory=memory, width=width, dtype=dtype)
    mask = None if side == "none" else padding(2, length + memory, side)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    right = reference(*exact, 0.37, mask)
    got = through_the_kernels(inputs, 0.37, mask)
    assert got.dtype == dtype
    assert got.permute(1, 2, 0, 3).is_contiguous()
    upper = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = [got, *torch.autograd.grad(got, inputs, upper)]
    for mine, theirs in zip(results, [right, *torch.autograd.grad(right, exact, upper.double())], strict=True):
        error, size = (mine.double() - theirs).norm(), theirs.norm() + theirs.numel() ** 0.5
        assert error <= TOLERANCE[dtype] * size


def test_the_same_twice() -> None:
    inputs = draw(length=20, memory=5, dtype=torch.float32)
    results = []
    for _ in range(2):
        output = through_the_kernels(inputs, 0.37)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "with_triton", lambda _: True)
    query, positions = torch.randn(2, 1, 4, 8), torch.randn(2, 4, 8)
    assert attention.suits(query, positions, 0.0)
    assert not attention.suits(query, positions, 0.1)
    assert not attention.suits(query.double(), positions, 0.0)
    assert not attention.suits(torch.randn(1, 1, 2, 256), positions, 0.0)
    monkeypatch.setattr(attention, "MOST", 10)
    assert not attention.suits(query, positions, 0.0)
