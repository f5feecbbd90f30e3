"""The fast linear map against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from pointsman.ops.gemm import onednn_works
from pointsman.ops.kernels import Kernels
from pointsman.ops.linear import linear

pytestmark = pytest.mark.usefixtures("onednn_takes_all")


@pytest.mark.parametrize("gemm", ["blas", "onednn"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 20), (1, 1, 20), (5, 20), (0, 4, 20), (64, 20)])
def test_forward_and_gradients_equal_torch(shape, with_bias, gemm):
    hidden = torch.randn(shape, requires_grad=True)
    weight = torch.randn(30, 20)[3:].requires_grad_()
    bias = torch.randn(27, requires_grad=True) if with_bias else None
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    expected = F.linear(hidden, weight, bias)
    upper = torch.randn_like(expected)
    got = linear(hidden, weight, bias, Kernels(gemm=gemm))
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(
        torch.autograd.grad(got, inputs, upper), torch.autograd.grad(expected, inputs, upper), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-4)


def test_only_what_is_wanted_is_computed():
    if not onednn_works(torch.float32):
        pytest.skip("oneDNN's products do not work here")
    weight = torch.randn(5, 4, requires_grad=True)
    output = linear(
        torch.randn(3, 4).transpose(0, 1).contiguous().transpose(0, 1), weight, None, Kernels(gemm="onednn")
    )
    assert type(output.grad_fn.next_functions[0][0]).__name__ == "_LinearBackward"
    (gradient,) = torch.autograd.grad(output.expand(2, 3, 5).sum(), weight)
    assert gradient.shape == (5, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_go_through_torch(dtype):
    hidden, weight = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    assert torch.equal(linear(hidden, weight), F.linear(hidden, weight))


def test_autocast_is_obeyed():
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(3, 4), torch.randn(5, 4)).dtype == torch.bfloat16
