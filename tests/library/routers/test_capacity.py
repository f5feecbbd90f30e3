"""Capacity by token, rank and priority, of a sequence and of a batch, against a loop over assignments."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from pointsman.routers.frame.registry import build_router
from pointsman.routers.frame.steps import Capacity
from pointsman.routing import RoutingContext


def kept(experts: Tensor, probs: Tensor, factor: float, order: str, scope: str, mask: Tensor) -> Tensor:
    """The same, an assignment at a time: experts, probs [B, T, …], mask [B, T]."""
    batch, length, k = experts.shape
    found = experts.masked_fill(~mask[..., None], -1).clone()
    groups = [list(range(batch))] if scope == "batch" else [[one] for one in range(batch)]
    for group in groups:
        tokens = [(b, t) for b in group for t in range(length) if mask[b, t]]
        limit = max(1, math.ceil(factor * len(tokens) * k / probs.shape[-1] - 1e-9))
        if order == "priority":
            tokens.sort(key=lambda place: -float(probs[place].max()))
        turns = [(place, rank) for place in tokens for rank in range(k)]
        if order != "token":
            turns = [(place, rank) for rank in range(k) for place in tokens]
        if order == "probs":
            turns.sort(key=lambda turn: -float(probs[turn[0]][experts[turn[0]][turn[1]]]))
        taken = [0] * probs.shape[-1]
        for place, rank in turns:
            expert = int(experts[place][rank])
            if taken[expert] >= limit:
                found[place][rank] = -1
            taken[expert] += 1
    return found


@pytest.mark.parametrize("order", ["token", "rank", "priority", "probs"])
@pytest.mark.parametrize("scope", ["sequence", "batch"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_order_is_that_of_a_loop(order: str, scope: str, padded: bool) -> None:
    router = build_router(
        f"smoe:capacity=0.6:capacity_order={order}:capacity_scope={scope}", dim=8, num_experts=5, top_k=3
    ).eval()
    hidden = torch.randn(3, 11, 8)
    mask = torch.ones(3, 11, dtype=torch.bool)
    if padded:
        mask[0, 7:], mask[2, :4] = False, False
    free = build_router("smoe", dim=8, num_experts=5, top_k=3).eval()
    free.load_state_dict(router.state_dict())
    router.score.weight.data.mul_(30)  # type: ignore[union-attr, operator]
    free.score.weight.data.mul_(30)  # type: ignore[union-attr, operator]
    context = RoutingContext(causal=False, padding_mask=mask if padded else None)
    with torch.no_grad():
        ours, every = router(hidden, context), free(hidden, context)
    expected = kept(every.experts.view(3, 11, 3), every.probs.view(3, 11, 5), 0.6, order, scope, mask)
    assert torch.equal(ours.experts.view(3, 11, 3), expected)
    assert not ours.weights[ours.experts < 0].any()
    assert torch.equal(ours.weights[ours.experts >= 0], every.weights[ours.experts >= 0])
    assert bool((ours.experts < 0).any())


def test_batch_priority_by_hand() -> None:
    """Two experts with room for one each; the surest token is served first, whatever its place."""
    limit = Capacity(1.0, 1.0, "priority", "batch")
    probs = torch.tensor([[0.6, 0.4], [0.9, 0.1]])
    experts = torch.tensor([[0], [0]])
    assert limit(experts, probs, 2, 1, RoutingContext(), 2).tolist() == [[-1], [0]]
    both = torch.tensor([[0, 1], [0, 1]])
    half = Capacity(0.5, 0.5, "rank", "batch")
    assert half(both, probs, 2, 2, RoutingContext(), 1).tolist() == [[0, 1], [-1, -1]]
    surest = Capacity(0.5, 0.5, "priority", "batch")
    assert surest(both, probs, 2, 2, RoutingContext(), 1).tolist() == [[-1, -1], [0, 1]]


def test_limits_of_vmoe_are_rounded_to_multiples() -> None:
    """V-MoE: round(factor N k / E), or its ceiling, then up to a multiple of 4, at least one."""
    experts, probs = torch.zeros(1, 30, 1, dtype=torch.int64).view(30, 1), torch.full((30, 4), 0.25)
    mask = torch.ones(1, 30, dtype=torch.bool)
    for rounding, multiple, factor in itertools.product(("ceil", "round"), (1, 4), (0.01, 0.6, 1.05, 1.1)):
        limit = Capacity(factor, factor, "rank", "batch", "share", rounding, multiple)
        exact = factor * 30 / 4
        right = max(1, math.ceil(exact) if rounding == "ceil" else round(exact))
        right += -right % multiple
        for given in (None, mask):
            left = limit(experts, probs, 4, 1, RoutingContext(padding_mask=given), 1)
            assert int((left >= 0).sum()) == min(30, right)


def test_random_order_keeps_first_choices_and_draws_the_tokens() -> None:
    router = build_router("smoe:capacity=0.5:capacity_order=random", dim=8, num_experts=4)
    assert (router.stochastic, router.training_stochastic, router.causal) == (True, True, False)
    experts, probs = torch.tensor([[0, 1]]).expand(8, 2), torch.full((8, 2), 0.5)
    kept = {tuple((router.limit(experts, probs, 4, 2, RoutingContext(), 1) >= 0)[:, 0].tolist()) for _ in range(30)}
    assert len(kept) > 5
    assert {sum(one) for one in kept} == {2}


def test_weights_of_what_is_kept_sum_to_one_again() -> None:
    """DeepSpeed's second top-2 rule: the denominator is taken after the drop."""
    spec = "smoe:capacity=0.6:capacity_total=one:scale=2"
    routing = build_router(spec, dim=8, num_experts=5, top_k=3).eval()(torch.randn(2, 40, 8))
    some, sums = (routing.experts >= 0).any(-1), routing.weights.sum(-1)
    assert bool((routing.experts < 0).any())
    torch.testing.assert_close(sums[some], torch.full_like(sums[some], 2.0))
    with pytest.raises(ValueError, match="capacity_total=one: nulls"):
        build_router("smoe:capacity=1:capacity_total=one:nulls=1", dim=8, num_experts=4)


