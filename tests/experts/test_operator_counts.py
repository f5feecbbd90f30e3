"""A guard against slow regressions that no clock can disturb: how many operators one step runs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pointsman import MoE
from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import decode
from pointsman.ops.kernels import PLAIN, Kernels


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


@pytest.mark.parametrize("gemm", ["blas", "onednn"])
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (8, 8)])
def test_experts_step(problem: Callable[..., Any], num_experts: int, k: int, gemm: str) -> None:
    case = problem(400, 16, 24, num_experts, k)

    def step() -> None:
        kernels = Kernels("fast", gemm)
        output = apply_experts(case.hidden, case.routing, case.parameters, "relu", 0.0, kernels)
        torch.autograd.grad(output, case.leaves, torch.ones_like(output))

    counted = count(step)
    products = sum(counted.calls[name] for name in ("mm", "addmm", "addmm_", "_linear_pointwise", "linear"))
    work = sum(calls for name, calls in counted.calls.items() if name not in VIEWS)
    assert products <= 8 * num_experts + 6  # two forward, four backward, two for biases, and a few for all
    assert work <= 30 * num_experts + 40
    assert counted.elements <= (11 if k == num_experts else 16) * 400 * k * 24 + 2 * weights(case)


def weights(case: Any) -> int:
    return sum(tensor.numel() for tensor in case.parameters if tensor is not None)


def test_plain_step_makes_no_gradient_of_all_weights_for_each_expert(problem: Callable[..., Any]) -> None:
    case = problem(30, 16, 24, 32, 1)

    def step() -> None:
        output = apply_experts(case.hidden, replace(case.routing), case.parameters, "relu", 0.0, PLAIN)
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
        (torch.float32, 100, (256, 320), True),
        (torch.float32, 800, (256, 320), False),
    ],
)
def test_small_experts_share_their_calls(
    problem: Callable[..., Any], dtype: torch.dtype, tokens: int, dims: tuple[int, int], shared: bool
) -> None:
    case = problem(tokens, *dims, 32, 2, dtype=dtype)

    def step() -> None:
        output = apply_experts(case.hidden, case.routing, case.parameters, "relu", 0.0, Kernels("fast", "onednn"))
        torch.autograd.grad(output, case.leaves, torch.ones_like(output))

    work = sum(calls for name, calls in count(step).calls.items() if name not in VIEWS)
    assert (work <= 100) == shared


DOTS = "_embedding_bag_per_sample_weights_backward"
DECODING = {
    (1, "dots"): (DOTS, 2, 16),
    (4, "dots"): (DOTS, 2, 20),
    (32, "dots"): ("bmm", 2, 20),
    (1, "mv"): ("mv", 4, 16),
    (32, "mv"): ("bmm", 2, 20),
}


@pytest.mark.parametrize(("tokens", "row"), DECODING)
def test_decoding_experts(problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tokens: int, row: str) -> None:
    monkeypatch.setattr(decode, "TINY", 0)
    case = problem(tokens, 16, 24, 4, 2, bias=False)

    def step() -> None:
        with torch.no_grad():
            apply_experts(case.hidden, case.routing, case.parameters, "relu", 0.0, Kernels("fast", "onednn", row))

    counted = count(step)
    name, calls, most = DECODING[tokens, row]
    assert counted.calls[name] == calls
    assert sum(calls for name, calls in counted.calls.items() if name not in VIEWS) <= most


def test_decoding_layer() -> None:
    layer, hidden = MoE(16, 24, 64, top_k=2, bias=False).eval(), torch.randn(1, 16)

    def decode() -> None:
        with torch.no_grad():
            layer(hidden)

    assert sum(calls for name, calls in count(decode).calls.items() if name not in VIEWS) <= 24


def test_layer_step() -> None:
    layer = MoE(16, 24, 8, top_k=2)
    hidden = torch.randn(400, 16, requires_grad=True)

    def step() -> None:
        output = layer(hidden)
        torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))

    router = MoE(16, 24, 8, top_k=2).router
    weights = torch.ones(400, 2)

    def route() -> None:
        torch.autograd.grad(router(hidden).weights, [hidden, *router.parameters()], weights)

    assert sum(count(route).calls.values()) <= 60
    assert sum(count(step).calls.values()) <= 60 + 75 * 8
