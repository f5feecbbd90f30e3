"""All kernels together against the float64 reference: outputs and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.kernels.triton import function
from pointsman.ops.feed_forward import ExpertParameters


def run(case: Any, dropout: float = 0.0) -> Tensor:
    return function.apply(case.hidden, case.weights, case.routing.experts, case.parameters, case.activation, dropout)


CASES: list[dict[str, Any]] = [
    {"tokens": 33, "dim": 24, "hidden_dim": 40, "num_experts": 5, "k": 2, "dropped": 0.2},
    {"tokens": 1, "dim": 7, "hidden_dim": 9, "num_experts": 3, "k": 3, "gated": True, "activation": "silu"},
    {"tokens": 20, "dim": 16, "hidden_dim": 24, "num_experts": 9, "k": 1, "favourite": 20.0, "bias": False},
    {"tokens": 19, "dim": 33, "hidden_dim": 17, "num_experts": 4, "k": 2, "gated": True, "activation": "gelu"},
    {"tokens": 12, "dim": 16, "hidden_dim": 16, "num_experts": 2, "k": 2, "dropped": 1.0},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_against_the_reference(problem: Callable[..., Any], case: dict[str, Any], dtype: torch.dtype) -> None:
    problem(dtype=dtype, **case).check(run)


def test_weights_of_one_tensor(problem: Callable[..., Any]) -> None:
    """Gate and input as halves of one tensor, and transposed weights, which are copied."""
    case = problem(tokens=9, dim=24, hidden_dim=20, num_experts=3, k=2, gated=True, activation="silu", bias=False)
    p = case.parameters
    both = torch.cat([p.w_gate, p.w_in], 1)
    views = p._replace(w_gate=both[:, :20], w_in=both[:, 20:], w_out=p.w_out.mT.contiguous().mT)
    given = case.hidden, case.weights, case.routing.experts
    found = function.apply(*given, views, "silu", 0.0)
    gradients = torch.autograd.grad(found.square().sum(), case.leaves)
    expected = run(case)
    assert torch.equal(found, expected)
    for one, other in zip(gradients, torch.autograd.grad(expected.square().sum(), case.leaves), strict=True):
        assert torch.equal(one, other)


def test_a_dropped_weight_is_not_read(problem: Callable[..., Any]) -> None:
    case = problem(tokens=10)
    with torch.no_grad():
        case.routing.experts[:, 0] = -1
        case.weights[:, 0] = torch.nan
    output = run(case)
    assert output.isfinite().all()
    assert all(value.isfinite().all() for value in torch.autograd.grad(output.sum(), case.leaves))


def test_dropout_reaches_all_gradients(problem: Callable[..., Any]) -> None:
    """Without biases ReLU's output is homogeneous in the inputs and in each weight: gradients see forward's masks."""
    case = problem(tokens=16, dim=16, hidden_dim=24, num_experts=3, k=2, bias=False)
    output = run(case, 0.4)
    gradient = torch.randn_like(output)
    assert not torch.equal(output, run(case, 0.4)), "a mask of its own in each call"
    for leaf, found in zip(case.leaves, torch.autograd.grad(output, case.leaves, gradient), strict=True):
        torch.testing.assert_close((leaf * found).sum(), (output * gradient).sum(), rtol=1e-3, atol=1e-3)


def test_the_same_twice(problem: Callable[..., Any]) -> None:
    case = problem(tokens=30)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        output = run(case, 0.2)
        results.append([output, *torch.autograd.grad(output.square().sum(), case.leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_are_refused(problem: Callable[..., Any]) -> None:
    case = problem(tokens=4)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(run(case).sum(), case.hidden, create_graph=True)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_compiles_to_one_graph(problem: Callable[..., Any]) -> None:
    case = problem(tokens=8, gated=True, activation="silu", dropped=0.2)

    def layer(hidden: Tensor, weights: Tensor, expert: Tensor, *tensors: Tensor) -> Tensor:
        return function.apply(hidden, weights, expert, ExpertParameters(*tensors), "silu", 0.0)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = (case.hidden, case.weights, case.routing.experts, *case.parameters)
    gradient = torch.randn_like(case.hidden)
    for got, expected in zip(
        torch.autograd.grad(compiled(*inputs), case.leaves, gradient),
        torch.autograd.grad(layer(*inputs), case.leaves, gradient),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_frozen_weights_have_no_gradient_computed(problem: Callable[..., Any], launches: list[str]) -> None:
    case = problem(tokens=6, gated=True, activation="silu")
    whole = torch.autograd.grad(run(case).square().sum(), case.leaves)
    launches.clear()
    p = case.parameters
    for tensor in (p.w_in, p.w_gate, p.b_gate):
        tensor.requires_grad_(False)
    wanted = [case.hidden, case.weights, p.w_out, p.b_in, p.b_out]
    found = torch.autograd.grad(run(case).square().sum(), wanted)
    for got, right in zip(found, [*whole[:2], whole[3], whole[4], whole[5]], strict=True):
        assert torch.equal(got, right)
    assert launches.count("outer_kernel") == 2, "that of w_out, and that which sums b_in's"
    for tensor in p:
        tensor.requires_grad_(False)
    launches.clear()
    (found,) = torch.autograd.grad(run(case).square().sum(), [case.hidden])
    assert torch.equal(found, whole[0])
    assert "outer_kernel" not in launches
    case.hidden.requires_grad_(False)
    launches.clear()
    torch.autograd.grad(run(case).square().sum(), [case.weights])
    assert launches.count("rows_kernel") == 1, "forward's: nobody wants the gradient of the hidden states"


@pytest.mark.parametrize("gated", [False, True])
def test_no_tokens(problem: Callable[..., Any], gated: bool) -> None:
    case = problem(tokens=0, gated=gated, activation="silu")
    output = run(case)
    assert output.shape == (0, 24)
    for leaf, found in zip(case.leaves, torch.autograd.grad(output.sum(), case.leaves), strict=True):
        assert torch.equal(found, torch.zeros_like(leaf))
