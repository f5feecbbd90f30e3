"""What the frame offers to routers: richer returns of stages, losses of their own, sums over a step, the first k."""

import copy
import cProfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman import MoE, Router, RoutingContext, build_router, freeze, materialize, set_top_k, step_end, track_steps
from pointsman.control import named_routers
from pointsman.routers.frame import registry
from pointsman.routers.frame.registry import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Loss, LossInput, Scored, Scores, Selection
from pointsman.routers.frame.stages import Selector, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import Combine, Pairs

DIM, EXPERTS = 6, 4


class RichScorer(LinearScorer):
    """Hands on its logits twice, and counts its forwards."""

    def forward(self, hidden: Tensor, context: RoutingContext) -> Scored:
        logits = super().forward(hidden, context)
        return Scored(logits, {"doubled": 2 * logits}, {"forwards": torch.ones((), dtype=torch.int64)})

    def penalty(self, given: LossInput) -> Tensor:
        assert given.extra["doubled"].shape == (given.batch, given.length, EXPERTS)
        assert given.weights.shape == given.experts.shape == (given.batch * given.length, 2)
        return self.weight.square().sum()


class CountingSelector(Selector):
    """Expert i takes all tokens of even number with weight 1: no top-k. Counts tokens over a step, and steps."""

    needs_step_end = True
    ragged = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.steps: Tensor
        self.register_buffer("seen", torch.zeros(EXPERTS))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> Selection:
        assert torch.equal(scores.extra["doubled"], 2 * scores.logits)
        tokens = scores.probs.shape[0] * scores.probs.shape[1]
        experts = torch.full((tokens, 2), -1)
        experts[::2, 0] = 1
        token = torch.arange(0, tokens, 2)
        flat = Pairs(token, torch.ones_like(token), torch.ones(len(token)), torch.tensor([0, 0, *[len(token)] * 3]))
        counts = torch.bincount(experts[experts >= 0], minlength=EXPERTS)
        return Selection(experts, (experts >= 0).float(), Combine(flat), {"counts": counts})

    def step_end(self) -> None:
        if self.sums:
            self.seen += self.sums["counts"]
        self.steps += 1


@pytest.fixture(autouse=True)
def rich() -> Iterator[None]:
    @register_router("rich", paper="none", starts_at=lambda layer: layer.num_experts)
    def build(layer: LayerSpec, *, by_id: bool = False) -> Stages:
        """Every part of the frame."""
        if by_id:
            layer.need_vocab_size("rich:by_id=true")
        scorer = RichScorer(layer.dim, layer.num_experts)
        return Stages(scorer, select=CountingSelector(), losses={"penalty": Loss(scorer.penalty, 0.5)})

    yield
    del registry.ROUTERS["rich"]


