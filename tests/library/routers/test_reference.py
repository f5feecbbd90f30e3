"""Routers against float64 transcriptions of their papers' equations, token by token, forward and gradient."""

import math

import pytest
import torch
from torch import Tensor

from pointsman import MoE, build_router, build_routers, losses, set_top_k

DIM, HIDDEN, EXPERTS, TOKENS = 7, 5, 6, 23


def layer_for(spec: str, top_k: int = 2) -> MoE:
    torch.manual_seed(2)
    layer = MoE(DIM, HIDDEN, EXPERTS, router=spec, top_k=top_k, attach_losses=True).double()
    with torch.no_grad():  # spread the logits, so that ties and near-uniform gates cannot hide a mistake
        for name, parameter in layer.router.named_parameters():
            parameter.normal_(0, 1.0 if "temperature" not in name else 0.3)
    return layer


def expert_outputs(layer: MoE, x: Tensor) -> Tensor:
    """[tokens, E, dim]: every expert on every token."""
    e = layer.experts
    inner = torch.relu(torch.einsum("td,ehd->teh", x, e.w_in) + e.b_in)
    return torch.einsum("teh,edh->ted", inner, e.w_out) + e.b_out


def top_indices(row: Tensor, k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: -row[i].item())[:k]


def combine(probs: Tensor, outputs: Tensor, k: int, renormalize: bool) -> Tensor:
    """y = sum_j R(h)_j E_j(h), R = TopK(p, k), written out for each token."""
    rows = []
    for p, o in zip(probs, outputs, strict=True):
        chosen = top_indices(p, k)
        total = sum(p[i] for i in chosen) if renormalize else 1.0
        rows.append(sum(p[i] / total * o[i] for i in chosen))
    return torch.stack(rows)


def hyper_weights(layer: MoE) -> tuple[Tensor, Tensor]:
    """[W | b] = reshape(W2 relu(W1 e + b1) + b2, [E, dim + 1]), written with sums."""
    score = layer.router.score
    e = score.embedding
    first, second = score.hypernetwork[0], score.hypernetwork[2]
    inner = [torch.clamp((first.weight[i] * e).sum() + first.bias[i], min=0) for i in range(first.weight.shape[0])]
    flat = (second.weight * torch.stack(inner)).sum(-1) + second.bias
    table = torch.stack([flat[i * (DIM + 1) : (i + 1) * (DIM + 1)] for i in range(EXPERTS)])
    return table[:, :DIM], table[:, DIM]


def reference(layer: MoE, spec: str, x: Tensor, k: int) -> Tensor:
    score = layer.router.score
    renormalize = True
    if spec.startswith("hyperrouter"):
        weight, bias = hyper_weights(layer)
    elif spec == "frozen-temperature":
        scale = math.e ** (-score.log_temperature)
        weight, bias = score.weight * scale, score.bias * scale
    else:
        weight, bias = score.weight, score.bias
    z = torch.stack([(weight * row).sum(-1) + bias for row in x])
    if "sigmoid" in spec:
        p = 1 / (1 + torch.exp(-z))
    else:
        p = torch.exp(z) / torch.exp(z).sum(-1, keepdim=True)
    if spec == "switch" or "renormalize=false" in spec:
        renormalize = False
    return combine(p, expert_outputs(layer, x), k, renormalize)


SPECS = [
    "smoe",
    "smoe:gate=sigmoid",
    "smoe:renormalize=false",
    "switch",
    "smoe-dropout",
    "frozen-scaled",
    "frozen-temperature",
    "hyperrouter",
    "hyperrouter:embed_dim=4:hyper_dim=9",
    "hyperrouter:renormalize=false",
]


@pytest.mark.filterwarnings("ignore:.*the router gets no gradient")
@pytest.mark.parametrize("k", [1, 2, 3, EXPERTS])
@pytest.mark.parametrize("spec", SPECS)
def test_layer_equals_the_equation(spec: str, k: int) -> None:
    layer = layer_for(spec)
    layer.router.balance = 0.0
    set_top_k(layer, k)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    upstream = torch.randn(TOKENS, DIM, dtype=torch.float64)
    got = layer(x)
    expected = reference(layer, spec, x, k)
    torch.testing.assert_close(got, expected)
    for left, right in zip(
        torch.autograd.grad(got, [x, *parameters], upstream, allow_unused=True),
        torch.autograd.grad(expected, [x, *parameters], upstream, allow_unused=True),
        strict=True,
    ):
        zero = torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(
            zero if left is None else left, zero.expand_as(left) if right is None else right, atol=1e-9, rtol=1e-7
        )


def test_renormalised_top_k_is_a_softmax_of_the_top_k_logits() -> None:
    layer = layer_for("smoe", top_k=3)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    routing = layer.router(x)
    torch.testing.assert_close(routing.weights, torch.softmax(routing.logits.gather(-1, routing.experts), -1))


def test_renormalised_top_1_has_weight_one_and_no_gradient() -> None:
    layer = layer_for("smoe", top_k=1)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    with pytest.warns(UserWarning, match="no gradient"):
        layer(x).sum().backward()
    assert torch.equal(layer.router(x).weights, torch.ones(TOKENS, 1, dtype=torch.float64))
    assert layer.router.score.weight.grad is None or layer.router.score.weight.grad.abs().max() < 1e-12


