"""The reference itself: against the formula written as einsums over all experts, and by gradcheck."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pointsman.experts import reference
from pointsman.experts.apply import apply_experts
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import PLAIN, using


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_is_the_weighted_sum_over_all_experts(problem: Callable[..., Any], activation: str, gated: bool) -> None:
    case = problem(dtype=torch.float64, activation=activation, gated=gated, dropped=0.2)
    p = case.parameters
    act = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    up = torch.einsum("td,ehd->teh", case.hidden, p.w_in) + p.b_in
    units = act(torch.einsum("td,ehd->teh", case.hidden, p.w_gate) + p.b_gate) * up if gated else act(up)
    every = torch.einsum("teh,edh->ted", units, p.w_out) + p.b_out
    full = torch.zeros(40, 7, dtype=torch.float64)  # the last column takes the dropped
    full.scatter_(1, case.routing.experts % 7, case.weights.detach())
    expected = torch.einsum("te,ted->td", full[:, :6], every)
    got = reference.apply_experts(case.hidden, case.routing, p, activation)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_plain_path_passes_gradcheck(problem: Callable[..., Any], activation: str, gated: bool) -> None:
    case = problem(5, 3, 4, 3, 2, dtype=torch.float64, activation=activation, gated=gated)

    def apply(hidden: torch.Tensor, weights: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        routing = type(case.routing)(case.routing.experts, weights, case.routing.probs, case.routing.logits)
        return apply_experts(hidden, routing, ExpertParameters(*tensors), activation)

    tensors = [tensor for tensor in case.parameters if tensor is not None]
    assert torch.autograd.gradcheck(apply, (case.hidden, case.weights, *tensors))
    assert torch.autograd.gradgradcheck(apply, (case.hidden, case.weights, *tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_kernels_take_the_reference(problem: Callable[..., Any], dtype: torch.dtype) -> None:
    case = problem(dtype=dtype)
    with using(PLAIN):
        plain = apply_experts(case.hidden, case.routing, case.parameters, "relu")
    assert torch.equal(plain, reference.apply_experts(case.hidden, case.routing, case.parameters, "relu"))