def run(layer: MoE, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    output: Tensor = layer(hidden, RoutingContext(padding_mask=mask))
    output.sum().backward()
    return output


def test_stages_hand_on_extra_tensors_own_losses_and_flat_pairs() -> None:
    router = build_router("rich", dim=DIM, num_experts=EXPERTS)
    routing = router(torch.randn(2, 5, DIM))
    assert routing.experts.shape == (10, 2)
    assert routing.pairs is routing.combine.flat
    assert routing.pairs.token.tolist() == [0, 2, 4, 6, 8]
    torch.testing.assert_close(routing.losses["penalty"], 0.5 * router.score.weight.square().sum())
    assert set(routing.statistics) == {"score.forwards", "select.counts"}


def test_a_copy_of_a_router_has_losses_of_its_own_parameters() -> None:
    router = build_router("rich", dim=DIM, num_experts=EXPERTS)
    other = copy.deepcopy(router)
    with torch.no_grad():
        other.score.weight.mul_(3)
    hidden = torch.randn(2, 5, DIM)
    torch.testing.assert_close(other(hidden).losses["penalty"], 9 * router(hidden).losses["penalty"])


def test_the_scale_multiplies_weights_after_renormalisation_and_flat_pairs() -> None:
    hidden = torch.randn(2, 5, DIM)
    router = build_router("smoe:scale=2.5", dim=DIM, num_experts=EXPERTS)
    torch.testing.assert_close(router(hidden).weights.sum(-1), torch.full((10,), 2.5))
    routing = build_router("rich:scale=3", dim=DIM, num_experts=EXPERTS)(hidden)
    assert routing.weights.max() == routing.pairs.weight.max() == 3
    with pytest.raises(ValueError, match=r"scale=0.0: allowed are numbers above 0"):
        build_router("smoe:scale=0", dim=DIM, num_experts=EXPERTS)


def test_a_router_names_its_first_k() -> None:
    assert build_router("switch", dim=DIM, num_experts=EXPERTS, top_k=3).top_k == 1
    router = build_router("rich", dim=DIM, num_experts=EXPERTS, top_k=1)
    assert router.top_k == EXPERTS
    assert router.ragged
    set_top_k(router, 2)
    assert router.top_k == 2


def test_a_router_by_token_ids_needs_the_vocabularys_size() -> None:
    with pytest.raises(ValueError, match="rich:by_id=true: the router routes by token ids and needs vocab_size"):
        build_router("rich:by_id=true", dim=DIM, num_experts=EXPERTS)
    assert MoE(DIM, 8, EXPERTS, router="rich:by_id=true", vocab_size=9).router.spec == "rich:by_id=true"
    with pytest.raises(ValueError, match="vocab_size=0: allowed are whole numbers from 1"):
        build_router("smoe", dim=DIM, num_experts=EXPERTS, vocab_size=0)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_statistics_are_summed_over_a_step_once(checkpointed: bool) -> None:
    layer, hidden = MoE(DIM, 8, EXPERTS, router="rich", attach_losses=True), torch.randn(3, 4, DIM)
    select = layer.router.select
    for part in hidden.split([1, 2]):
        if checkpointed:
            checkpoint(layer, part, use_reentrant=False).sum().backward()
        else:
            run(layer, part)
    layer.eval()
    run(layer, hidden)  # evaluation counts nothing
    assert layer.router.score.sums["forwards"] == 2
    step_end(layer)
    assert select.seen.tolist() == [0, 6, 0, 0]
    assert (select.steps, select.sums) == (1, {})
    assert select.bfloat16().seen.dtype == torch.float32
    freeze(layer, "router")
    layer.train()
    run(layer, hidden.requires_grad_())
    step_end(layer)
    assert select.steps == 1
    assert select.seen.sum() == 6


def test_sums_of_many_processes_are_reduced_in_one_call() -> None:
    model = nn.ModuleList(MoE(DIM, 8, EXPERTS, router=spec, attach_losses=True) for spec in ("rich", "smoe", "rich"))
    calls: list[list[tuple[int, ...]]] = []

    def reduce(tensors: Any) -> None:
        calls.append([tuple(tensor.shape) for tensor in tensors])
        for tensor in tensors:
            tensor.mul_(2)  # two processes with equal data

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = track_steps(model, optimizer, reduce)
    for layer in model:
        run(layer, torch.randn(1, 4, DIM))
    optimizer.step()
    handle.remove()
    assert calls == [[(), (EXPERTS,), (), (EXPERTS,)]]
    assert model[0].router.select.seen.tolist() == [0, 4, 0, 0]


def test_a_router_that_layers_share_ends_its_step_once() -> None:
    router, calls = build_router("rich", dim=DIM, num_experts=EXPERTS), list[Any]()
    gates = nn.ModuleList([router])  # a list of its own makes it no third layer
    model = nn.ModuleList([gates, *(MoE(DIM, 8, EXPERTS, router=router, attach_losses=True) for _ in range(2))])
    assert [name for name, _ in named_routers(model)] == ["1", "2"]
    run(model[1], torch.randn(1, 4, DIM))
    step_end(model, calls.extend)
    assert router.select.steps == 1
    assert len(calls) == 2


def test_k_is_set_each_time_a_with_is_entered() -> None:
    layer = MoE(DIM, 8, EXPERTS)
    one = set_top_k(layer, 1)
    for _ in range(2):
        with one:
            assert layer.top_k == 1
        assert layer.top_k == 2


def test_materialize_leaves_losses_of_the_old_router_behind() -> None:
    layer = MoE(DIM, 8, EXPERTS, router="frozen-temperature:scale=2:balance=0.1:balance_scope=step", attach_losses=True)
    layer.router.losses = {"penalty": Loss(lambda given: given.logits.sum(), 1.0)}
    materialize(layer)
    assert not layer.router.losses
    assert layer.router.spec == "smoe:scale=2:balance=0.1:balance_scope=step"


def test_a_copy_does_not_warn_of_the_steps_of_another_model() -> None:
    layer = MoE(DIM, 8, EXPERTS, router="rich", attach_losses=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(one: MoE) -> None:
        run(one, torch.randn(1, 4, DIM))
        optimizer.step()
        step_end(layer)

    step(layer)
    other = copy.deepcopy(layer)
    step(layer)
    run(other, torch.randn(1, 4, DIM))  # a warning is an error


# --- balance over a micro-batch, a sequence and a step ------------------------------------------------------------


def by_hand(scores: Tensor, chosen: Tensor, mask: Tensor, counted: Tensor | None = None) -> Tensor:
    """E sum_i f_i P_i in loops: scores [N, E] that sum to 1, chosen [N, k], mask [N]; f counts `counted` besides."""
    counts = [0.0] * scores.shape[1] if counted is None else counted.tolist()
    for row, real in zip(chosen.tolist(), mask.tolist(), strict=True):
        for expert in row if real else ():
            counts[expert] += 1
    mean = sum(row for row, real in zip(scores, mask, strict=True) if real) / mask.sum()
    return scores.shape[1] * sum(count / sum(counts) * mean[i] for i, count in enumerate(counts))


@pytest.fixture
def padded() -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 3:] = mask[2, 1] = False
    return torch.randn(3, 5, DIM, dtype=torch.float64), mask


@pytest.mark.parametrize("basis", ["softmax", "scores"])
@pytest.mark.parametrize("scope", ["batch", "sequence", "step"])
def test_balance_by_scope_and_basis(scope: str, basis: str, padded: tuple[Tensor, Tensor]) -> None:
    hidden, mask = padded
    spec = f"smoe:gate=sigmoid:balance=0.5:balance_scope={scope}:balance_on={basis}"
    layer = MoE(DIM, 8, EXPERTS, router=spec, attach_losses=True).double()
    router: Router = layer.router
    nn.init.normal_(router.score.weight)
    counted = None
    for _ in range(3):
        routing = router(hidden, RoutingContext(padding_mask=mask))
        probs = torch.softmax(routing.logits, -1)
        if basis == "scores":
            probs = torch.sigmoid(routing.logits)
            probs = probs / probs.sum(-1, keepdim=True)
        if scope == "sequence":
            parts = zip(probs.split(5), routing.experts.split(5), mask, strict=True)
            expected = sum(by_hand(*part) for part in parts) / 3
        else:
            expected = by_hand(probs, routing.experts, mask.reshape(-1), counted)
        torch.testing.assert_close(routing.losses["balance"], 0.5 * expected, rtol=1e-12, atol=0)
        wanted = torch.autograd.grad(0.5 * expected, router.score.weight, retain_graph=True)[0]
        torch.testing.assert_close(torch.autograd.grad(routing.losses["balance"], router.score.weight)[0], wanted)
        run(layer, hidden, mask)
        if scope == "step":
            chosen = routing.experts[routing.experts >= 0]
            counted = torch.bincount(chosen, minlength=EXPERTS) + (0 if counted is None else counted)
            hidden = torch.randn_like(hidden)
    step_end(layer)
    assert not router.balancing.sums


def test_the_loss_of_a_sequence_alone() -> None:
    """DeepSeek-V3's on two tokens, by hand: s = [[.9 .3] [.8 .4]], k = 1: f = (2 0), P = (.708333 .291667)."""
    spec = "smoe:gate=sigmoid:renormalize=false:balance=1:balance_scope=sequence:balance_on=scores"
    router = build_router(spec, dim=2, num_experts=2, top_k=1)
    scores = torch.tensor([[0.9, 0.3], [0.8, 0.4]], dtype=torch.float64)
    router.score.forward = lambda *_: torch.logit(scores)[None]  # type: ignore[method-assign]
    assert router(torch.zeros(2, 2)).losses["balance"].item() == pytest.approx(1.4166667)


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0)])
@pytest.mark.parametrize("scope", ["batch", "sequence", "step"])
def test_no_tokens_have_no_balance_loss(scope: str, batch: int, length: int) -> None:
    router = build_router(f"smoe:balance=1:balance_scope={scope}", dim=DIM, num_experts=EXPERTS)
    assert router(torch.zeros(batch, length, DIM)).losses["balance"].item() == 0


