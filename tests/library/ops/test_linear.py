"""The linear map of mixed precision against F.linear in float64."""

import pytest
import torch
import torch.nn.functional as F

from pointsman.ops.linear import linear, upcast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_precision_goes_through_torch(dtype):
    hidden, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 3, 4), (5, 4), (5,)))
    assert torch.equal(linear(hidden, weight, bias), F.linear(hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_meets_a_float32_weight(dtype):
    hidden = torch.randn(63, 20).to(dtype).requires_grad_()
    weight, bias = torch.randn(27, 20, requires_grad=True), torch.randn(27, requires_grad=True)
    upper = torch.randn(63, 27)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = F.linear(*exact)
    got = linear(hidden, weight, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    results = torch.autograd.grad(got, (hidden, weight, bias), upper)
    assert results[0].dtype == dtype
    right = torch.autograd.grad(expected, exact, upper.double())
    for mine, other, bound in zip(results, right, (4e-3, 1e-5, 1e-5), strict=True):
        assert (mine.double() - other).norm() <= bound * other.norm()


def test_autocast_is_obeyed():
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(3, 4), torch.randn(5, 4)).dtype == torch.bfloat16


def test_upcast_leaves_what_is_exact():
    assert [upcast(torch.zeros(1, dtype=dtype)).dtype for dtype in (torch.float16, torch.bfloat16, torch.float64)] == [
        torch.float32, torch.float32, torch.float64
    ]  # fmt: skip
