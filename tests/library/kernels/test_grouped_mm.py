"""The GPU path's logic, run on a CPU (`grouped_mm` exists there too), and on a GPU where there is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pointsman.experts.apply import apply_experts
from pointsman.kernels import grouped_mm
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.routing import Routing


def run(case: Any, dropout: float = 0.0) -> Tensor:
    _, token, expert = case.routing.assignments
    return grouped_mm.apply(case.hidden, case.weights, token, expert, case.parameters, case.activation, dropout)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_shape_against_the_reference(problem: Callable[..., Any], data: st.DataObject) -> None:
    draw = data.draw
    num_experts = draw(st.integers(1, 9), "experts")
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "dtype")
    # in half precision rounding decides on which side of 0 a unit of a relu lies, and so a whole row of its gradient
    smooth = ["gelu", "silu"] if dtype != torch.float32 else ["relu", "gelu", "silu"]
    case = problem(
        draw(st.sampled_from([1, 2, 7, 33, 150]), "tokens"),
        draw(st.integers(1, 40), "dim"),
        draw(st.integers(1, 40), "hidden_dim"),
        num_experts,
        draw(st.integers(1, num_experts), "k"),
        dtype=dtype,
        activation=draw(st.sampled_from(smooth), "activation"),
        gated=draw(st.booleans(), "gated"),
        bias=draw(st.booleans(), "bias"),
        dropped=draw(st.sampled_from([0.0, 0.3]), "dropped"),
        pairs=draw(st.booleans(), "pairs"),
        favourite=draw(st.sampled_from([0.0, 20.0]), "favourite"),
        seed=draw(st.integers(0, 1000), "seed"),
    )
    if case.weights.numel():
        case.check(run)


def test_all_assignments_dropped(problem: Callable[..., Any]) -> None:
    problem(dropped=1.0).check(run)


def test_undefined_rows_reach_nothing(problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        output = torch.nn.functional.grouped_mm(left, right, offs=ends)
        if right.dim() == 3:
            output[int(ends[-1]) :] = torch.nan
        else:  # on Blackwell
            output[torch.diff(ends, prepend=ends.new_zeros(1)) == 0] = torch.nan
        return output

    monkeypatch.setattr(grouped_mm, "grouped_mm", poisoned)
    for gated in (False, True):
        problem(3, 8, 8, 9, 2, gated=gated).check(run)  # unused experts
        case = problem(dropped=0.5, gated=gated)
        assert int((case.routing.experts < 0).sum()) > 10
        case.check(run)


def test_a_dropped_weight_is_not_read(problem: Callable[..., Any]) -> None:
    case = problem()
    with torch.no_grad():
        case.routing.experts[:, 0] = -1
        case.weights[:, 0] = torch.nan
    output = run(case)
    assert output.isfinite().all()
    assert all(value.isfinite().all() for value in torch.autograd.grad(output.sum(), case.leaves))


@pytest.mark.parametrize("kind", ["zero-stride", "strided"])
def test_gradients_of_any_stride(problem: Callable[..., Any], kind: str) -> None:
    gradient = torch.ones(()).expand(40, 24) if kind == "zero-stride" else torch.randn(24, 80).t()[::2]
    problem().check(run, gradient)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_dropout(problem: Callable[..., Any], activation: str) -> None:
    case = problem(600, 16, 16, 3, 1, activation=activation, bias=False)
    with torch.no_grad():
        case.parameters.w_out.copy_(torch.eye(16).expand(3, 16, 16))
        clean, dropped = run(case), run(case, 0.25)
    kept = dropped != 0
    assert abs(float(kept[clean.abs() > 1e-6].float().mean()) - 0.75) < 0.02
    torch.testing.assert_close(dropped[kept], (clean / 0.75)[kept], rtol=1e-5, atol=1e-6)
    # linear in the weights: the gradient must see the forward's mask
    torch.manual_seed(2)
    output = run(case, 0.25)
    gradient = torch.randn_like(output)
    (weights,) = torch.autograd.grad(output, case.weights, gradient, retain_graph=True)
    torch.testing.assert_close((weights * case.weights).sum(), (output * gradient).sum(), rtol=1e-3, atol=1e-3)
    (w_out,) = torch.autograd.grad(output, case.parameters.w_out, gradient)
    torch.testing.assert_close((w_out * case.parameters.w_out).sum(), (output * gradient).sum(), rtol=1e-3, atol=1e-3)


def test_dropout_of_relu_reaches_all_gradients(problem: Callable[..., Any]) -> None:
    """Without biases the output is homogeneous in the inputs and in each weight; ReLU's zeros stand for the mask."""
    case = problem(200, 16, 24, 3, 2, bias=False)
    output = run(case, 0.25)
    gradient = torch.randn_like(output)
    for leaf, found in zip(case.leaves, torch.autograd.grad(output, case.leaves, gradient), strict=True):
        torch.testing.assert_close((leaf * found).sum(), (output * gradient).sum(), rtol=1e-3, atol=1e-3)


def test_an_expert_that_does_not_exist_is_refused(problem: Callable[..., Any]) -> None:
    case = problem()
    case.routing.experts[3, 0] = 6
    with pytest.raises(RuntimeError, match="beyond the 6 that exist"):
        run(case)


