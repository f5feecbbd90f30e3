"""CompeteSMoE: competition steps against a float64 transcription, other steps equal smoe, draws, and its example."""

import pytest
import torch
from torch import Tensor, nn

from pointsman import MoE, RoutingContext, add_losses, build_router, freeze, losses, step_end
from pointsman.experts.shared import CHUNK
from tests.library.routers.oracle import DIM, EXPERTS, inputs, ranked, router_for, softmax


def outputs_of(layer: MoE, h: Tensor) -> list[Tensor]:
    e = layer.experts
    return [e.w_out[i] @ torch.relu(e.w_in[i] @ h + e.b_in[i]) + e.b_out[i] for i in range(e.num_experts)]


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_transcription_of_a_competition_step(k: int, version: int) -> None:
    """The output with its losses, and every gradient: of the router, the experts and the input."""
    torch.manual_seed(0)
    spec = f"compete:version={version}:rate=1:router=0.7:diversity=0.3:renormalize=true"
    layer = MoE(DIM, 4, EXPERTS, router=spec, top_k=k).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    hidden, mask = inputs()
    hidden.requires_grad_()
    rows, router_losses, cosines = [], [], []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        every = outputs_of(layer, h)
        a = [((y * y).sum() ** 0.5 if version == 1 else torch.log(1 + torch.exp(y)).mean()) for y in every]
        best = ranked([float(one.detach()) for one in a], k)
        powers = {e: torch.exp(a[e]) if version == 1 else a[e] for e in best}
        total = sum(powers.values())
        rows.append(sum(powers[e] / total * every[e] for e in best) if real else 0 * h)
        if not real:
            continue
        p, told = softmax(layer.router.score.weight @ h), [one.detach() for one in a]
        if version == 1:
            among = softmax(torch.stack([told[e] for e in best]))
            target = [among[best.index(e)] if e in best else torch.zeros(()) for e in range(EXPERTS)]
        else:
            target = list(softmax(torch.stack(told)))
        squares = [(p[e] - target[e]) ** 2 for e in range(EXPERTS)]
        loss = sum(squares) / EXPERTS
        if version == 2:
            loss = loss + 0.1 * sum(squares[e] for e in best) / k
        router_losses.append(loss)
        pairs = [(every[i] @ every[j]) / (every[i].norm() * every[j].norm()) for i in best for j in best if i != j]
        cosines.append(sum(pairs) / len(pairs) if pairs else torch.zeros((), dtype=torch.float64))
    output, routing = layer(hidden, RoutingContext(padding_mask=mask), return_routing=True)
    torch.testing.assert_close(output.flatten(0, 1), torch.stack(rows))
    expected = {"router": 0.7 * sum(router_losses) / len(cosines), "diversity": 0.3 * sum(cosines) / len(cosines)}
    for name, value in expected.items():
        torch.testing.assert_close(routing.losses[name], value)
    coefficients = torch.randn_like(output)
    wanted = [hidden, *layer.parameters()]
    left = (output * coefficients).sum() + sum(routing.losses.values())
    right = (torch.stack(rows).view_as(output) * coefficients).sum() + sum(expected.values())
    for one, other in zip(torch.autograd.grad(left, wanted), torch.autograd.grad(right, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_the_worked_example_of_version_2() -> None:
    """Outputs (1 -1) and (2 0): means of softplus .813262 and 1.410037."""
    router = build_router("compete:rate=1:router=1", dim=2, num_experts=2, top_k=2).double()
    outputs = torch.tensor([[[1.0, -1.0], [2.0, 0.0]]], dtype=torch.float64)
    context = RoutingContext(responses=lambda reduce: reduce(outputs))
    routing = router(torch.zeros(1, 2, dtype=torch.float64), context)
    assert routing.experts.tolist() == [[1, 0]]
    assert routing.weights[0].tolist() == pytest.approx([0.634210, 0.365790], abs=1e-6)
    difference = 0.644919 - 0.5  # the target is (.355081 .644919), p is uniform
    assert float(routing.losses["router"].detach()) == pytest.approx(1.1 * difference**2, abs=1e-6)


def test_equal_experts_have_a_uniform_target() -> None:
    layer = MoE(DIM, 4, EXPERTS, router="compete:rate=1:router=1").double()
    with torch.no_grad():
        layer.router.score.weight.zero_()
        for parameter in layer.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    layer(inputs()[0].requires_grad_())
    assert float(losses(layer)[""]["router"]) == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_other_steps_and_evaluation_are_smoe(k: int) -> None:
    hidden, mask = inputs()
    context = RoutingContext(padding_mask=mask)
    for spec, training in (("compete:rate=0", True), ("compete:rate=1", False)):
        ours, theirs = (router_for(one, k).train(training and k > 1) for one in (spec, "smoe:bias=false"))
        theirs.score.load_state_dict({"weight": ours.score.weight})
        left, right = ours(hidden, context), theirs(hidden, context)
        assert torch.equal(left.experts, right.experts)
        assert torch.equal(left.weights, right.weights)


def test_draws_follow_the_steps_and_resume() -> None:
    layer, other = (MoE(8, 8, 4, router="compete:rate=0.3:warmup=5") for _ in range(2))
    drawn = []
    for step in range(200):
        drawn.append(layer.router.score.competes)
        if step == 100:
            other.load_state_dict(layer.state_dict())
        if step >= 100:
            assert other.router.score.competes == drawn[-1]
            step_end(other)
        step_end(layer)
    assert not any(drawn[:5])
    assert 35 < sum(drawn) < 85  # 58.5, standard deviation 6.4; both are of the layer's own seed
    fresh = [MoE(8, 8, 4, router="compete:rate=0.5") for _ in range(20)]
    assert len({one.router.score.competes for one in fresh}) == 2, "layers draw for themselves"
    first, again = layer.router.score, layer.router.score
    assert first.competes == again.competes


@pytest.mark.parametrize("router", ["compete:rate=1", "smoe-dropout@compete:rate=1"])
def test_a_frozen_router_never_competes(router: str) -> None:
    layer = MoE(8, 8, 4, router=router)
    assert layer.router.score.needs_responses
    freeze(layer, "router")
    assert not layer.router.score.needs_responses
    layer.router.requires_grad_(True)
    assert layer.router.score.needs_responses


def test_micro_batches_of_a_step_compete_alike_and_train() -> None:
    torch.manual_seed(0)
    found = []
    for parts in (1, 2):
        torch.manual_seed(1)
        layer = MoE(8, 8, 4, router="compete:rate=1")
        hidden = torch.randn(2, CHUNK, 8)  # more than one chunk
        for part in hidden.chunk(parts):
            add_losses(layer(part).sum(), layer).backward()
        found.append([p.grad.clone() for p in layer.experts.parameters()])
        step_end(layer)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_half_precision_padding_and_no_tokens() -> None:
    layer = MoE(16, 16, 4, router="compete:rate=1:diversity=0.1", gated=True, activation="silu").bfloat16()
    for shape in ((2, 5, 16), (2, 0, 16)):
        hidden = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        context = RoutingContext(padding_mask=torch.zeros(shape[:2], dtype=torch.bool))
        add_losses(layer(hidden, context).sum(), layer).backward()
        step_end(layer)
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


def test_it_needs_the_experts_of_a_layer() -> None:
    with pytest.raises(ValueError, match="asks the experts of the MoE layer"):
        build_router("compete:rate=1", dim=4, num_experts=4)(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="cannot be used with experts='base': it does not only weigh outputs"):
        MoE(8, 8, 4, router="compete", experts="base")
