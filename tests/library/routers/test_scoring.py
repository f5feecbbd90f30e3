"""Router scores: right in every precision, the same bits when compiled, differentiable twice."""

import pytest
import torch
import torch.nn.functional as F

from pointsman.routers.frame.stages import linear


def inputs(rows, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    tensors = [torch.randn(2, rows, 20), torch.randn(8, 20), torch.randn(8) if bias else None]
    return [tensor if tensor is None else tensor.to(dtype).requires_grad_() for tensor in tensors]


def exact_scores(hidden, weight, bias):
    """F.linear in float64."""
    return F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [3, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_compiled_equals_eager(dtype, rows, bias):
    torch.compiler.reset()
    tensors = inputs(rows, bias, dtype)
    leaves, gradient = [tensor for tensor in tensors if tensor is not None], torch.randn(2, rows, 8)

    def results(output):
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]

    def scores():
        return linear(*tensors)

    eager = results(scores())
    compiled = results(torch.compile(scores, fullgraph=True, backend="aot_eager")())
    exact = results(exact_scores(*tensors))
    assert eager[0].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert torch.equal(eager[0], compiled[0])
    rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other, right in zip(eager, compiled, exact, strict=True):
        torch.testing.assert_close(one.double(), right.double(), rtol=rounding, atol=10 * rounding)
        torch.testing.assert_close(other.double(), right.double(), rtol=rounding, atol=10 * rounding)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own
def test_inductor_gives_the_same_bits():
    """Another last bit may choose another expert."""
    torch.compiler.reset()
    tensors = inputs(600)
    assert torch.equal(torch.compile(linear, fullgraph=True)(*tensors), linear(*tensors))


def test_second_derivatives():
    hidden, weight, _ = tensors = inputs(40, bias=False)
    upper = torch.randn(2, 40, 8)
    second = []
    for function in (linear, F.linear):
        (first,) = torch.autograd.grad((function(*tensors).square() * upper).sum(), hidden, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(second[0], second[1], rtol=1e-4, atol=1e-1)


def test_function_transforms():
    hidden, weight, bias = (tensor.detach() for tensor in inputs(40))
    each = torch.func.vmap(torch.func.grad(lambda one: linear(one, weight, bias).square().sum()))(hidden)
    right = torch.func.vmap(torch.func.grad(lambda one: F.linear(one, weight, bias).square().sum()))(hidden)
    torch.testing.assert_close(each, right)


@pytest.mark.parametrize("compiled", [False, True])
def test_weight_and_bias_may_be_views_of_one_matrix(compiled):
    torch.compiler.reset()
    hidden, both = torch.randn(300, 20), torch.randn(8, 21)  # what HyperRouter generates
    product = torch.compile(linear, fullgraph=True, backend="aot_eager") if compiled else linear
    scores = product(hidden, both[:, :-1], both[:, -1])
    torch.testing.assert_close(scores, F.linear(hidden, both[:, :-1], both[:, -1]), rtol=1e-5, atol=1e-5)
