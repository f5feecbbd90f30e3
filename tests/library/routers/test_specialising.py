"""The losses that keep experts apart, against float64 transcriptions by loops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pointsman import MoE, RoutingContext, build_router
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame.stage_values import LossInput
from pointsman.routers.papers.topk import score_variance
from tests.library.routers.oracle import DIM, EXPERTS, inputs, ranked, softmax


@pytest.mark.parametrize("nulls", [0, 2])
@pytest.mark.parametrize("k", [2, 6])
def test_transcription(k: int, nulls: int) -> None:
    torch.manual_seed(0)
    spec = f"smoe:variance=0.3:orthogonality=0.2:nulls={nulls}"
    layer = MoE(DIM, 4, EXPERTS, router=spec, top_k=k).double()
    for parameter in layer.parameters():
        parameter.data.normal_()
    hidden, mask = inputs()
    hidden.requires_grad_()
    _, routing = layer(hidden, RoutingContext(padding_mask=mask), return_routing=True)
    e, score = layer.experts, layer.router.score
    probs, sums = [], []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        if not real:
            continue
        p = softmax(score.weight @ h + score.bias)
        outputs = [e.w_out[c] @ torch.relu(e.w_in[c] @ h + e.b_in[c]) + e.b_out[c] for c in ranked(p, k) if c < EXPERTS]
        probs.append(p)
        total = h.new_zeros(())
        for i, x in enumerate(outputs):
            for j, y in enumerate(outputs):
                total = total + (x @ y / (y @ y + 1e-6) * y).norm() * (i != j)
        sums.append(total)
    mean = sum(probs) / len(probs)
    variance = sum((p - mean).square() for p in probs).sum() / len(probs)
    expected = {"variance": -0.3 * variance, "orthogonality": 0.2 * sum(sums) / len(sums)}
    wanted = [hidden, *layer.parameters()]
    for name, value in expected.items():
        torch.testing.assert_close(routing.losses[name], value, rtol=1e-12, atol=1e-12)
        left = torch.autograd.grad(routing.losses[name], wanted, allow_unused=True, retain_graph=True)
        right = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=True)
        for one, other, tensor in zip(left, right, wanted, strict=True):
            zero = torch.zeros_like(tensor)
            torch.testing.assert_close(
                zero if one is None else one, zero if other is None else other, rtol=1e-9, atol=1e-11
            )


def test_what_the_losses_need() -> None:
    with pytest.raises(ValueError, match="orthogonality needs two experts a token"):
        build_router("smoe:orthogonality=0.1", dim=DIM, num_experts=EXPERTS, top_k=1)
    router = build_router("smoe:orthogonality=0.1", dim=DIM, num_experts=EXPERTS)
    with pytest.raises(ValueError, match="the router is not in one"):
        router(torch.randn(1, 3, DIM))
    assert router.eval()(torch.randn(1, 3, DIM)).losses["orthogonality"] == 0


def test_the_variance_over_ranks_has_the_gradient_of_one_process() -> None:
    probs = torch.rand(6, 4, dtype=torch.float64)

    class First(Ranks):
        """Has the first half of the tokens, and knows the other."""

        def add_up(self, tensors: Any) -> None:
            for one in tensors:
                one.copy_(sums.pop(0))

    def gradient(rows: Tensor, ranks: Ranks) -> Tensor:
        rows = rows.clone().requires_grad_()
        given = LossInput(*[rows] * 6, {}, None, 1, len(rows), RoutingContext(), ranks=ranks)
        return torch.autograd.grad(score_variance(given), rows)[0]

    number, squares = torch.tensor(6), (probs - probs.mean(0)).square().sum(0)
    sums = [probs.sum(0), number, squares, number]
    torch.testing.assert_close(gradient(probs[:3], First(0, 2)), gradient(probs, ALONE)[:3])
    assert not sums


def test_forced_balance_goes_on_over_ranks() -> None:
    router = build_router("forced", dim=DIM, num_experts=5, top_k=3)
    whole = router(torch.randn(2, 4, DIM)).experts
    router.select.ranks = Ranks(1, 2)
    assert torch.equal(router(torch.randn(1, 4, DIM)).experts, whole[4:])
