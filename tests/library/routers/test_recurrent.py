"""RMoE and the depth average against float64 transcriptions over several layers."""

import math

import pytest
import torch
from torch import Tensor, nn

from pointsman import Router, RoutingContext, build_router
from pointsman.routers.frame.registry import build_routers
from tests.library.routers.oracle import DIM, EXPERTS, Expected, compare, inputs, ranked, softmax

WIDTH = 3


def stack(spec: str) -> list[Router]:
    torch.manual_seed(0)
    routers = build_routers(spec, layers=3, dim=DIM, num_experts=EXPERTS)
    with torch.no_grad():
        for parameter in nn.ModuleList(routers).double().parameters():
            parameter.normal_()
    return routers


def gru(router: Router, h: Tensor, state: Tensor) -> Tensor:
    """s' = (1 - z) n + z s of torch.nn.GRUCell's page, row by row."""
    score = router.score
    given = score.cell.given.weight @ (score.into.weight @ h) + score.cell.given.bias
    before = score.cell.state.weight @ state + score.cell.state.bias
    rows = []
    for i in range(WIDTH):
        r = 1 / (1 + torch.exp(-given[i] - before[i]))
        z = 1 / (1 + torch.exp(-given[WIDTH + i] - before[WIDTH + i]))
        n = torch.tanh(given[2 * WIDTH + i] + r * before[2 * WIDTH + i])
        rows.append((1 - z) * n + z * state[i])
    return torch.stack(rows)


def average(router: Router, h: Tensor, state: Tensor) -> Tensor:
    return router.score.into.weight @ h + router.score.into.bias + router.score.gamma * state


def logits_of(router: Router, state: Tensor) -> Tensor:
    score = router.score
    if score.cell is not None:
        return score.out.weight @ state
    units = score.norm * state / torch.sqrt((state * state).mean() + 1e-5)
    for layer in score.hidden:
        x = layer.weight @ units + layer.bias
        units = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return score.out.weight @ units


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("depth", ["gru", "average"])
def test_transcription_over_layers(depth: str, layers: int, k: int) -> None:
    routers = stack(f"recurrent:depth={depth}:width={WIDTH}:renormalize=false")
    whole = nn.ModuleList(routers)
    for router in routers:
        router.top_k = k
    given = [inputs(seed)[0].requires_grad_() for seed in range(3)]
    mask = inputs()[1]
    states = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(mask.numel())]
    below = None
    for router, hidden in zip(routers[:layers], given, strict=False):
        routing = router(hidden, RoutingContext(padding_mask=mask, below=below))
        below = routing.above
        experts: list[list[int]] = []
        weights: list[list[Tensor]] = []
        for place, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten(), strict=True)):
            states[place] = (gru if depth == "gru" else average)(router, h, states[place])
            p = softmax(logits_of(router, states[place]))
            chosen = ranked(p, k) if real else []
            experts.append(chosen)
            weights.append([p[e] for e in chosen])
    compare(whole, given[0], mask, Expected(experts, weights), routing)  # the gradient crosses layers


def test_layers_share_one_cell_and_states_of_other_widths_stay_apart() -> None:
    one, two, three = stack("recurrent:width=3")
    assert one.score.cell is two.score.cell is three.score.cell
    hidden, _ = inputs()
    small, large = stack("recurrent:width=3|recurrent:width=4")[:2]
    above = large(hidden, RoutingContext(below=small(hidden).above)).above
    assert {name: state.shape[-1] for name, state in above.items()} == {"gru-3": 3, "gru-4": 4}


def test_a_state_of_another_shape_is_refused() -> None:
    router = stack("recurrent:width=3")[0]
    hidden, _ = inputs()
    with pytest.raises(ValueError, match=r"recurrent: the state below must be \[3, 7, 3\], got \[3, 7, 2\]"):
        router(hidden, RoutingContext(below={"gru-3": torch.zeros(3, 7, 2)}))
    with pytest.raises(ValueError, match="recurrent: option width"):
        build_router("recurrent:width=0", dim=4, num_experts=4)


@pytest.mark.parametrize("choice", ["stable", "mask", "hash"])
def test_a_scorer_that_holds_it_reads_the_state_below_too(choice: str) -> None:
    torch.manual_seed(0)
    router = build_router(f"recurrent@{choice}", dim=DIM, num_experts=EXPERTS, vocab_size=8)
    assert router.score.below == router.score.gate.below != {}


def test_a_table_without_scores_reads_no_state_below() -> None:
    assert build_router("hash", dim=DIM, num_experts=EXPERTS, vocab_size=8).score.below == {}


@pytest.mark.parametrize("k", [1, 3])
def test_zaya1_whole(k: int) -> None:
    """State over depth, softmax over E + 1, choice by p + b with b = -1 for the skip expert, weight p of the others."""
    routers = stack(f"recurrent:depth=average:width={WIDTH}@loss-free:nulls=1:null_bias=-1:renormalize=false")
    whole = nn.ModuleList(routers)
    assert all(router.select.bias.tolist() == [0.0] * EXPERTS + [-1.0] for router in routers)
    for router in routers:
        router.top_k = k
        router.select.bias.copy_(0.3 * torch.randn(EXPERTS + 1))
    hidden, mask = inputs()
    hidden.requires_grad_()
    states = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(mask.numel())]
    below, skipped = None, 0
    for router in routers:
        routing = router(hidden, RoutingContext(padding_mask=mask, below=below))
        below = routing.above
        experts: list[list[int]] = []
        weights: list[list[Tensor]] = []
        for place, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten(), strict=True)):
            states[place] = average(router, h, states[place])
            p = softmax(logits_of(router, states[place]))
            chosen = ranked(p + router.select.bias, k) if real else []
            skipped += EXPERTS in chosen
            experts.append([e for e in chosen if e < EXPERTS])
            weights.append([p[e] for e in experts[-1]])
    assert skipped
    compare(whole, hidden, mask, Expected(experts, weights), routing)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_gating_residual_over_layers(k: int) -> None:
    """MoE++: z_l = W_l h + R_l z_(l-1); the gradient crosses layers."""
    routers = stack("smoe:residual=true:bias=false:renormalize=false")
    for router in routers:
        router.top_k = k
    hidden, mask = inputs()
    hidden.requires_grad_()
    below, before = None, [None] * mask.numel()
    for router in routers:
        routing = router(hidden, RoutingContext(padding_mask=mask, below=below))
        below = routing.above
        experts: list[list[int]] = []
        weights: list[list[Tensor]] = []
        for place, (h, real) in enumerate(zip(hidden.flatten(0, 1), mask.flatten(), strict=True)):
            z = router.score.weight @ h
            before[place] = z if before[place] is None else z + router.score.residual @ before[place]
            p = softmax(before[place])
            experts.append(ranked(p, k) if real else [])
            weights.append([p[e] for e in experts[-1]])
    compare(nn.ModuleList(routers), hidden, mask, Expected(experts, weights), routing)


def test_the_lowest_residual_has_a_gradient() -> None:
    """Of zeros: DDP waits for every parameter."""
    router = build_router("smoe:residual=true", dim=DIM, num_experts=EXPERTS)
    plain = build_router("smoe", dim=DIM, num_experts=EXPERTS)
    plain.load_state_dict({name: value for name, value in router.state_dict().items() if "residual" not in name})
    hidden = torch.randn(3, 7, DIM)
    routing = router(hidden)
    assert torch.equal(routing.logits, plain(hidden).logits)
    routing.weights[:, 0].sum().backward()
    assert router.score.residual.grad is not None
    assert not router.score.residual.grad.any()
