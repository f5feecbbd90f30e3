"""Router scores: right, the same bits when compiled, differentiable twice."""

import pytest
import torch
import torch.nn.functional as F

from pointsman.ops.kernels import PLAIN, Kernels, using
from pointsman.routers.frame.scoring import FEW, linear, score, score_backward

pytestmark = pytest.mark.usefixtures("onednn_takes_all")


def inputs(rows, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    tensors = [torch.randn(2, rows, 20), torch.randn(8, 20), torch.randn(8) if bias else None]
    return [tensor if tensor is None else tensor.to(dtype).requires_grad_() for tensor in tensors]


def exact_scores(hidden, weight, bias):
    """F.linear in at least float32."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [3, FEW])
@pytest.mark.parametrize(
    ("gemm", "dtype"),
    [("blas", torch.float32), ("onednn", torch.float32), ("onednn", torch.float64), ("onednn", torch.bfloat16)],
)
def test_compiled_equals_eager(dtype, gemm, rows, bias):
    torch.compiler.reset()
    tensors = inputs(rows, bias, dtype)
    leaves, gradient = [tensor for tensor in tensors if tensor is not None], torch.randn(2, rows, 8)

    def scores():
        return linear(*tensors)

    def results(output):
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]

    with using(Kernels(gemm=gemm)):
        eager = results(scores())
        compiled = results(torch.compile(scores, fullgraph=True, backend="aot_eager")())
    exact = results(exact_scores(*tensors))
    assert torch.equal(eager[0], compiled[0])
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other, right in zip(eager, compiled, exact, strict=True):
        torch.testing.assert_close(one, right, rtol=rounding, atol=10 * rounding)
        torch.testing.assert_close(other, right, rtol=rounding, atol=10 * rounding)


@pytest.mark.parametrize("kernels", [PLAIN, Kernels(gemm="onednn")])
def test_second_derivatives(kernels):
    hidden, weight, _ = tensors = inputs(FEW, bias=False)
    upper = torch.randn(2, FEW, 8)
    second = []
    for function in (linear, F.linear):
        with using(kernels):
            output = function(*tensors)
        (first,) = torch.autograd.grad((output.square() * upper).sum(), hidden, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(second[0], second[1], rtol=1e-4, atol=1e-1)


def test_few_rows_and_plain_kernels_take_the_ordinary_product():
    hidden, weight, bias = inputs(FEW)
    with using(PLAIN):
        assert torch.equal(linear(hidden, weight, bias), F.linear(hidden, weight, bias))
    few = hidden[:1, :7]
    with using(Kernels(gemm="onednn")):
        assert torch.equal(linear(few, weight, bias), F.linear(few, weight, bias))


@pytest.mark.parametrize("gemm", ["blas", "onednn"])
def test_compiled_takes_any_strides(gemm):
    torch.compiler.reset()
    hidden, weight = torch.randn(20, FEW).t().requires_grad_(), torch.randn(8, 20, requires_grad=True)
    upper = torch.randn(FEW, 8)

    def results(function):
        output = function(hidden, weight)
        return [output.detach(), *torch.autograd.grad(output, (hidden, weight), upper)]

    with using(Kernels(gemm=gemm)):
        compiled, eager = results(torch.compile(linear, fullgraph=True, backend="aot_eager")), results(linear)
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    rows = hidden.detach()  # what compilers are told of the strides is so
    torch.library.opcheck(score, (rows, weight.detach(), None, gemm), test_utils="test_faketensor")
    torch.library.opcheck(score_backward, (upper, rows, weight.detach(), gemm), test_utils="test_faketensor")


def test_function_transforms():
    hidden, weight, bias = (tensor.detach() for tensor in inputs(FEW))
    with using(Kernels(gemm="onednn")):
        each = torch.func.vmap(torch.func.grad(lambda one: linear(one, weight, bias).square().sum()))(hidden)
    right = torch.func.vmap(torch.func.grad(lambda one: F.linear(one, weight, bias).square().sum()))(hidden)
    torch.testing.assert_close(each, right)


@pytest.mark.parametrize("gemm", ["blas", "onednn"])
@pytest.mark.parametrize("compiled", [False, True])
def test_weight_and_bias_may_be_views_of_one_matrix(gemm, compiled):
    torch.compiler.reset()
    hidden, both = torch.randn(FEW, 20), torch.randn(8, 21)  # what HyperRouter generates
    product = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    with using(Kernels(gemm=gemm)):
        scores = product(hidden, both[:, :-1], both[:, -1])
    torch.testing.assert_close(scores, F.linear(hidden, both[:, :-1], both[:, -1]), rtol=1e-5, atol=1e-5)
