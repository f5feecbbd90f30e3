"""X-MoE against the paper's equations in float64, its state, and its options."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import pointsman
from pointsman import MoE, RoutingContext, build_router
from pointsman.routers.frame.router import Router

DIM, EXPERTS, TOKENS = 12, 8, 10


def hidden_states(seed: int = 0) -> Tensor:
    return torch.randn(2, TOKENS // 2, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(spec: str = "xmoe", top_k: int = 2, **options: object) -> Router:
    torch.manual_seed(1)
    return build_router(spec, dim=DIM, num_experts=EXPERTS, top_k=top_k, **options).double()


def cosines(hidden: Tensor, projection: Tensor | None, experts: Tensor) -> Tensor:
    """Eq. 7, one token and one expert at a time."""
    rows = []
    for token in hidden.reshape(-1, hidden.shape[-1]):
        low = token if projection is None else projection @ token
        rows.append(torch.stack([low @ e / (low.square().sum().sqrt() * e.square().sum().sqrt()) for e in experts]))
    return torch.stack(rows)


def paper(
    hidden: Tensor, projection: Tensor | None, experts: Tensor, tau: Tensor, gate: str, k: int, renormalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, chosen experts and combine weights (Eq. 7 and 8)."""
    scores = cosines(hidden, projection, experts)
    if gate == "sigmoid":
        gates = 1 / (1 + torch.exp(-scores / tau))
    else:
        gates = torch.exp(scores / tau) / torch.exp(scores / tau).sum(1, keepdim=True)
    chosen = scores.argsort(1, descending=True)[:, :k]
    weights = torch.stack([gates[t][chosen[t]] for t in range(len(chosen))])
    return scores, chosen, weights / weights.sum(1, keepdim=True) if renormalize else weights


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("routing_dim", [None, 3, "full"])
def test_equals_the_paper_forward_and_gradient(gate: str, top_k: int, routing_dim: int | str | None) -> None:
    options = {} if routing_dim is None else {"routing_dim": routing_dim}
    router = build(top_k=top_k, gate=gate, **options)
    inputs = [hidden_states().requires_grad_(), *router.parameters()]
    routing = router(inputs[0])
    projection = None if routing_dim == "full" else router.score.projection.weight
    experts, tau = router.score.expert_embeddings, router.normalize.temperature
    scores, chosen, weights = paper(inputs[0], projection, experts, tau, gate, top_k, renormalize=top_k > 1)
    torch.testing.assert_close(routing.logits, scores)
    assert torch.equal(routing.experts, chosen)
    torch.testing.assert_close(routing.weights, weights)
    coefficients = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = torch.autograd.grad((routing.weights * coefficients).sum(), inputs)
    theirs = torch.autograd.grad((weights * coefficients).sum(), inputs)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("gate", "tau0"), [("softmax", 0.3), ("sigmoid", 0.07)])
def test_balance_is_taken_at_tau0_and_is_1_when_balanced(gate: str, tau0: float) -> None:
    router = build(gate=gate)
    with torch.no_grad():
        router.normalize.temperature.fill_(0.5)  # the gate's temperature must not enter
    routing = router(hidden_states())
    scores = cosines(hidden_states(), router.score.projection.weight, router.score.expert_embeddings)
    p = torch.softmax(scores / tau0, 1)
    share = torch.stack([(routing.experts == i).sum() for i in range(EXPERTS)]).double() / (TOKENS * 2)
    expected = sum(EXPERTS / TOKENS * share[i] * p[t, i] for i in range(EXPERTS) for t in range(TOKENS))
    torch.testing.assert_close(routing.losses["balance"], 0.01 * expected)


def test_norms_and_temperature_are_clamped_from_below() -> None:
    router = build(top_k=1)
    router.normalize.temperature.data.fill_(-1.0)
    hidden = hidden_states()
    hidden[0, 0] = 0
    hidden.requires_grad_()
    routing = router(hidden)
    assert torch.equal(routing.logits[0], torch.zeros(EXPERTS, dtype=torch.float64))
    torch.testing.assert_close(routing.probs, torch.softmax(routing.logits / 1e-4, 1))
    routing.probs.square().sum().backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
    router.step_end()
    assert router.normalize.temperature.item() == pytest.approx(1e-4)


def test_step_end_keeps_the_norms_and_forward_does_not() -> None:
    layer = MoE(DIM, 16, EXPERTS, router="xmoe", attach_losses=True)
    embeddings = layer.router.score.expert_embeddings
    torch.testing.assert_close(embeddings.norm(dim=1), torch.full((EXPERTS,), 0.1))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    pointsman.track_steps(layer, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        layer(hidden_states().float()).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(embeddings.norm(dim=1), torch.full((EXPERTS,), 0.1))
    with torch.no_grad():
        embeddings.mul_(3)
    layer.eval()
    layer(hidden_states().float())
    torch.testing.assert_close(embeddings.norm(dim=1), torch.full((EXPERTS,), 0.3))


def test_training_without_step_end_warns() -> None:
    router = build()
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    router(hidden_states()).probs.square().sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="step_end"):
        router(hidden_states())


