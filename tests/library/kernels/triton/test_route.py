"""The router's kernel against the stages in float64: what is chosen, weights and every gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pointsman import build_router
from pointsman.kernels.triton.route import forward
from pointsman.ops.selection import top_k
from pointsman.routers.frame import router as frame
from pointsman.routers.frame import scoring
from pointsman.routers.frame.stages import FLOOR

CASES: list[tuple[int, int, int, int]] = [(37, 24, 5, 2), (3, 17, 3, 3), (18, 33, 20, 8), (1, 7, 1, 1)]
"""Tokens, width, experts, k."""


class Setting(NamedTuple):
    """How logits become a choice."""

    k: int
    gate: str
    renormalize: bool


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, setting: Setting) -> list[Tensor]:
    logits = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    scaled = logits * scale.double()
    probs = torch.softmax(scaled, -1) if setting.gate == "softmax" else torch.sigmoid(scaled)
    experts = top_k(logits, setting.k)
    weights = probs.gather(-1, experts)
    if setting.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(FLOOR)
    return [logits, probs, experts, weights]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("gate", "renormalize"), [("softmax", True), ("sigmoid", True), ("softmax", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(case: tuple[int, int, int, int], gate: str, renormalize: bool, dtype: torch.dtype) -> None:
    tokens, width, count, k = case
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight, bias = (torch.randn(*shape).requires_grad_() for shape in ((count, width), (count,)))
    scale = torch.tensor(0.7, requires_grad=True)
    leaves, setting = [x, weight, bias, scale], Setting(k, gate, renormalize)
    found, exact = forward(x, weight, bias, scale, *setting), expected(x, weight, bias, scale, setting)
    assert torch.equal(found[2], exact[2])
    upper = [torch.randn(tokens, size) for size in (count, count, 0, k)]
    for chosen in ((0, 1, 3), (3,), (0,), (1,)):
        totals = [sum((values[one] * upper[one]).sum() for one in chosen) for values in (found, exact)]
        for got, right in zip(
            *(
                torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
                for total in totals
            ),
            strict=True,
        ):
            close(got, right, 2e-2 if got.dtype == torch.bfloat16 else 2e-5)
    for one in (0, 1, 3):
        close(found[one], exact[one], 1e-5)


def close(got: Tensor, right: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), right.double(), rtol=tolerance, atol=tolerance * 10)


def test_ties_infinities_and_nan() -> None:
    """Of equal logits the lowest index; NaN counts as the largest; -inf can still be chosen, each expert once."""
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[0.0, -0.0, 0.0, -1], [-inf, -inf, 1, -inf], [nan, 2, inf, nan], [-inf, -inf, -inf, -inf]])
    one = torch.ones(())
    hidden = torch.eye(4)  # row i of the weights is column i of `rows`: products with 0 would spoil infinities
    for row in rows:
        bias = row.clone()
        experts = forward(hidden[:1] * 0, torch.ones(4, 4), bias, one, 4, "sigmoid", False)[2]
        assert torch.equal(experts, top_k(row[None], 4)), row


def test_no_tokens() -> None:
    x, weight = torch.randn(0, 12, requires_grad=True), torch.randn(4, 12, requires_grad=True)
    found = forward(x, weight, None, torch.ones(()), 2, "softmax", True)
    assert [tuple(one.shape) for one in found] == [(0, 4), (0, 4), (0, 2), (0, 2)]
    gradients = torch.autograd.grad(found[3].sum() + found[1].sum(), [x, weight])
    assert not any(one.any() for one in gradients)


def test_strided_weights_and_frozen_ones() -> None:
    x, full = torch.randn(9, 12, requires_grad=True), torch.randn(4, 13)
    weight = full[:, :-1]
    found = forward(x, weight, full[:, -1], torch.ones(()), 2, "softmax", True)
    exact = expected(x, weight, full[:, -1], torch.ones(()), Setting(2, "softmax", True))
    upper = torch.randn(9, 2)
    close(found[3], exact[3], 1e-5)
    got, right = (torch.autograd.grad(values[3].mul(upper).sum(), x)[0] for values in (found, exact))
    close(got, right, 1e-5)


def test_the_same_twice() -> None:
    x, weight = torch.randn(70, 20, requires_grad=True), torch.randn(6, 20, requires_grad=True)
    results = []
    for _ in range(2):
        found = forward(x, weight, None, torch.ones(()), 2, "softmax", True)
        results.append([*found, *torch.autograd.grad(found[3].square().sum() + found[1].square().sum(), [x, weight])])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


SPECS = [
    "smoe:balance=0.01:z_loss=0.1",
    "smoe:gate=sigmoid",
    "switch:gate=sigmoid",
    "hyperrouter:hyper_dim=8:balance=0.1",
    "xmoe:balance=0.3",
    "xmoe-torchscale:routing_dim=5",
    "smoe-dropout",
    "frozen-temperature",
    "smoe:nulls=2:capacity=1.0",
]


@pytest.mark.parametrize("spec", SPECS)
def test_whole_routers(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's routing is that of the stages, in float64, gradients of weights and losses included."""
    monkeypatch.setattr(frame, "with_triton", lambda hidden: hidden.dtype != torch.float64)
    ran: list[Any] = []
    plain = scoring.route
    monkeypatch.setattr(scoring, "route", lambda *given: ran.append(plain(*given)) or ran[-1])
    k = 1 if spec.startswith("switch") else 2
    router, exact = (build_router(spec, dim=12, num_experts=5, top_k=k) for _ in range(2))
    exact.load_state_dict(router.state_dict())
    exact.double()
    hidden = torch.randn(2, 7, 12).requires_grad_()
    wide = hidden.detach().double().requires_grad_()
    routings = [router(hidden), exact(wide)]
    assert len(ran) == 1, "the exact one goes stage by stage"
    assert ran[0] is not None
    upper = torch.randn_like(routings[1].weights)
    gradients = []
    for one, given, routing in ((router, hidden, routings[0]), (exact, wide, routings[1])):
        total = (routing.weights * upper).sum() + sum(routing.losses.values())
        leaves = [given, *(parameter for parameter in one.parameters())]
        gradients.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    assert torch.equal(routings[0].experts, routings[1].experts)
    for name in ("weights", "probs", "logits"):
        close(getattr(routings[0], name), getattr(routings[1], name), 1e-5)
    for got, right in zip(*gradients, strict=True):
        close(got, right, 1e-4)


@pytest.mark.parametrize(
    "spec", ["smoe:noise=0.5", "noisy-topk", "vmoe", "smoe+similarity", "thor", "compete", "top-p"]
)
def test_others_go_stage_by_stage(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "with_triton", lambda _: True)
    router = build_router(spec, dim=12, num_experts=5, top_k=2)
    ran: list[Any] = []
    plain = scoring.route
    monkeypatch.setattr(scoring, "route", lambda *given: ran.append(plain(*given)) or ran[-1])
    router(torch.randn(1, 3, 12))
    assert ran in ([], [None])


def test_the_floor_of_a_sum_is_that_of_the_stages() -> None:
    """Sigmoids so small that another floor would give other weights."""
    x, weight = torch.ones(1, 16), torch.full((3, 16), -2.0)
    found = forward(x, weight, None, torch.ones(()), 2, "sigmoid", True)
    assert found[1].sum() < 1e-9
    torch.testing.assert_close(found[3], torch.full((1, 2), 0.5))