def test_balance_may_count_other_experts_than_the_chosen() -> None:
    def count(counted: Callable[[LossInput], Tensor] | None) -> Tensor:
        router.balancing.counted = counted
        return router(hidden, RoutingContext(padding_mask=mask)).losses["balance"]

    router = build_router("smoe:balance=1", dim=DIM, num_experts=EXPERTS)
    hidden, mask = torch.randn(1, 5, DIM), torch.tensor([[True, True, True, True, False]])
    assert torch.equal(count(None), count(lambda given: given.experts))
    probs = router(hidden).probs[:4].mean(0)
    torch.testing.assert_close(count(lambda given: torch.zeros_like(given.experts)), EXPERTS * probs[0])


@pytest.mark.parametrize("scope", ["batch", "sequence", "step"])
def test_losses_under_torch_func(scope: str) -> None:
    router = build_router(f"smoe:balance=0.1:balance_scope={scope}", dim=DIM, num_experts=EXPERTS).train()
    parameters, hidden = dict(router.named_parameters()), torch.randn(1, 5, DIM)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(router, values, (hidden,)).losses["balance"]

    wanted = torch.autograd.grad(loss(parameters), parameters["score.weight"])[0]
    router.step_end()
    torch.testing.assert_close(torch.func.grad(loss)(parameters)["score.weight"], wanted)


@pytest.mark.parametrize(("spec", "most"), [("smoe", 75), ("hyperrouter+similarity", 335)])
def test_a_training_forward_costs_few_calls(spec: str, most: int) -> None:
    """At 256 tokens of width 32 the calls of Python are the time: 58 of `smoe` when this was written, 267 before."""
    router, hidden = build_router(spec, dim=32, num_experts=8).train(), torch.randn(1, 256, 32)
    router(hidden)  # the first forward imports and warns
    with cProfile.Profile() as profile:
        router(hidden)
    assert sum(entry.callcount for entry in profile.getstats()) <= most