@pytest.mark.parametrize("num_experts", [255, 256, 300])
def test_layout_of_many_experts(num_experts: int) -> None:
    expert = torch.randint(-1, num_experts, (500,))
    where = grouped_mm.layout(expert, 1, None, num_experts)
    keys = torch.where(expert < 0, num_experts, expert)
    kept = int((expert >= 0).sum())
    assert torch.equal(where.order[:kept], keys.argsort(stable=True)[:kept])
    assert where.ends.tolist() == [int((keys <= one).sum()) for one in range(num_experts)]
    assert bool((where.row[expert < 0] == 500).all())
    assert torch.equal(where.order[where.row[expert >= 0].long()], (expert >= 0).nonzero()[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_keeps_half_precision(problem: Callable[..., Any], dtype: torch.dtype) -> None:
    case = problem(200, 16, 16, 3, 2, dtype=dtype)
    torch.manual_seed(2)
    output = run(case, 0.25)
    gradient = torch.randn_like(output)
    found = torch.autograd.grad(output, case.leaves, gradient)
    assert output.dtype == dtype
    assert [value.dtype for value in found] == [leaf.dtype for leaf in case.leaves]
    (weights,) = (value for leaf, value in zip(case.leaves, found, strict=True) if leaf is case.weights)
    linear = (weights.float() * case.weights.float()).sum()  # the output is linear in the weights
    torch.testing.assert_close(linear, (output.float() * gradient.float()).sum(), rtol=0.05, atol=0.5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_to_one_graph(problem: Callable[..., Any], dtype: torch.dtype) -> None:
    case = problem(dtype=dtype, gated=True, activation="silu", dropped=0.2)

    def layer(hidden: Tensor, weights: Tensor, expert: Tensor, *tensors: Tensor) -> Tensor:
        return grouped_mm.apply(hidden, weights, None, expert, ExpertParameters(*tensors), "silu", 0.0)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = (case.hidden, case.weights, case.routing.experts, *case.parameters)
    gradient = torch.randn(40, 24, dtype=dtype)
    for got, expected in zip(
        torch.autograd.grad(compiled(*inputs), case.leaves, gradient),
        torch.autograd.grad(layer(*inputs), case.leaves, gradient),
        strict=True,
    ):
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_graph_hands_over_strides_that_a_gpu_takes(
    problem: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of outer products, [m, S] times [S, n], rows must lie one after another: in a graph, `F.grouped_mm` itself was
    once given a left operand whose columns did, and ended on the device."""
    case, strides = problem(dtype=torch.bfloat16), []
    original = torch.nn.functional.grouped_mm

    def seen(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        strides.append((left.stride(), right.stride()))
        return original(left, right, **options)

    monkeypatch.setattr(grouped_mm.F, "grouped_mm", seen)

    def layer(hidden: Tensor, weights: Tensor, expert: Tensor, *tensors: Tensor) -> Tensor:
        return grouped_mm.apply(hidden, weights, None, expert, ExpertParameters(*tensors), "relu", 0.0)

    torch._dynamo.reset()
    inputs = (case.hidden, case.weights, case.routing.experts, *case.parameters)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    torch.autograd.grad(compiled(*inputs), case.leaves, torch.randn(40, 24, dtype=torch.bfloat16))
    in_graphs, strides[:] = list(strides), []
    torch.autograd.grad(layer(*inputs), case.leaves, torch.randn(40, 24, dtype=torch.bfloat16))
    assert len(in_graphs) == len(strides) >= 5
    assert sorted(in_graphs) == sorted(strides)  # Inductor orders them as it likes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("favourite", [0.0, 20.0])
    @pytest.mark.parametrize("gated", [False, True])
    def test_against_the_reference(
        self, problem: Callable[..., Any], dtype: torch.dtype, favourite: float, gated: bool
    ) -> None:
        case = problem(500, 64, 96, 8, 2, dtype=dtype, gated=gated, dropped=0.2, favourite=favourite)

        def on_device(case: Any) -> Tensor:
            tensors = (None if tensor is None else tensor.cuda() for tensor in case.parameters)
            r = case.routing
            routing = Routing(r.experts.cuda(), case.weights.cuda(), r.probs.cuda(), r.logits.cuda())
            output = apply_experts(case.hidden.cuda(), routing, ExpertParameters(*tensors), case.activation)
            return output.cpu()

        case.check(on_device)

    def test_a_step_is_captured_in_a_graph(self, problem: Callable[..., Any]) -> None:
        case = problem(512, 64, 96, 8, 2, dtype=torch.bfloat16)
        leaves = [leaf.detach().cuda().requires_grad_() for leaf in case.leaves]
        experts = case.routing.experts.cuda()
        gradient = torch.randn(512, 64, dtype=torch.bfloat16, device="cuda")

        def step() -> list[Tensor]:
            hidden, weights, *tensors = leaves
            output = grouped_mm.apply(hidden, weights, None, experts, ExpertParameters(*tensors), "relu", 0.0)
            return [output, *torch.autograd.grad(output, leaves, gradient)]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                expected = [tensor.clone() for tensor in step()]
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        experts.copy_(experts.flip(0))
        graph.replay()
        assert not torch.equal(captured[0], expected[0])
        experts.copy_(experts.flip(0))
        graph.replay()
        for got, value in zip(captured, expected, strict=True):
            torch.testing.assert_close(got, value)
