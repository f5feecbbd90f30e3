"""Shared experts: every token takes them, beside those that the router chooses."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from pointsman import MoE, freeze, set_top_k
from pointsman.experts.modules import Experts
from pointsman.experts.shared import SharedExperts

DIM, HIDDEN, EXPERTS = 6, 5, 4


def layer(**options: object) -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, HIDDEN, EXPERTS, shared_experts=2, **options)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_output_is_that_of_both(gated: bool, gate: bool) -> None:
    moe = layer(gated=gated, shared_gate=gate, activation="silu").double()
    x = torch.randn(7, DIM, dtype=torch.float64, requires_grad=True)
    shared = moe.shared
    rows = []
    for row in x:
        units = shared.w_in @ row + shared.b_in
        units = units * torch.sigmoid(units) if not gated else units
        if gated:
            inner = shared.w_gate @ row + shared.b_gate
            units = units * inner * torch.sigmoid(inner)
        rows.append((shared.w_out @ units + shared.b_out) * (torch.sigmoid(shared.gate[0] @ row) if gate else 1))
    expected = torch.stack(rows) + moe.experts(x, moe.router(x))
    torch.testing.assert_close(moe(x), expected)
    wanted = [x, *moe.parameters()]
    upstream = torch.randn_like(x)
    for left, right in zip(
        torch.autograd.grad(moe(x), wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(left, right)


def test_they_equal_so_many_experts_of_weight_one() -> None:
    """n experts of width h are one of width n h: an MoE of n experts with k = n, whose weights are 1."""
    shared = SharedExperts(DIM, 2 * HIDDEN, bias=False)
    moe = MoE(DIM, HIDDEN, 2, bias=False, router="smoe:scale=2")
    with torch.no_grad():
        moe.experts.w_in.copy_(shared.w_in.view(2, HIDDEN, DIM))
        moe.experts.w_out.copy_(shared.w_out.view(DIM, 2, HIDDEN).transpose(0, 1))
        moe.router.score.weight.zero_()
    x = torch.randn(7, DIM)
    torch.testing.assert_close(moe(x), shared(x))


def test_names_roles_and_any_k() -> None:
    moe = layer(shared_gate=True, gated=True, router="smoe:renormalize=false")
    names = {name for name in moe.state_dict() if name.startswith("shared.")}
    assert names == {f"shared.{name}" for name in ("w_in", "w_gate", "b_in", "b_gate", "w_out", "b_out", "gate")}
    freeze(moe, "experts")
    assert all(parameter.requires_grad for parameter in moe.shared.parameters())
    freeze(moe, "shared-experts")
    assert not any(parameter.requires_grad for parameter in moe.shared.parameters())
    x = torch.randn(7, DIM)
    outputs = []
    for k in (1, EXPERTS):
        set_top_k(moe, k)
        outputs.append(moe(x) - moe.experts(x, moe.router(x)))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shared_experts": -1}, "shared_experts=-1: allowed are whole numbers from 0"),
        ({"shared_experts": 1.5}, "shared_experts=1.5: allowed are whole numbers from 0"),
        ({"shared_gate": True}, "shared_gate=True needs shared_experts, a whole number from 1"),
        ({"gated": "no"}, "gated='no': allowed is true or false"),
        ({"attach_losses": 2}, "attach_losses=2: allowed is true or false"),
    ],
)
def test_bad_settings(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MoE(DIM, HIDDEN, EXPERTS, **options)


def test_base_experts_may_have_shared_ones() -> None:
    moe = layer(experts="base")
    x = torch.randn(7, DIM)
    torch.testing.assert_close(moe(x), x + moe.shared(x))  # experts start as the identity


@pytest.mark.parametrize("kind", [partial(SharedExperts, gate=True), partial(Experts, num_experts=2)])
def test_they_start_as_linear_maps_do(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    for name, tensor in kind(dim=16, hidden_dim=400, gated=True, bias=True).named_parameters():
        bound = 400**-0.5 if name.endswith("out") else 16**-0.5
        assert 0.8 * bound < tensor.abs().max() <= bound, name
