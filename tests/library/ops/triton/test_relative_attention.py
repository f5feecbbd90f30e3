"""Flash kernels for attention with relative positions against the equations in float64: output and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.ops import attention_on_gpu
from pointsman.ops.attention import traced_attention
from tests.library.ops.test_attention import draw, padding, reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_on_gpu, "wanted", lambda _: True)


def ours(inputs: list[Tensor], mask: Tensor | None, trace: bool = False) -> Any:
    query, key, value, *others = inputs
    return traced_attention(query, torch.stack([key, value]), *others, scale=0.37, key_mask=mask, trace=trace)


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
    got = ours(inputs, mask)[0]
    assert got.dtype == dtype
    assert got.permute(1, 2, 0, 3).is_contiguous()
    upper = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = [got, *torch.autograd.grad(got, inputs, upper)]
    for mine, theirs in zip(results, [right, *torch.autograd.grad(right, exact, upper.double())], strict=True):
        error, size = (mine.double() - theirs).norm(), theirs.norm() + theirs.numel() ** 0.5
        assert error <= TOLERANCE[dtype] * size


def test_single_heads() -> None:
    """Gradients through the heads that are traced join those of the output."""
    inputs = draw(length=6, memory=3, dtype=torch.float32)
    output, each = ours(inputs, None, trace=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parts = [exact[0], exact[1], exact[2]]
    total = output.square().sum() + sum(each[part][head].sin().sum() for part, head in ((0, 2), (1, 0), (2, 2)))
    right = reference(*exact, 0.37).square().sum()
    right = right + sum(parts[part][head].sin().sum() for part, head in ((0, 2), (1, 0), (2, 2)))
    for mine, theirs in zip(torch.autograd.grad(total, inputs), torch.autograd.grad(right, exact), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_the_same_twice() -> None:
    inputs = draw(length=20, memory=5, dtype=torch.float32)
    results = []
    for _ in range(2):
        output = ours(inputs, None)[0]
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    query, positions = torch.randn(2, 1, 4, 8), torch.randn(2, 4, 8)
    assert attention_on_gpu.suits(query, positions, 0.0)
    assert not attention_on_gpu.suits(query, positions, 0.1)
    assert not attention_on_gpu.suits(query.double(), positions, 0.0)
    assert not attention_on_gpu.suits(torch.randn(1, 1, 2, 256), positions, 0.0)
    monkeypatch.setattr(attention_on_gpu, "MOST", 10)
    assert not attention_on_gpu.suits(query, positions, 0.0)