def test_gradients_of_tiny_scores_are_finite_where_weights_sum_to_one_after_a_drop() -> None:
    spec = "smoe:gate=sigmoid:bias=false:capacity=0.75:capacity_total=one"
    router = build_router(spec, dim=2, num_experts=3)
    logits = torch.tensor([[5.0, -100.0, 4.0], [-46.0, -92.0, -99.0]])
    router.score.weight.data.copy_(logits.T)  # type: ignore[union-attr, operator]
    routing = router(torch.eye(2))
    assert routing.experts.tolist() == [[0, 2], [-1, 1]]
    (gradient,) = torch.autograd.grad(routing.weights.sum(), router.score.parameters())
    assert torch.isfinite(gradient).all()


def test_a_capacity_of_tokens_is_that_number_whatever_the_length() -> None:
    router = build_router("switch:capacity=2:capacity_unit=tokens", dim=8, num_experts=2).eval()
    hidden, mask = torch.ones(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 1] = False  # takes no place
    for given, places in ((None, [[0, 1], [0, 1]]), (mask, [[0, 2], [0, 1]])):
        experts = router(hidden, RoutingContext(padding_mask=given)).experts.view(2, 9)
        assert [row.nonzero().flatten().tolist() for row in experts >= 0] == places
    with pytest.raises(ValueError, match="capacity_unit=tokens: capacity and eval_capacity must be whole numbers"):
        build_router("switch:capacity=1.5:capacity_unit=tokens", dim=8, num_experts=2)


@pytest.mark.parametrize("spec", ["expert-threshold:capacity=0.5", "depths:share=1:capacity=0.5"])
@pytest.mark.parametrize("k", [2, 3])
def test_experts_that_choose_tokens_have_a_capacity_by_k(spec: str, k: int) -> None:
    router = build_router(spec, dim=8, num_experts=8, top_k=k)
    experts = router(torch.randn(1, 64, 8) + 2).experts
    assert max(int((experts == expert).sum()) for expert in range(8)) == 4 * k


def test_evaluation_has_a_factor_of_its_own() -> None:
    router = build_router("vmoe:capacity=0.5:eval_capacity=4:capacity_order=rank", dim=8, num_experts=4)
    hidden = torch.randn(2, 16, 8)
    assert bool((router.train()(hidden).experts < 0).any())
    assert not bool((router.eval()(hidden).experts < 0).any())
    only = build_router("smoe:eval_capacity=0.5", dim=8, num_experts=4)
    assert not bool((only.train()(hidden).experts < 0).any())
    assert bool((only.eval()(hidden).experts < 0).any())
    assert (only.training_causal, only.causal) == (True, True)


def test_flags_say_what_an_order_looks_at() -> None:
    def flags(options: str) -> tuple[bool, bool, bool, bool]:
        router = build_router(f"smoe:{options}", dim=8, num_experts=4)
        return router.causal, router.batch_invariant, router.training_causal, router.training_batch_invariant

    assert flags("capacity=1") == (True, True, True, True)
    assert flags("capacity=1:capacity_order=rank") == (False, True, False, True)
    assert flags("capacity=1:capacity_scope=batch") == (False, False, False, False)
    assert flags("eval_capacity=1:capacity_order=rank") == (False, True, True, True)
    with pytest.raises(ValueError, match="needs capacity or eval_capacity"):
        flags("capacity_order=rank")
    with pytest.raises(ValueError, match="eval_capacity=-1"):
        flags("eval_capacity=-1")
