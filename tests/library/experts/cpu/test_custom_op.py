"""torch.compile on a CPU: the custom operators, and a whole layer as one graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman import MoE, set_top_k
from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import function

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile meets its own


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("k", "options"),
    [
        (2, {"activation": "silu", "gated": True, "dropped": 0.2}),
        (6, {"activation": "gelu"}),
        (2, {"bias": False, "favourite": 20.0}),
        (2, {"pairs": True}),
    ],
)
def test_equals_eager(problem: Callable[..., Any], k: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    case = problem(k=k, dtype=dtype, **options)

    def layer(case: Any) -> Tensor:
        return apply_experts(case.hidden, case.routing, case.parameters, case.activation)

    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradient = torch.randn(40, 24, dtype=dtype)
    for got, expected in zip(
        (graph(case), *torch.autograd.grad(graph(case), case.leaves, gradient)),
        (layer(case), *torch.autograd.grad(layer(case), case.leaves, gradient)),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_operators_are_well_formed(problem: Callable[..., Any]) -> None:
    case = problem(gated=True, dropped=0.2)
    seed = torch.zeros((), dtype=torch.int64)
    for expert in (case.routing.experts, torch.zeros_like(case.routing.experts)):
        arguments = (case.hidden, case.weights, None, expert, *case.parameters, seed, "silu", 0.0, True)
        # without its comparison of outputs: the end of what is kept is not initialised
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(function.experts_forward, arguments, test_utils=checks)


@pytest.mark.slow
def test_whole_layer_through_a_schedule_of_k() -> None:
    layer = MoE(16, 24, 16, top_k=2, activation="gelu")
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(2, 15, 16, requires_grad=True)
    for k in range(2, 17):
        set_top_k(layer, k)
        results = []
        for module in (layer, graph):
            output = module(hidden)
            results.append([output, *torch.autograd.grad(output.square().sum(), [hidden, *layer.parameters()])])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_inductor_with_autocast_and_dropout() -> None:
    layer = MoE(16, 24, 8, top_k=2, gated=True, activation="silu", dropout=0.1)
    graph = torch.compile(layer, fullgraph=True, dynamic=False)
    hidden = torch.randn(2, 15, 16)
    with torch.autocast("cpu", torch.bfloat16):
        graph(hidden).sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())
        layer.eval()
        with torch.no_grad():
            torch.testing.assert_close(graph(hidden), layer(hidden), rtol=2e-2, atol=2e-2)
