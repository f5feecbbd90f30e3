"""The fast linear map against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from pointsman.ops import linear as module
from pointsman.ops.gemm import onednn_works
from pointsman.ops.kernels import Kernels, using
from pointsman.ops.linear import linear, linears, upcast

pytestmark = pytest.mark.usefixtures("onednn_takes_all")


@pytest.fixture
def small_blocks(monkeypatch):
    """Of 300 rows, 20 wide."""
    monkeypatch.setattr(module, "BLOCK", 300 * 20)


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
    with using(Kernels(gemm=gemm)):
        got = linear(hidden, weight, bias)
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(
        torch.autograd.grad(got, inputs, upper), torch.autograd.grad(expected, inputs, upper), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gemm", ["blas", "onednn"])
@pytest.mark.parametrize("biases", [False, True])
def test_several_maps_of_one_input(gemm, biases):
    hidden = torch.randn(3, 7, 20, requires_grad=True)
    maps = [(torch.randn(n, 20, requires_grad=True), torch.randn(n, requires_grad=True) if biases else None)
            for n in (5, 9, 1)]  # fmt: skip
    leaves = [hidden, *(one for pair in maps for one in pair if one is not None)]
    with using(Kernels(gemm=gemm)):
        got = linears(hidden, maps)
    expected = [F.linear(hidden, *pair) for pair in maps]
    upper = [torch.randn_like(one) for one in expected]
    for mine, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)
    first, right = (torch.autograd.grad(outputs, leaves, upper, create_graph=True) for outputs in (got, expected))
    for mine, exact in zip(first, right, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-4)
    second, exact = (torch.autograd.grad(one[0].square().sum(), maps[1][0])[0] for one in (first, right))
    torch.testing.assert_close(second, exact, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(torch.autograd.grad(linears(hidden, maps), leaves, upper), right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gemm", ["blas", "onednn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [5, 603])
def test_half_precision_meets_a_float32_weight(small_blocks, dtype, rows, gemm):
    hidden = torch.randn(rows, 20).to(dtype).requires_grad_()
    weight, bias = torch.randn(27, 20, requires_grad=True), torch.randn(27, requires_grad=True)
    upper = torch.randn(rows, 27)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = F.linear(*exact)
    with using(Kernels(gemm=gemm)):
        got = linear(hidden, weight, bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    results = torch.autograd.grad(got, (hidden, weight, bias), upper)
    assert results[0].dtype == dtype
    right = torch.autograd.grad(expected, exact, upper.double())
    for mine, other, bound in zip(results, right, (4e-3, 1e-5, 1e-5), strict=True):
        assert (mine.double() - other).norm() <= bound * other.norm()


def test_half_precision_is_raised_block_by_block(small_blocks, monkeypatch):
    if not onednn_works(torch.float32):
        pytest.skip("oneDNN's products do not work here")
    sizes = []
    products = module.ONEDNN
    monkeypatch.setattr(type(products), "linear", lambda self, rows, *rest, out: sizes.append(len(rows)))
    with using(Kernels(gemm="onednn")):
        linear(torch.randn(603, 20).bfloat16(), torch.randn(5, 20))
        linear(torch.randn(600, 100).bfloat16(), torch.randn(5, 100))
    assert sizes == [300, 300, 3, 256, 256, 88]


def test_second_derivatives_in_half_precision():
    hidden, weight = torch.randn(6, 4).bfloat16().requires_grad_(), torch.randn(5, 4, requires_grad=True)
    second = []
    with using(Kernels(gemm="onednn")):
        fast = linear(hidden, weight)
    for output in (fast, F.linear(upcast(hidden), weight)):
        (first,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        second.append(torch.autograd.grad(first.float().square().sum(), weight)[0])
    torch.testing.assert_close(*second, rtol=1e-2, atol=1e-1)


def test_only_what_is_wanted_is_computed():
    if not onednn_works(torch.float32):
        pytest.skip("oneDNN's products do not work here")
    weight = torch.randn(5, 4, requires_grad=True)
    with using(Kernels(gemm="onednn")):
        output = linear(torch.randn(3, 4).transpose(0, 1).contiguous().transpose(0, 1), weight)
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