def test_a_frozen_router_stays_and_its_balance_loss_reaches_the_hidden_states() -> None:
    layer = MoE(DIM, 16, EXPERTS, router="xmoe", attach_losses=True)
    pointsman.freeze(layer, "router", "experts")
    with torch.no_grad():
        layer.router.score.expert_embeddings.mul_(2)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    hidden = hidden_states().float().requires_grad_()
    (layer(hidden) * 0).sum().backward()
    pointsman.step_end(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert hidden.grad is not None
    assert hidden.grad.abs().sum() > 0


def test_weights_at_top_1_are_the_gate_and_set_top_k_does_not_change_renormalisation() -> None:
    router = build(top_k=1)
    routing = router(hidden_states())
    torch.testing.assert_close(routing.weights[:, 0], routing.probs.max(1).values)
    pointsman.set_top_k(router, 2)
    assert (router(hidden_states()).weights.sum(1) < 1).all()
    router = build(top_k=2).eval()
    pointsman.set_top_k(router, 1)
    torch.testing.assert_close(router(hidden_states()).weights, torch.ones(TOKENS, 1, dtype=torch.float64))


def test_normalize_false_is_a_dot_product_with_free_norms() -> None:
    router = build("xmoe:normalize=false:routing_dim=full")
    torch.testing.assert_close(
        router(hidden_states()).logits, hidden_states().reshape(-1, DIM) @ router.score.expert_embeddings.T
    )
    with torch.no_grad():
        router.score.expert_embeddings.mul_(3)
    router.step_end()
    torch.testing.assert_close(
        router.score.expert_embeddings.norm(dim=1), torch.full((EXPERTS,), 0.3, dtype=torch.float64)
    )


def test_torchscale_keeps_the_token_norm_and_has_no_temperature() -> None:
    router = build("xmoe-torchscale", top_k=1)
    scorer = router.score
    assert scorer.expert_embeddings.shape == (EXPERTS, 16)
    torch.testing.assert_close(scorer.expert_embeddings.norm(dim=1), torch.full((EXPERTS,), 1.5, dtype=torch.float64))
    hidden = hidden_states().reshape(-1, DIM)
    low = hidden @ scorer.projection.weight.T
    scores = torch.stack([low @ e / e.norm() for e in scorer.expert_embeddings], 1)
    routing = router(hidden)
    torch.testing.assert_close(routing.logits, scores)
    torch.testing.assert_close(routing.weights[:, 0], torch.softmax(scores, 1).max(1).values)
    p, share = torch.softmax(scores, 1).mean(0), torch.bincount(scores.argmax(1), minlength=EXPERTS) / TOKENS
    torch.testing.assert_close(routing.losses["balance"], 0.01 * EXPERTS * (p * share).sum())


def test_state_dict_names() -> None:
    assert {name.partition(".")[2] for name in build().state_dict()} == {
        "projection.weight",
        "expert_embeddings",
        "temperature",
    }
    assert build().score.projection.weight.shape == (EXPERTS // 2, DIM)


def test_materialize_refuses_by_name() -> None:
    model = nn.Sequential(MoE(DIM, 16, EXPERTS, router="xmoe", attach_losses=True))
    with pytest.raises(ValueError, match="layer '0': no linear router equals 'xmoe'"):
        pointsman.materialize(model)
    with pytest.raises(ValueError, match="Linear has no MoE layer and no router in it"):
        pointsman.materialize(nn.Linear(2, 2))


def test_padding_touches_no_loss() -> None:
    router, mask = build(), torch.ones(2, TOKENS // 2, dtype=torch.bool)
    mask[1, 3:] = False
    hidden = hidden_states()
    other = hidden.clone()
    other[1, 3:] = 100.0
    one, two = (router(h, RoutingContext(padding_mask=mask)) for h in (hidden, other))
    torch.testing.assert_close(one.losses["balance"], two.losses["balance"])


@pytest.mark.parametrize("spec", ["xmoe", "xmoe-torchscale"])
def test_what_hooks_on_the_projection_change_is_used(spec: str) -> None:
    """Hooks of `torch.nn.utils.prune` make the weight when the module is called, adapters its output."""
    layer = MoE(DIM, 16, EXPERTS, router=spec, attach_losses=True)
    projection = layer.router.score.projection
    prune.l1_unstructured(projection, "weight", 0.5)
    for _ in range(2):  # the second ended in "Trying to backward through the graph a second time"
        layer(torch.randn(5, DIM)).square().sum().backward()
        with torch.no_grad():
            projection.weight_orig += 1
        layer.router.step_end()
    hidden = torch.randn(5, DIM)
    before = layer.router(hidden).logits
    projection.register_forward_hook(lambda module, args, output: 0 * output)
    assert before.any()
    assert not layer.router(hidden).logits.any()
