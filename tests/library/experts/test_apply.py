"""Which path experts take, and what none of them may get wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import function
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import PLAIN, Kernels, using


def run(case: Any, kernels: Kernels | None = None) -> Tensor:
    with using(kernels):
        return apply_experts(case.hidden, case.routing, case.parameters, case.activation)


def test_subclasses_of_tensor_take_the_plain_path(problem: Callable[..., Any]) -> None:
    class Wrapped(Tensor):
        pass

    case = problem()
    expected = run(case, PLAIN)
    case.hidden = case.hidden.detach().as_subclass(Wrapped)
    assert torch.equal(run(case).as_subclass(Tensor), expected)


def test_float64_and_mixed_dtypes_take_the_plain_path(
    problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem(dtype=torch.float64).check(run)
    monkeypatch.setattr(function, "apply", None)  # the fast path must not be reached
    problem(dtype=torch.float64).check(run)
    problem(dtype=torch.float32).check(lambda case: run(case, PLAIN))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kernels", [None, PLAIN])
def test_a_trace_that_would_keep_the_choice_of_its_example_is_refused(
    problem: Callable[..., Any], kernels: Kernels | None
) -> None:
    case = problem()

    def traced(hidden: Tensor) -> Tensor:
        case.hidden = hidden
        return run(case, kernels)

    with pytest.raises(ValueError, match=r"use torch\.export"):
        torch.jit.trace(traced, case.hidden.detach())


@pytest.mark.parametrize("kernels", [None, PLAIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_hidden_and_weights(
    problem: Callable[..., Any], dtype: torch.dtype, kernels: Kernels | None
) -> None:
    case = problem(dtype=dtype)
    lowered = problem(dtype=torch.float32)
    gradient = torch.randn(40, 24, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        output = run(case, kernels)
    assert output.dtype == torch.bfloat16
    got = torch.autograd.grad(output, case.leaves, gradient)
    assert [value.dtype for value in got] == [leaf.dtype for leaf in case.leaves]
    lowered.hidden = case.hidden.detach().bfloat16().requires_grad_()
    lowered.parameters = ExpertParameters(
        *(None if tensor is None else tensor.detach().bfloat16().requires_grad_() for tensor in case.parameters)
    )
    expected = torch.autograd.grad(run(lowered, kernels), lowered.leaves, gradient)
    for value, other in zip(got, expected, strict=True):
        torch.testing.assert_close(value.float(), other.float(), rtol=0, atol=0)


def test_autocast_leaves_float64_alone(problem: Callable[..., Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        problem(dtype=torch.float64).check(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch meets its own
@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_forward_mode_keeps_the_tangent(problem: Callable[..., Any], tokens: int, k: int) -> None:
    case = problem(tokens, k=k)
    tangent = torch.randn_like(case.hidden)
    with torch.no_grad(), forward_ad.dual_level():
        case.hidden = forward_ad.make_dual(case.hidden.detach(), tangent)
        fast, plain = (forward_ad.unpack_dual(run(case, kernels)).tangent for kernels in (None, PLAIN))
    assert float(plain.norm()) > 0
    assert torch.equal(fast, plain)


def test_transforms_of_functions_work(problem: Callable[..., Any]) -> None:
    case = problem()
    (expected,) = torch.autograd.grad(run(case).sum(), case.parameters.w_in)

    def loss(w_in: Tensor) -> Tensor:
        parameters = case.parameters._replace(w_in=w_in)
        return apply_experts(case.hidden.detach(), case.routing.detach(), parameters).sum()

    torch.testing.assert_close(torch.func.grad(loss)(case.parameters.w_in.detach()), expected)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "chosen"), [(1, 6, 6), (1, 6, 10**6), (5, 6, 7), (200, 6, 7), (200, 200, 258)]
)
@pytest.mark.parametrize("training", [False, True])
def test_an_expert_that_does_not_exist_is_refused(
    problem: Callable[..., Any], tokens: int, num_experts: int, chosen: int, training: bool
) -> None:
    case = problem(tokens, num_experts=num_experts)
    case.routing.experts[-1, -1] = chosen
    with torch.set_grad_enabled(training), pytest.raises(ValueError, match=f"expert {chosen}: there are {num_experts}"):
        run(case)


@pytest.mark.parametrize("kernels", [None, PLAIN])
@pytest.mark.parametrize("tokens", [1, 5, 7, 400])
def test_a_routing_of_other_tokens_is_refused(
    problem: Callable[..., Any], tokens: int, kernels: Kernels | None
) -> None:
    case = problem(6)
    refused = pytest.raises(ValueError, match=f"of 6 tokens, the hidden states are of {tokens}")
    with torch.no_grad(), using(kernels), refused:
        apply_experts(torch.randn(tokens, 24), case.routing, case.parameters)
