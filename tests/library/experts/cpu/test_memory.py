"""Weight gradients in freed buffers: reused only when nothing refers to them."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import function
from pointsman.experts.cpu.function import empty_gradient


@pytest.fixture(autouse=True)
def _small_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "SMALLEST", 0)


@pytest.fixture
def parameter() -> Tensor:
    return torch.randn(4, 6, 5, requires_grad=True)


def address(parameter: Tensor) -> int:
    """Where the next gradient of `parameter` would lie."""
    return empty_gradient(parameter).data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_freed_gradient_is_reused(dtype: torch.dtype) -> None:
    parameter = torch.randn(4, 6, 5, dtype=dtype, requires_grad=True)
    gradient = empty_gradient(parameter)
    assert (gradient.shape, gradient.stride(), gradient.dtype) == (parameter.shape, parameter.stride(), dtype)
    taken = gradient.data_ptr()
    assert taken % 64 == 0
    del gradient
    assert address(parameter) == taken


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
def test_a_gradient_that_is_held_is_not_reused(parameter: Tensor, hold: Callable[[Tensor], Any]) -> None:
    gradient = empty_gradient(parameter)
    taken = gradient.data_ptr()
    held = hold(gradient)
    del gradient
    assert address(parameter) != taken
    del held
    gc.collect()
    assert taken in {empty.data_ptr() for empty in [empty_gradient(parameter), empty_gradient(parameter)]}


def test_of_many_gradients_two_stay(parameter: Tensor) -> None:
    held = [empty_gradient(parameter) for _ in range(10)]
    assert len({gradient.data_ptr() for gradient in held}) == 10
    held.clear()
    (freed,) = (blocks for storage, blocks in function._freed.items() if storage is parameter.untyped_storage())
    assert len(freed) == 2
    function.forget()
    assert not freed


def test_a_released_gradient_stays_whole(parameter: Tensor) -> None:
    first = empty_gradient(parameter).fill_(1)
    function.forget()
    empty_gradient(parameter).fill_(2)
    assert torch.equal(first, torch.ones_like(parameter))


def test_shared_memory_is_left_alone(parameter: Tensor) -> None:
    shared = empty_gradient(parameter).share_memory_().fill_(1)
    empty_gradient(parameter).fill_(2)
    assert torch.equal(shared, torch.ones_like(parameter))


def test_only_contiguous_leaves_of_some_size(parameter: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(function._freed)
    empty_gradient(parameter * 2)
    empty_gradient(torch.randn(4, 6, 5).transpose(1, 2).requires_grad_())
    monkeypatch.setattr(function, "SMALLEST", parameter.nbytes + 1)
    empty_gradient(parameter)
    assert len(function._freed) == before


def test_buffers_end_with_their_parameter() -> None:
    parameter = torch.randn(3, requires_grad=True)
    gradient = empty_gradient(parameter)
    (freed,) = (blocks for storage, blocks in function._freed.items() if storage is parameter.untyped_storage())
    del gradient
    block = weakref.ref(freed[0])
    del parameter, freed
    gc.collect()
    assert block() is None


def test_parameters_can_still_be_swapped(parameter: Tensor) -> None:
    empty_gradient(parameter)
    other = torch.nn.Parameter(torch.zeros(2))
    torch.utils.swap_tensors(parameter, other)
    assert other.shape == (4, 6, 5)


@pytest.mark.parametrize("k", [2, 6])
def test_steps_accumulation_and_gradients_held_by_the_user(problem: Callable[..., Any], k: int) -> None:
    case = problem(k=k, hidden_dim=30)  # rows that are not whole 16 bytes: not on grouped_mm, which reuses nothing
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
    fourth = backward(4)
    check([tensor.grad for tensor in tensors], fourth)
    check(held, first)
    assert addresses & {tensor.grad.data_ptr() for tensor in tensors}


def test_a_parameter_used_twice_in_one_graph(problem: Callable[..., Any]) -> None:
    case = problem()
    gradient = torch.randn(40, 24)
    once = case.reference(gradient)
    total = sum(apply_experts(case.hidden, case.routing, case.parameters, case.activation) for _ in range(3))
    total.backward(gradient)
    torch.testing.assert_close(case.parameters.w_in.grad.double(), 3 * once[3], rtol=1e-4, atol=1e-4)
