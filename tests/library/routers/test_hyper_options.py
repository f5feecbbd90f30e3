"""HyperRouter's future work: the penalty, dropout of the embedding, hyperfan, and a hypernetwork for each expert."""

import pytest
import torch
from torch import Tensor

from pointsman import MoE, build_router, build_routers, freeze, materialize
from pointsman.routers.papers.hyper import FrozenLinear
from pointsman.routing import Routing
from tests.library.routers.oracle import DIM, EXPERTS, Expected, compare, inputs, ranked, route, router_for, softmax


def hypernetwork(net: torch.nn.Module, entered: Tensor) -> Tensor:
    first, _, second = net
    units = torch.clamp(first.weight @ entered + first.bias, min=0)
    return second.weight @ units + second.bias


@pytest.mark.parametrize("init", ["normal", "hyperfan"])
@pytest.mark.parametrize("generate", ["whole", "expert"])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_transcription(k: int, generate: str, init: str) -> None:
    router = router_for(f"hyperrouter:l2=0.3:init={init}:generate={generate}:hyper_dim=7:embed_dim=4", k).eval()
    score = router.score
    hidden, mask = inputs()
    hidden.requires_grad_()
    if generate == "expert":
        rows = [hypernetwork(score.hypernetwork, score.embedding + score.places[i]) for i in range(EXPERTS)]
    else:
        rows = list(hypernetwork(score.hypernetwork, score.embedding).view(EXPERTS, DIM + 1))
    experts, weights = [], []
    for h, real in zip(hidden.flatten(0, 1), mask.flatten(), strict=True):
        z = torch.stack([(row[:-1] * h).sum() + row[-1] for row in rows])
        chosen = ranked(z, k) if real else []
        p = softmax(z)
        experts.append(chosen)
        weights.append([p[e] / sum(p[i] for i in chosen) for e in chosen])
    loss = 0.3 * sum(one * one for one in score.embedding)
    compare(router, hidden, mask, Expected(experts, weights, {"l2": loss}), route(router, hidden, mask))


def test_each_expert_equals_a_whole_hypernetwork_with_blocks() -> None:
    each = router_for("hyperrouter:generate=expert:hyper_dim=3:embed_dim=4")
    whole = router_for(f"hyperrouter:hyper_dim={3 * EXPERTS}:embed_dim=4")
    first, _, second = each.score.hypernetwork
    outer, _, inner = whole.score.hypernetwork
    with torch.no_grad():
        whole.score.embedding.copy_(each.score.embedding)
        outer.weight.copy_(first.weight.repeat(EXPERTS, 1))
        outer.bias.copy_((each.score.places @ first.weight.T + first.bias).flatten())
        inner.weight.copy_(torch.block_diag(*[second.weight] * EXPERTS))
        inner.bias.copy_(second.bias.repeat(EXPERTS))
    hidden, mask = inputs()
    left, right = route(each, hidden, mask), route(whole, hidden, mask)
    torch.testing.assert_close(left.logits, right.logits)
    assert torch.equal(left.experts, right.experts)
    layer = MoE(DIM, 4, EXPERTS, router="hyperrouter:generate=expert:l2=0.1")
    plain = materialize(layer.eval())
    assert plain.router.spec == "smoe"


@pytest.mark.parametrize(("generate", "bias"), [("whole", True), ("expert", True), ("whole", False)])
def test_hyperfan_starts_with_logits_of_variance_one(generate: str, bias: bool) -> None:
    """The generated weights have variance 1/(2 d), biases 1/2: within 5 % over 50 seeds; without bias 1/d."""
    dim, experts = 64, 16
    weights, biases = [], []
    spec = f"hyperrouter:init=hyperfan:generate={generate}:hyper_dim=64:bias={str(bias).lower()}"
    for seed in range(50):
        torch.manual_seed(seed)
        weight, offset = build_router(spec, dim=dim, num_experts=experts).score.plain_linear()
        weights.append(weight.detach())
        biases.append(torch.zeros(()) if offset is None else offset.detach())
    share = 2 if bias else 1
    assert float(torch.stack(weights).square().mean()) == pytest.approx(1 / (share * dim), rel=0.05)
    if bias:
        assert float(torch.stack(biases).square().mean()) == pytest.approx(1 / 2, rel=0.1)


def test_dropout_has_one_mask_a_forward_and_none_in_evaluation() -> None:
    router = router_for("hyperrouter:embed_dropout=0.4:hyper_dim=7:embed_dim=50")
    plain = router_for("hyperrouter:hyper_dim=7:embed_dim=50")
    hidden, _ = inputs()
    routing = route(router, hidden)
    torch.manual_seed(3)  # as `route`
    kept = torch.nn.functional.dropout(torch.ones(50, dtype=torch.float64), 0.4)
    assert set(kept.tolist()) == {0.0, 1 / 0.6}
    with torch.no_grad():
        plain.score.embedding.mul_(kept)
    torch.testing.assert_close(routing.logits, route(plain, hidden).logits)
    plain.score.load_state_dict(router.score.state_dict())
    assert torch.equal(route(router.eval(), hidden).logits, route(plain.eval(), hidden).logits)


def test_a_training_router_materializes_without_dropout() -> None:
    layer = MoE(DIM, 4, EXPERTS, router="hyperrouter:embed_dropout=0.9")
    expected: Routing = layer.router.eval()(inputs()[0].float())
    materialize(layer.train())
    torch.testing.assert_close(layer.router(inputs()[0].float()).logits, expected.logits)


def test_one_penalty_for_each_embedding_and_one_network_for_all() -> None:
    routers = build_routers("hyperrouter:share=true:l2=0.5:generate=expert", layers=2, dim=8, num_experts=4)
    nets = [router.score.hypernetwork for router in routers]
    assert nets[0] is nets[1]
    assert isinstance(nets[0][0], FrozenLinear)
    found = [float(router(torch.zeros(1, 8)).losses["l2"].detach()) for router in routers]
    wanted = [0.5 * float(router.score.embedding.detach().square().sum()) for router in routers]
    assert found == pytest.approx(wanted)
    assert found[0] != found[1]
    layer = MoE(8, 8, 4, router=routers[0])
    layer(torch.randn(3, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.router.parameters())
    freeze(layer, "router")
