"""Recycled storage of weight gradients: only when nobody holds it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.ops import recycling
from pointsman.ops.grouped import apply_experts
from pointsman.ops.recycling import empty_gradient


def address(parameter: Tensor) -> int:
    """Where the next gradient of `parameter` would lie."""
    return empty_gradient(parameter).data_ptr()


@pytest.fixture
def parameter() -> Tensor:
    return torch.randn(4, 6, 5, requires_grad=True)


def test_this_interpreter_can_tell(parameter: Tensor) -> None:
    assert recycling._COUNTS_HOLDERS
    first = address(parameter)
    assert address(parameter) == first
    gradient = empty_gradient(parameter)
    assert (gradient.shape, gradient.stride(), gradient.dtype) == (parameter.shape, parameter.stride(), parameter.dtype)


@pytest.mark.parametrize(
    "hold",
    [
        lambda gradient: gradient,
        lambda gradient: gradient[1, :2],
        lambda gradient: gradient.detach(),
        lambda gradient: gradient.numpy(),
        lambda gradient: gradient.untyped_storage(),
        lambda gradient: torch.from_dlpack(gradient),
        lambda gradient: torch.nn.Parameter(gradient),
    ],
    ids=["tensor", "view", "detached", "numpy", "storage", "dlpack", "parameter"],
)
def test_whoever_holds_it_keeps_it(parameter: Tensor, hold: Callable[[Tensor], Any]) -> None:
    gradient = empty_gradient(parameter)
    taken = gradient.data_ptr()
    held = hold(gradient)
    del gradient
    assert address(parameter) != taken
    del held
    gc.collect()
    assert taken in (address(parameter), recycling._storages[parameter][0].data_ptr())


def test_what_is_forgotten_is_given_back(parameter: Tensor) -> None:
    first = empty_gradient(parameter)
    recycling.forget()
    assert parameter not in recycling._storages
    assert address(parameter) != first.data_ptr()
    assert torch.equal(first.fill_(1), torch.ones_like(parameter))  # what is held stays whole


def test_resized_and_shared_storage_is_left_alone(parameter: Tensor) -> None:
    gradient = empty_gradient(parameter)
    gradient.untyped_storage().resize_(0)
    del gradient
    assert empty_gradient(parameter).untyped_storage().nbytes() == parameter.nbytes
    other = torch.randn(4, 6, 5, requires_grad=True)
    shared = empty_gradient(other).share_memory_()
    taken = shared.data_ptr()
    del shared
    assert address(other) != taken


def test_only_contiguous_leaves(parameter: Tensor) -> None:
    derived = parameter * 2
    empty_gradient(derived)
    assert derived not in recycling._storages
    strided = torch.randn(4, 6, 5).transpose(1, 2).requires_grad_()
    empty_gradient(strided)
    assert strided not in recycling._storages


def test_forgotten_with_its_parameter() -> None:
    gc.collect()
    before = len(recycling._storages)
    parameter = torch.randn(3, requires_grad=True)
    empty_gradient(parameter)
    assert len(recycling._storages) == before + 1
    del parameter
    assert len(recycling._storages) == before


@pytest.mark.parametrize("k", [2, 6])
def test_steps_accumulation_and_gradients_held_by_the_user(problem: Callable[..., Any], k: int) -> None:
    case = problem(k=k)
    tensors = [tensor for tensor in case.parameters if tensor is not None]

    def backward(seed: int) -> list[Tensor]:
        """One backward pass with its own output gradient; what it should add to each .grad."""
        gradient = torch.randn(40, 24, generator=torch.Generator().manual_seed(seed))
        expected = case.reference(gradient)[3:]
        output = apply_experts(case.hidden, case.routing, case.parameters, case.activation)
        output.backward(gradient)
        return expected

    def check(values: list[Tensor], expected: list[Tensor]) -> None:
        for value, other in zip(values, expected, strict=True):
            torch.testing.assert_close(value.double(), other, rtol=1e-4, atol=1e-4)

    first = backward(1)
    held = [tensor.grad for tensor in tensors]
    views = [tensor.grad[0] for tensor in tensors]
    check(held, first)
    for tensor in tensors:
        tensor.grad = None
    second = backward(2)  # the user still holds the first gradients
    check(held, first)
    check(views, [value[0] for value in first])
    check([tensor.grad for tensor in tensors], second)
    third = backward(3)  # accumulates
    check([tensor.grad for tensor in tensors], [one + other for one, other in zip(second, third, strict=True)])
    addresses = {tensor.grad.data_ptr() for tensor in tensors}
    for tensor in tensors:
        tensor.grad = None
    check([tensor.grad for tensor in tensors if tensor.grad is not None], [])
    fourth = backward(4)
    check([tensor.grad for tensor in tensors], fourth)
    check(held, first)
    assert addresses & {storage.data_ptr() for tensor in tensors for storage in recycling._storages[tensor]}


def test_a_parameter_used_twice_in_one_graph(problem: Callable[..., Any]) -> None:
    case = problem()
    gradient = torch.randn(40, 24)
    once = case.reference(gradient)
    total = sum(apply_experts(case.hidden, case.routing, case.parameters, case.activation) for _ in range(3))
    total.backward(gradient)
    torch.testing.assert_close(case.parameters.w_in.grad.double(), 3 * once[3], rtol=1e-4, atol=1e-4)
