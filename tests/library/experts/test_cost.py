"""What a call must not cost, in operators and elements, so that no clock is needed.

The time of a call must not grow with experts that no token chose, nor memory with the square of the experts, and many
small experts must not pay a call into torch each.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pointsman.experts.apply import apply_experts
from pointsman.ops.kernels import PLAIN, using


class Count(TorchDispatchMode):
    """Counts operators, and the elements that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        if not func.is_view:
            outputs = result if isinstance(result, tuple | list) else (result,)
            self.elements += sum(output.numel() for output in outputs if isinstance(output, torch.Tensor))
        return result


def count(function: Callable[[], Any]) -> Count:
    function()  # what is measured or cached at the first use
    with Count() as counted:
        function()
    return counted


VIEWS = {
    "select",
    "slice",
    "unsqueeze",
    "view",
    "t",
    "detach",
    "alias",
    "transpose",
    "unbind",
    "_unsafe_view",
    "expand",
    "as_strided",
    "split",
    "split_with_sizes",
    "squeeze",
}


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (8, 8)])
def test_a_step_allocates_a_few_times_its_hidden_units(problem: Callable[..., Any], num_experts: int, k: int) -> None:
    case = problem(400, 16, 24, num_experts, k)

    def step() -> None:
        output = apply_experts(case.hidden, case.routing, case.parameters)
        torch.autograd.grad(output, case.leaves, torch.ones_like(output))

    assert count(step).elements <= 18 * 400 * k * 24 + 2 * weights(case)


def weights(case: Any) -> int:
    return sum(tensor.numel() for tensor in case.parameters if tensor is not None)


def test_plain_step_makes_no_gradient_of_all_weights_for_each_expert(problem: Callable[..., Any]) -> None:
    case = problem(30, 16, 24, 32, 1)

    def step() -> None:
        with using(PLAIN):
            output = apply_experts(case.hidden, replace(case.routing), case.parameters)
        torch.autograd.grad(output, case.leaves, torch.ones_like(output))

    assert count(step).elements <= 4 * weights(case) + 32 * 2 * 30 * 16 + 20 * 30 * 24


def test_evaluation_touches_only_chosen_experts(problem: Callable[..., Any]) -> None:
    few, many = (problem(1, 16, 24, num_experts, 2) for num_experts in (4, 128))

    def run(case: Any) -> Count:
        with torch.no_grad():
            return count(lambda: apply_experts(case.hidden, case.routing, case.parameters, "relu"))

    assert sum(run(many).calls.values()) == sum(run(few).calls.values()) <= 60


@pytest.mark.parametrize(
    ("dtype", "tokens", "dims", "shared"),
    [
        (torch.bfloat16, 400, (16, 24), True),
        (torch.float32, 800, (16, 24), True),
        (torch.float32, 20000, (16, 24), True),
        (torch.float32, 100, (256, 320), False),
    ],
)
def test_small_experts_share_their_calls(
    problem: Callable[..., Any], dtype: torch.dtype, tokens: int, dims: tuple[int, int], shared: bool
) -> None:
    case = problem(tokens, *dims, 32, 2, dtype=dtype)

    def step() -> None:
        output = apply_experts(case.hidden, case.routing, case.parameters)
        torch.autograd.grad(output, case.leaves, torch.ones_like(output))

    work = sum(calls for name, calls in count(step).calls.items() if name not in VIEWS)
    assert (work <= 100) == shared
