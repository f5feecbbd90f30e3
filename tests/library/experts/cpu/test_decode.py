"""Decoding: few tokens on a CPU without gradients, against the float64 reference."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman import MoE
from pointsman.experts import reference
from pointsman.experts.apply import apply_experts


def check(case: Any) -> None:
    with torch.no_grad():
        output = apply_experts(case.hidden, case.routing, case.parameters, case.activation)
        exact = case.exact()
        expected = reference.apply_experts(exact.hidden, exact.routing, exact.parameters, exact.activation)
    assert output.dtype == case.hidden.dtype
    tolerance = 1e-5 if output.dtype == torch.float32 else 2e-2
    error = float((output.double() - expected).norm())
    assert error <= tolerance * (float(expected.norm()) + expected.numel() ** 0.5)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_shape_against_the_reference(problem: Callable[..., Any], data: st.DataObject) -> None:
    draw = data.draw
    num_experts = draw(st.integers(1, 9), "experts")
    widths = st.integers(1, 40) | st.sampled_from([8, 16, 32])  # grouped_mm takes whole 16 bytes
    case = problem(
        draw(st.sampled_from([1, 2, 3, 7, 28]), "tokens"),
        draw(widths, "dim"),
        draw(widths, "hidden_dim"),
        num_experts,
        draw(st.integers(1, num_experts), "k"),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype"),
        activation=draw(st.sampled_from(["relu", "gelu", "silu"]), "activation"),
        gated=draw(st.booleans(), "gated"),
        bias=draw(st.booleans(), "bias"),
        dropped=draw(st.sampled_from([0.0, 0.3, 1.0]), "dropped"),
        favourite=draw(st.sampled_from([0.0, 20.0]), "favourite"),
        seed=draw(st.integers(0, 1000), "seed"),
    )
    check(case)


def test_experts_that_lie_apart_by_no_whole_row(problem: Callable[..., Any]) -> None:
    case = problem(1)
    experts, hidden_dim, dim = case.parameters.w_in.shape
    apart = hidden_dim * dim + 1
    w_in = torch.randn(experts * apart).as_strided((experts, hidden_dim, dim), (apart, dim, 1))
    case.parameters = case.parameters._replace(w_in=w_in)
    check(case)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_in_narrow_integers(problem: Callable[..., Any], tokens: int) -> None:
    case = problem(tokens)
    case.routing = replace(case.routing, experts=case.routing.experts.int())
    with torch.no_grad():
        output = apply_experts(case.hidden, case.routing, case.parameters, case.activation)
    expected = case.reference(torch.zeros_like(case.hidden))[0]
    assert (output.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 5])
def test_an_expert_chosen_twice(problem: Callable[..., Any], tokens: int) -> None:
    case = problem(tokens)
    case.routing.experts[:, 1] = case.routing.experts[:, 0]
    check(case)


def test_a_dropped_weight_is_not_read(problem: Callable[..., Any]) -> None:
    for tokens in (1, 5):
        case = problem(tokens)
        with torch.no_grad():
            case.routing.experts[:, 0] = -1
            case.weights[:, 0] = torch.nan
            assert apply_experts(case.hidden, case.routing, case.parameters, "relu").isfinite().all()


def test_an_expert_that_overflows_is_no_matter_of_other_tokens(problem: Callable[..., Any]) -> None:
    case = problem(5)
    with torch.no_grad():
        case.routing.experts[:] = torch.tensor([1, 2])
        case.parameters.w_out[0] = torch.inf
        assert apply_experts(case.hidden, case.routing, case.parameters, case.activation).isfinite().all()


def test_a_token_at_a_time_equals_all_at_once() -> None:
    layer = MoE(24, 32, 6, top_k=2, gated=True, activation="silu").eval()
    hidden = torch.randn(200, 24)
    with torch.no_grad():
        together = layer(hidden)
        singly = torch.cat([layer(hidden[row : row + 1]) for row in range(200)])
    torch.testing.assert_close(singly, together, rtol=1e-5, atol=1e-6)


def test_strided_inputs(problem: Callable[..., Any]) -> None:
    case = problem(5)
    case.hidden = torch.randn(24, 10).t()[::2]
    case.parameters = case.parameters._replace(w_in=case.parameters.w_in.detach().mT.contiguous().mT)
    check(case)


def test_assignments_of_pairs_take_the_layout(problem: Callable[..., Any]) -> None:
    check(problem(3, pairs=True))
