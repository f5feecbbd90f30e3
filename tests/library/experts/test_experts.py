"""The fast path on a CPU against the float64 reference: outputs and every gradient."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pointsman.experts.apply import apply_experts
from pointsman.experts.cpu import products, sorting
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import PLAIN, Kernels, using


def run(case: Any, kernels: Kernels | None = None) -> Tensor:
    with using(kernels):
        return apply_experts(case.hidden, case.routing, case.parameters, case.activation)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_shape_against_the_reference(problem: Callable[..., Any], data: st.DataObject) -> None:
    draw = data.draw
    num_experts = draw(st.integers(1, 9), "experts")
    step = draw(st.sampled_from([1, 8]), "step")  # 8: widths that grouped_mm takes
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype")
    # in half precision rounding decides on which side of 0 a unit of a relu lies, and so a whole row of its gradient
    smooth = ["gelu", "silu"] if dtype != torch.float32 else ["relu", "gelu", "silu"]
    case = problem(
        draw(st.sampled_from([1, 2, 7, 33, 150]), "tokens"),
        step * draw(st.integers(1, 40 // step), "dim"),
        step * draw(st.integers(1, 40 // step), "hidden_dim"),
        num_experts,
        draw(st.integers(1, num_experts), "k"),
        dtype=dtype,
        activation=draw(st.sampled_from(smooth), "activation"),
        gated=draw(st.booleans(), "gated"),
        bias=draw(st.booleans(), "bias"),
        dropped=draw(st.sampled_from([0.0, 0.3, 1.0]), "dropped"),
        pairs=draw(st.booleans(), "pairs"),
        favourite=draw(st.sampled_from([0.0, 20.0]), "favourite"),
        seed=draw(st.integers(0, 1000), "seed"),
    )
    most, copied = draw(st.sampled_from([100, 1000, sorting.MOST]), "most"), draw(st.sampled_from([0, 8192]), "copied")
    with mock.patch.object(sorting, "MOST", most), mock.patch.object(products, "COPIED", copied):
        case.check(run)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_tokens_than_a_piece_holds(problem: Callable[..., Any], dtype: torch.dtype, k: int) -> None:
    with mock.patch.object(sorting, "MOST", 1 << 13):
        problem(2500, 16, 24, 4, k, dtype=dtype).check(run)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_zero_and_nearly_zero_have_gradients(
    problem: Callable[..., Any], dtype: torch.dtype, gated: bool
) -> None:
    case = problem(tokens=300, k=6, dtype=dtype, gated=gated, activation="silu" if gated else "relu")
    with torch.no_grad():
        for start, value in enumerate([0.0, 1e-45, 1e-30, 1e-13, 1e-11, -0.3]):
            case.weights[start::7, start % 3] = value
    case.check(run)
    gradient = torch.randn_like(case.hidden)
    exact = case.reference(gradient)[2]
    (got,) = torch.autograd.grad(run(case), case.weights, gradient)
    strange = (case.weights.abs() < 1e-10) | (case.weights < 0)
    assert int(strange.sum()) > 200
    torch.testing.assert_close(
        got.double()[strange], exact[strange], rtol=0.05, atol=5e-2 if dtype.itemsize == 2 else 1e-5
    )


@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("kind", ["zero-stride", "strided"])
def test_gradients_of_any_stride(problem: Callable[..., Any], kind: str, k: int) -> None:
    case = problem(k=k)
    whole = torch.randn(24, 80)
    gradient = torch.ones(()).expand(40, 24) if kind == "zero-stride" else whole.t()[::2]
    assert not gradient.is_contiguous()
    case.check(run, gradient)


def test_inputs_of_any_stride(problem: Callable[..., Any]) -> None:
    case = problem()
    strided = [tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in case.parameters[:2]]
    case.hidden = case.hidden.detach().t().contiguous().t().requires_grad_()
    case.parameters = ExpertParameters(*(tensor.requires_grad_() for tensor in strided), *case.parameters[2:])
    assert not case.parameters.w_in.is_contiguous()
    case.check(run)


def test_a_token_may_choose_an_expert_twice(problem: Callable[..., Any]) -> None:
    for k in (2, 6):
        case = problem(k=k)
        case.routing.experts[:, 1] = case.routing.experts[:, 0]
        case.check(run)


def test_no_tokens(problem: Callable[..., Any]) -> None:
    case = problem(tokens=4)
    case.hidden = torch.zeros(0, 24, requires_grad=True)
    case.routing = type(case.routing)(
        *(t[:0] for t in (case.routing.experts, case.weights, case.routing.probs)), case.routing.logits[:0]
    )
    output = run(case)
    output.sum().backward()
    assert output.shape == (0, 24)
    assert case.parameters.w_in.grad.abs().sum() == 0


@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("gated", [False, True])
def test_evaluation_equals_training(problem: Callable[..., Any], gated: bool, k: int) -> None:
    case = problem(300, k=k, gated=gated)  # one token has its own path: test_decode.py
    with torch.no_grad():
        evaluated = run(case)
    assert torch.equal(evaluated, run(case).detach())
    assert evaluated.grad_fn is None


@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize("frozen", ["hidden", "weights", "w_in", "w_out", "b_in", "b_out", "w_gate", "b_gate"])
def test_frozen_inputs_get_no_gradient_and_change_no_other(problem: Callable[..., Any], frozen: str, k: int) -> None:
    case = problem(k=k, gated=True)
    gradient = torch.randn(40, 24)
    everything = torch.autograd.grad(run(case), case.leaves, gradient)
    tensor = getattr(case.parameters, frozen, None) if frozen.startswith(("w_", "b_")) else getattr(case, frozen)
    tensor.requires_grad_(False)
    rest = [leaf for leaf in case.leaves if leaf.requires_grad]
    expected = [value for leaf, value in zip(case.leaves, everything, strict=True) if leaf.requires_grad]
    assert len(rest) == 7
    for got, value in zip(torch.autograd.grad(run(case), rest, gradient), expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("k", [2, 6])
def test_frozen_experts_skip_their_products(problem: Callable[..., Any], k: int) -> None:
    def products_of(case: Any) -> int:
        output = run(case).sum()
        with torch.profiler.profile() as profile:
            output.backward()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_grouped_mm")

    trained, case = problem(k=k), problem(k=k)
    for tensor in case.parameters:
        if tensor is not None:
            tensor.requires_grad_(False)
    assert (products_of(trained), products_of(case)) == (4, 2)
    assert case.hidden.grad is not None


@pytest.mark.parametrize("k", [2, 6])
@pytest.mark.parametrize(("activation", "gated"), [("relu", False), ("gelu", False), ("silu", True)])
def test_backward_can_run_twice(problem: Callable[..., Any], activation: str, gated: bool, k: int) -> None:
    case = problem(k=k, activation=activation, gated=gated)
    output, gradient = run(case), torch.randn(40, 24)
    first = torch.autograd.grad(output, case.leaves, gradient, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(output, case.leaves, gradient), strict=True):
        assert torch.equal(one, other)


def test_default_dtype_and_device_do_not_matter(problem: Callable[..., Any]) -> None:
    case = problem(dropped=0.2)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            output = apply_experts(case.hidden, case.routing, case.parameters, "relu", 0.1)
            output.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (output.dtype, output.device.type) == (torch.float32, "cpu")
    assert case.hidden.grad is not None


def test_second_derivatives_are_refused(problem: Callable[..., Any]) -> None:
    case = problem()
    with pytest.raises(RuntimeError, match=r"second derivatives.*PLAIN"):
        torch.autograd.grad(run(case).sum(), case.hidden, create_graph=True)
    (first,) = torch.autograd.grad(run(case, PLAIN).sum(), case.hidden, create_graph=True)
    first.square().sum().backward()
    assert case.parameters.w_out.grad is not None


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_gives_the_same_bits(problem: Callable[..., Any], dtype: torch.dtype, activation: str) -> None:
    case = problem(dtype=dtype, activation=activation)

    def layer(hidden: Tensor) -> Tensor:
        return apply_experts(hidden, case.routing, case.parameters, activation, 0.3)

    def gradients(output: Tensor) -> list[Tensor]:
        return [output.detach(), *torch.autograd.grad(output, case.leaves, torch.ones_like(output))]

    torch.manual_seed(3)
    plain = gradients(layer(case.hidden))
    torch.manual_seed(3)
    again = gradients(checkpoint(layer, case.hidden, use_reentrant=False))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


class TestDropout:
    @pytest.mark.parametrize("kernels", [None, PLAIN])
    @pytest.mark.parametrize("k", [1, 3])
    @pytest.mark.parametrize("activation", ["relu", "gelu"])
    def test_expectation_and_rate(
        self, problem: Callable[..., Any], activation: str, k: int, kernels: Kernels | None
    ) -> None:
        # w_out the identity: the output shows the hidden units of the one expert with weight 1
        case = problem(600, 16, 16, 3, k, activation=activation, bias=False)
        with torch.no_grad():
            case.parameters.w_out.copy_(torch.eye(16).expand(3, 16, 16))
            case.weights.zero_()[:, 0] = 1
            with using(kernels):
                clean = apply_experts(case.hidden, case.routing, case.parameters, activation)
                dropped = apply_experts(case.hidden, case.routing, case.parameters, activation, 0.25)
        kept = dropped != 0
        visible = clean.abs() > 1e-6
        assert abs(float(kept[visible].float().mean()) - 0.75) < 0.02
        torch.testing.assert_close(dropped[kept], (clean / 0.75)[kept], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("kernels", [None, PLAIN])
    @pytest.mark.parametrize("k", [2, 6])
    @pytest.mark.parametrize(
        ("activation", "gated"), [("relu", False), ("gelu", False), ("relu", True), ("silu", True)]
    )
    def test_gradients_see_the_same_mask(
        self, problem: Callable[..., Any], activation: str, gated: bool, k: int, kernels: Kernels | None
    ) -> None:
        case = problem(30, 8, 12, 6, k, activation=activation, gated=gated)
        direction = [torch.randn_like(leaf) for leaf in case.leaves]
        gradient = torch.randn(30, 8)

        def loss(step: float) -> Tensor:
            torch.manual_seed(5)
            shifted = [leaf.detach() + step * way for leaf, way in zip(case.leaves, direction, strict=True)]
            hidden, weights, *tensors = shifted
            remaining = iter(tensors)
            parameters = ExpertParameters(*(None if t is None else next(remaining) for t in case.parameters))
            routing = type(case.routing)(case.routing.experts, weights, case.routing.probs, case.routing.logits)
            with using(kernels):
                return (apply_experts(hidden, routing, parameters, activation, 0.4).double() * gradient).sum()

        torch.manual_seed(5)
        with using(kernels):
            output = apply_experts(case.hidden, case.routing, case.parameters, activation, 0.4)
        gradients = torch.autograd.grad(output, case.leaves, gradient)
        slope = sum(float((g * way).sum()) for g, way in zip(gradients, direction, strict=True))
        difference = float(loss(1e-3) - loss(-1e-3)) / 2e-3
        assert abs(slope - difference) <= 2e-2 * abs(slope) + 2e-1

    @pytest.mark.parametrize("kernels", [None, PLAIN])
    def test_default_generator_moves_alike_for_any_routing(
        self, problem: Callable[..., Any], kernels: Kernels | None
    ) -> None:
        after = []
        for seed, k in ((0, 1), (1, 3), (2, 6)):
            case = problem(seed=seed, k=k)
            torch.manual_seed(1)
            with using(kernels):
                apply_experts(case.hidden, case.routing, case.parameters, "relu", 0.5)
            after.append(float(torch.rand(())))
        assert len(set(after)) == 1
        torch.manual_seed(1)
        assert float(torch.rand(())) != after[0]

    def test_no_dropout_draws_nothing(self, problem: Callable[..., Any]) -> None:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        run(problem())
        assert torch.equal(before, torch.get_rng_state())

    def test_all_dropped(self, problem: Callable[..., Any]) -> None:
        case = problem(bias=False)
        output = apply_experts(case.hidden, case.routing, case.parameters, "relu", 1.0)
        assert float(output.detach().abs().max()) == 0
        assert all(torch.isfinite(value).all() for value in torch.autograd.grad(output.sum(), case.leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [20, 400])
def test_nan_of_an_unused_expert_stays_where_it_is(
    problem: Callable[..., Any], dtype: torch.dtype, tokens: int
) -> None:
    case = problem(tokens, 16, 24, 6, 2, dtype=dtype, gated=True)
    case.routing.experts[case.routing.experts == 2] = 3
    with torch.no_grad():
        for tensor in case.parameters:
            tensor[2] = torch.nan
    output = apply_experts(case.hidden, case.routing, case.parameters, case.activation)
    hidden, weights, *gradients = torch.autograd.grad(output, case.leaves, torch.randn_like(output))
    assert all(tensor.isfinite().all() for tensor in (output, hidden, weights, *gradients))
    assert all(not tensor[2].any() for tensor in gradients)