def test_switch_with_a_sigmoid_gate_weighs_by_the_gate() -> None:
    """s = h . e without bias; at k = 1 the weight is the gate's value, and e gets a gradient."""
    layer, x = layer_for("switch:gate=sigmoid:bias=false:balance=0"), torch.randn(TOKENS, DIM).double()
    score = layer.router.score
    assert score.bias is None
    weight = score.weight.detach().clone().requires_grad_()
    expected = combine(torch.sigmoid(x @ weight.T), expert_outputs(layer, x), 1, renormalize=False)
    output = layer(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert float(weight.grad.abs().sum()) > 0
    torch.testing.assert_close(score.weight.grad, weight.grad)


def test_switch_balance_loss() -> None:
    """alpha E sum_i f_i P_i, f_i the fraction of tokens sent to i, P_i the mean probability."""
    layer = layer_for("switch")
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    probs = torch.softmax(x @ layer.router.score.weight.T + layer.router.score.bias, -1)
    chosen = probs.argmax(-1)
    expected = sum((chosen == i).double().mean() * probs[:, i].mean() for i in range(EXPERTS)) * EXPERTS * 0.01
    routing = layer.router(x)
    torch.testing.assert_close(routing.losses["balance"], expected)
    before = layer.router.score.weight
    output = layer(x)
    task = torch.autograd.grad(combine(probs, expert_outputs(layer, x), 1, False).sum() + expected, before)[0]
    torch.testing.assert_close(torch.autograd.grad(output.sum(), before)[0], task)
    torch.testing.assert_close(losses(layer)[""]["balance"], expected.detach())


def test_z_loss() -> None:
    router = build_router("smoe:z_loss=0.5", dim=DIM, num_experts=EXPERTS).double()
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    routing = router(x)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in routing.logits.tolist()) / TOKENS / 2
    assert routing.losses["z_loss"].item() == pytest.approx(expected)


def test_hyperrouter_starts_as_the_paper_and_trains_only_its_embedding() -> None:
    """Small model of the paper: 4 layers of 256 trained numbers; generated weights start at std 0.072."""
    routers = build_routers("hyperrouter", layers=4, dim=256, num_experts=16)
    trained = [p for router in routers for p in router.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 1024
    assert [n for n, _ in routers[0].named_parameters()] == ["score.embedding"]
    assert sum(b.numel() for b in routers[0].buffers()) == 1_122_576
    std = torch.stack([router.score.generate()[0].std() for router in routers]).mean()
    assert std.item() == pytest.approx(0.0721, abs=0.006)
    assert build_router("frozen-scaled", dim=256, num_experts=16).score.weight.std().item() == pytest.approx(
        0.02**2 * math.sqrt(256 * 256 / 2), rel=0.05
    )


def test_hyperrouter_scale_of_the_embedding_is_a_temperature() -> None:
    router = build_router("hyperrouter", dim=DIM, num_experts=EXPERTS).double()
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    before = router(x).logits
    with torch.no_grad():
        router.score.embedding.mul_(3.0)
    torch.testing.assert_close(router(x).logits, 3 * before)


def test_hyperrouter_share_means_one_hypernetwork() -> None:
    routers = build_routers("hyperrouter:share=true", layers=3, dim=DIM, num_experts=EXPERTS)
    assert len({id(router.score.hypernetwork) for router in routers}) == 1
    assert len({id(router.score.embedding) for router in routers}) == 3


def test_hyperrouter_cache_follows_every_way_the_embedding_can_change() -> None:
    router = build_router("hyperrouter", dim=DIM, num_experts=EXPERTS).eval()
    x = torch.randn(TOKENS, DIM)
    with torch.no_grad():
        first = router(x).logits
        assert router.score.generate()[0].data_ptr() != router.score.plain_linear()[0].data_ptr()
        assert router.score.plain_linear()[0].data_ptr() == router.score.plain_linear()[0].data_ptr()
        router.score.embedding.mul_(2)
        torch.testing.assert_close(router(x).logits, 2 * first)
        state = {name: value.clone() for name, value in router.state_dict().items()}
        state["score.embedding"] = state["score.embedding"] * 2
        router.load_state_dict(state)
        torch.testing.assert_close(router(x).logits, 4 * first)
        router.score.embedding = torch.nn.Parameter(router.score.embedding / 4)
        torch.testing.assert_close(router(x).logits, first)
        router.double()
        torch.testing.assert_close(router(x.double()).logits, first.double(), atol=1e-5, rtol=1e-5)


def test_thor_draws_one_set_a_forward_in_training_and_one_a_token_in_evaluation() -> None:
    router = build_router("thor", dim=DIM, num_experts=EXPERTS, top_k=2)
    x = torch.randn(400, DIM)
    training = router(x)
    assert (training.experts == training.experts[0]).all()
    assert torch.equal(training.weights, torch.full((400, 2), 0.5))
    router.eval()
    counts = torch.bincount(router(x).experts.reshape(-1), minlength=EXPERTS)
    assert (counts > 80).all()  # 133 expected
    assert router.objective == "consistency"
    assert router.stochastic


def test_switch_jitter_leaves_the_experts_input_alone() -> None:
    layer = layer_for("switch:jitter=0.5")
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    outputs = expert_outputs(layer, x)
    torch.manual_seed(5)
    routing = layer.router(x)
    torch.manual_seed(5)
    y = layer(x)
    expected = routing.weights * outputs[torch.arange(TOKENS), routing.experts[:, 0]]
    torch.testing.assert_close(y, expected)
    clean = layer.eval().router(x).logits
    assert not torch.allclose(routing.logits, clean)
