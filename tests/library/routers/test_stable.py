"""StableMoE against a float64 transcription in both stages, the switch between them, and its worked example."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pointsman import MoE, Router, RoutingContext, add_losses, build_router, freeze, step_end
from pointsman.replay import replay_routing
from pointsman.routing import Routing
from tests.library.routers.oracle import EXPERTS, Expected, compare, inputs, ranked, router_for, softmax

IDS = torch.arange(21).view(3, 7) * 3 % 64


def routed(router: Router, hidden: Tensor, mask: Tensor | None = None) -> Routing:
    routing: Routing = router(hidden, RoutingContext(token_ids=IDS, padding_mask=mask))
    return routing


def light_features(score: Any, kind: str, line: list[int], place: int) -> Tensor:
    """u of one token; `line` are the ids of its sequence, -1 for padding."""
    own = score.token[line[place]]
    if kind == "bigram":
        before = line[place - 1] if place else -1
        return (own + (own if before < 0 else score.token[before])) / 2
    return own


def transcription(router: Router, hidden: Tensor, mask: Tensor, k: int, light_chooses: bool, losses: bool) -> Expected:
    score = router.score
    lines = IDS.masked_fill(~mask, -1).tolist()
    places = [(line, place) for line in lines for place in range(len(line))]
    experts: list[list[int]] = []
    weights: list[list[Tensor]] = []
    assigned: list[tuple[list[int], Tensor, Tensor]] = []
    for h, (line, place), real in zip(hidden.flatten(0, 1), places, mask.flatten(), strict=True):
        u = light_features(score, score.kind, line, place)
        z = torch.stack([(row * h).sum() for row in score.gate.weight])
        light = torch.stack([(row * u).sum() for row in score.light])
        gates = 1 / (1 + torch.exp(-z))
        chosen = ranked(light if light_chooses else z, k) if real else []
        experts.append(chosen)
        weights.append([gates[e] for e in chosen])
        if real:
            assigned.append((ranked(z, k), gates, light))
    mean = len(assigned) * k / EXPERTS
    load = distill = torch.zeros((), dtype=torch.float64)
    for best, gates, light in assigned:
        for e in best:
            count = sum(e in other for other, _, _ in assigned)
            load = load + (count - mean) / mean * gates[e] / len(assigned)
            distill = distill - torch.log(softmax(light)[e]) / k / len(assigned)
    off = 1.0 if losses else 0.0
    return Expected(experts, weights, {"load": 0.3 * load * off, "distill": 0.3 * distill * off})


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("stage", ["one", "two", "evaluation"])
@pytest.mark.parametrize("light", ["token", "bigram"])
def test_transcription(k: int, stage: str, light: str) -> None:
    router = router_for(f"stable:stage_one=2:light={light}", k)
    hidden, mask = inputs()
    hidden.requires_grad_()
    for _ in range(2 if stage == "two" else 1):
        router.step_end()
    router.train(stage != "evaluation")
    expected = transcription(router, hidden, mask, k, stage != "one", stage != "two")
    compare(router, hidden, mask, expected, routed(router, hidden, mask))


def test_earlier_ids_are_carried_on() -> None:
    """In segments of any length, and token by token after a memory of one token, as far as that reaches."""
    router = router_for("stable:light=bigram+similarity").eval()
    hidden, _ = inputs()
    whole = router(hidden, RoutingContext(token_ids=IDS)).experts.view(3, 7, 2)
    past, found = None, []
    for start, stop in ((0, 1), (1, 3), (3, 3), (3, 7)):
        part = router(hidden[:, start:stop], RoutingContext(token_ids=IDS[:, start:stop], past=past))
        past, found = part.carry, [*found, part.experts.view(3, stop - start, 2)]
    assert torch.equal(torch.cat(found, 1), whole)
    assert past is not None
    assert past["ids"].shape[1] == 1
    alone = router(hidden[:, 3:], RoutingContext(token_ids=IDS[:, 3:])).experts.view(3, 4, 2)
    assert not torch.equal(alone, whole[:, 3:])


def test_the_load_by_hand() -> None:
    """Expert 0 holds scores 1, .5, 0, expert 1 holds 2: .486360 as a sum, .121590 as our mean of tokens."""
    router = build_router("stable:load=1:distill=0", dim=2, num_experts=2, top_k=1, vocab_size=4).double()
    rows = torch.tensor([[1.0, -9], [0.5, -9], [0, -9], [-9, 2]], dtype=torch.float64)
    router.score.gate.forward = lambda *_: rows[None]  # type: ignore[method-assign]
    context = RoutingContext(token_ids=torch.arange(4)[None])
    routing = router(torch.zeros(1, 4, 2, dtype=torch.float64), context)
    assert float(routing.losses["load"]) == pytest.approx(0.121590, abs=1e-6)


def test_two_stages_over_steps_and_a_checkpoint_in_each() -> None:
    torch.manual_seed(0)
    layer, other = (
        MoE(5, 4, EXPERTS, router="stable:stage_one=3", vocab_size=64, attach_losses=True) for _ in range(2)
    )

    def steps(one: MoE, count: int, start: int) -> Routing:
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05, weight_decay=0.1)
        for step in range(start, start + count):
            hidden = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(step))
            for parts in ((hidden[:1], IDS[:1]), (hidden[1:], IDS[1:])):
                one(parts[0], RoutingContext(token_ids=parts[1])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            step_end(one)
        return routed(one.router, hidden)

    score = layer.router.score
    before = score.token.detach().clone()
    steps(layer, 2, 0)
    assert not torch.equal(before, score.token)
    assert score.token.requires_grad
    assert routed(layer.router, torch.zeros(3, 7, 5)).losses["distill"] > 0
    steps(layer, 1, 2)  # the switch
    assert not score.token.requires_grad
    assert not any(routed(layer.router, torch.zeros(3, 7, 5)).losses.values())
    kept, gate = score.light.detach().clone(), score.gate.weight.detach().clone()
    other.load_state_dict(layer.state_dict())
    assert not other.router.score.light.requires_grad
    left, right = steps(layer, 2, 3), steps(other, 2, 3)
    assert torch.equal(score.light, kept), "neither momentum nor weight decay moves it"
    assert not torch.equal(score.gate.weight, gate), "the weights still learn"
    assert torch.equal(left.experts, right.experts)
    assert torch.equal(left.weights, right.weights)
    # routing depends on ids only
    again = routed(layer.router, torch.randn(3, 7, 5))
    assert torch.equal(again.experts, left.experts)
    assert torch.equal(again.experts, routed(layer.router.eval(), torch.randn(3, 7, 5)).experts)


@pytest.mark.parametrize("scores", ["", "smoe-dropout@"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_of_stage_one_trains_again_unless_the_router_is_frozen(frozen: bool, scores: str) -> None:
    layer = MoE(5, 4, EXPERTS, router=f"{scores}stable:stage_one=1", vocab_size=64, attach_losses=True)
    first = {name: value.clone() for name, value in layer.state_dict().items()}
    step_end(layer)
    if frozen:
        freeze(layer, "router")
    layer.load_state_dict(first)
    assert layer.router.score.token.requires_grad == layer.router.score.light.requires_grad == (not frozen)


def test_without_a_stage_one_the_light_router_never_trains() -> None:
    layer = MoE(5, 4, EXPERTS, router="stable:stage_one=0:light=bigram", vocab_size=64, attach_losses=True)
    assert not any(one.requires_grad for name, one in layer.router.score.named_parameters() if "gate" not in name)
    with torch.device("meta"):
        MoE(5, 4, EXPERTS, router="stable:stage_one=0", vocab_size=64, attach_losses=True)


def test_stage_one_chooses_as_greedy_base() -> None:
    one, two = router_for("stable"), router_for("base").eval()
    with torch.no_grad():
        two.score.weight.copy_(one.score.gate.weight)
    hidden, _ = inputs()
    left, right = routed(one, hidden), two(hidden)
    assert torch.equal(left.experts, right.experts)
    assert torch.equal(left.weights, right.weights)


def trained_under_ddp() -> list[Tensor]:
    """The light router after each of four steps. The DistributedDataParallel module ends with this function: one that
    is freed after its process group waits for a thread of gloo for ever, now and then (torch 2.13)."""
    layer = MoE(5, 4, EXPERTS, router="stable:stage_one=2", vocab_size=64)
    parallel = nn.parallel.DistributedDataParallel(layer)
    optimizer, light = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.5), layer.router.score.light
    kept = []
    for _ in range(4):
        output = parallel(torch.randn(3, 7, 5), RoutingContext(token_ids=IDS))
        add_losses(output.square().mean(), layer).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_end(parallel)
        kept.append(light.detach().clone())
    return kept


def test_two_stages_under_ddp(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        kept = trained_under_ddp()
    finally:
        torch.distributed.destroy_process_group()
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(kept[1], kept[3])


def test_a_router_that_was_frozen_holds_its_light_router_when_it_trains_again() -> None:
    layer = MoE(5, 4, EXPERTS, router="stable:stage_one=1", vocab_size=64, attach_losses=True)
    optimizer, light = torch.optim.AdamW(layer.parameters(), lr=0.05, weight_decay=0.5), layer.router.score.light
    step_end(layer)
    freeze(layer, "router")
    layer.router.requires_grad_(True)
    kept = light.detach().clone()
    layer(torch.randn(3, 7, 5), RoutingContext(token_ids=IDS)).square().sum().backward()
    optimizer.step()
    assert torch.equal(light, kept)


def test_of_a_replayed_routing_only_chosen_experts_have_losses() -> None:
    router = router_for("stable")
    hidden, _ = inputs()
    experts = routed(router, hidden).experts
    dropped = torch.cat([experts[:, :1], torch.full_like(experts[:, :1], -1)], 1)
    found = []
    for one in (dropped, experts[:, :1].contiguous()):
        with replay_routing(router, {"": one}):
            found.append(routed(router, hidden).losses)
    torch.testing.assert_close(found[0]["distill"], found[1]["distill"])
    torch.testing.assert_close(found[0]["load"], found[1]["load"])
