"""Memory that is used again: only when nobody holds it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import memory
from pointsman.experts.cpu.dispatch import rows_at_most
from pointsman.experts.cpu.function import sharing
from pointsman.experts.cpu.hidden_units import HiddenUnits
from pointsman.experts.cpu.memory import empty_gradient, empty_rows, spend, spent
from pointsman.experts.reference import ExpertParameters
from pointsman.ops.gemm import Blas


def address(parameter: Tensor) -> int:
    """Where the next gradient of `parameter` would lie."""
    return empty_gradient(parameter).data_ptr()


@pytest.fixture
def parameter() -> Tensor:
    return torch.randn(4, 6, 5, requires_grad=True)


def test_this_interpreter_can_tell(parameter: Tensor) -> None:
    assert memory._COUNTS_HOLDERS
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
    assert taken in (address(parameter), memory._storages[parameter][0].data_ptr())


def test_many_that_were_held_at_once_do_not_stay(parameter: Tensor) -> None:
    held = [empty_gradient(parameter) for _ in range(10)]
    assert len({gradient.data_ptr() for gradient in held}) == 10
    kept, last = held[3].data_ptr(), held.pop(3)
    held.clear()
    taken = empty_gradient(parameter)
    assert taken.data_ptr() != kept
    assert len(memory._storages[parameter]) == 3  # the held one, the taken one, and one to spare
    assert len({address(parameter), taken.data_ptr(), kept}) == 3
    del last


def test_what_is_forgotten_is_given_back(parameter: Tensor) -> None:
    first = empty_gradient(parameter)
    memory.forget()
    assert parameter not in memory._storages
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
    assert derived not in memory._storages
    strided = torch.randn(4, 6, 5).transpose(1, 2).requires_grad_()
    empty_gradient(strided)
    assert strided not in memory._storages


def test_forgotten_with_its_parameter() -> None:
    gc.collect()
    before = len(memory._storages)
    parameter = torch.randn(3, requires_grad=True)
    empty_gradient(parameter)
    assert len(memory._storages) == before + 1
    del parameter
    assert len(memory._storages) == before


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
    assert addresses & {storage.data_ptr() for tensor in tensors for storage in memory._storages[tensor]}


def test_a_parameter_used_twice_in_one_graph(problem: Callable[..., Any]) -> None:
    case = problem()
    gradient = torch.randn(40, 24)
    once = case.reference(gradient)
    total = sum(apply_experts(case.hidden, case.routing, case.parameters, case.activation) for _ in range(3))
    total.backward(gradient)
    torch.testing.assert_close(case.parameters.w_in.grad.double(), 3 * once[3], rtol=1e-4, atol=1e-4)


@pytest.fixture
def empty() -> None:
    memory.forget()


ROWS = memory.LEAST // 4  # of one float32


def test_rows_are_shared_by_all_parameters(empty: None, parameter: Tensor) -> None:
    other = torch.randn(2, dtype=torch.bfloat16)
    rows = empty_rows(parameter, ROWS, 1)
    assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((ROWS, 1), torch.float32, True)
    taken = rows.data_ptr()
    assert empty_rows(other, ROWS, 2).data_ptr() != taken  # held
    view = rows[3:4]
    del rows
    assert empty_rows(parameter, ROWS // 2, 2).data_ptr() != taken
    del view
    memory._rows.pop(other)
    assert empty_rows(other, ROWS, 2).dtype == torch.bfloat16
    assert empty_rows(other, ROWS, 2).data_ptr() == taken


def test_rows_that_have_become_too_few_are_given_back(empty: None, parameter: Tensor) -> None:
    held = empty_rows(parameter, ROWS, 1)
    empty_rows(parameter, 2 * ROWS, 1)
    other = torch.randn(2)
    empty_rows(other, 4 * ROWS, 1)
    sizes = [storage.nbytes() for storages in memory._rows.values() for storage in storages]
    assert sorted(sizes) == [size + size // 8 for size in (held.nbytes, 4 * held.nbytes)]
    assert empty_rows(parameter, 4 * ROWS + ROWS // 4, 1).nbytes <= sizes[-1]
    assert len(memory._rows[parameter]) == 1


def test_few_rows_are_fresh(empty: None, parameter: Tensor) -> None:
    assert empty_rows(parameter, ROWS - 1, 1).shape == (ROWS - 1, 1)
    assert not memory._rows


def test_spent_units_come_back_in_their_order(empty: None, parameter: Tensor) -> None:
    units = [torch.randn(index) for index in range(4)]
    spend(parameter, units)
    assert [len(one) for one in reversed(spent(parameter))] == [0, 1, 2, 3]
    assert spent(parameter) == []


def test_spent_units_of_another_parameter(empty: None, parameter: Tensor) -> None:
    other = torch.randn(2)
    spend(parameter, [torch.randn(1)])
    assert len(spent(other)) == 1
    assert spent(parameter) == []
    spend(other, [torch.randn(1)])
    del other
    gc.collect()
    assert spent(parameter) == []


class Counting(Blas):
    """Products that note how many spent units there are when they are called."""

    def __init__(self, spent: list[Tensor]) -> None:
        self.spent, self.counts = spent, []

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
        self.counts.append(len(self.spent))
        return super().linear(rows, weight, bias, relu)


@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("gelu", False), ("silu", True)])
def test_each_is_let_go_of_before_its_successor_is_made(activation: str, gated: bool) -> None:
    old = [torch.randn(1) for _ in range(5)]
    gemm = Counting(old)
    first = HiddenUnits(activation, 0.0, gemm, None, old)
    gate = torch.randn(6, 5) if gated else None
    expert = ExpertParameters(torch.randn(6, 5), torch.randn(5, 6), None, None, gate, None)
    kept = [first.forward(torch.randn(3, 5), expert)[1] for _ in range(3)]
    assert gemm.counts == ([4, 3, 2, 1, 0, 0] if gated else [4, 3, 2])
    assert sum(map(len, kept)) == len(gemm.counts)


@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("gated", [False, True])
def test_units_stay_until_the_next_call(empty: None, problem: Callable[..., Any], k: int, gated: bool) -> None:
    case = problem(k=k, gated=gated)

    def run() -> Tensor:
        return apply_experts(case.hidden, case.routing, case.parameters, case.activation)

    w_in = case.parameters.w_in
    for _ in range(2):
        output = run()
        assert w_in not in memory._spent
        output.sum().backward()
        rows = sum(unit.numel() for unit in memory._spent[w_in]) / w_in.shape[1] / (1 + gated)
        assert 40 * k <= rows <= rows_at_most(40 * k, 6, sharing(w_in.dtype, w_in[0].numel()))
    with torch.no_grad():
        run()
    assert w_in not in memory._spent  # evaluation gives them back
