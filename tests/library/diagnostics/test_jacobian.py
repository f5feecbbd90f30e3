import pickle

import pytest
import torch
from torch import nn

from pointsman import MoE, RoutingContext
from pointsman.diagnostics import JacobianTerms, layer_gradients
from tests.library.diagnostics.helpers import same

DIM, HIDDEN, EXPERTS, TOKENS = 12, 20, 5, 30


def layer_of(router, top_k=2):
    """A float64 layer with a router of some scale."""
    torch.manual_seed(3)
    layer = MoE(DIM, HIDDEN, EXPERTS, top_k=top_k, router=router).double().eval()
    with torch.no_grad():
        for name, parameter in layer.router.named_parameters():
            if name == "score.weight":
                parameter.mul_(20)
    return layer


def transcription(layer, weight, bias, hidden, gradient, k):
    """Eqs. 3 to 5 of HyperRouter, a token at a time: J1^T g and J2^T g."""
    p = {name: value.detach() for name, value in layer.experts.named_parameters()}
    terms = []
    for h, g in zip(hidden, gradient, strict=True):
        z = weight @ h + bias
        top = z.topk(k).indices.tolist()
        s = torch.softmax(z[top], 0)
        j1, outputs = torch.zeros(DIM, DIM, dtype=torch.float64), []
        for place, e in enumerate(top):
            units = p["w_in"][e] @ h + p["b_in"][e]
            outputs.append(p["w_out"][e] @ torch.relu(units) + p["b_out"][e])
            j1 += s[place] * p["w_out"][e] @ torch.diag((units > 0).double()) @ p["w_in"][e]
        second = torch.zeros(DIM, dtype=torch.float64)
        for i in range(k):
            c = 0.0
            for j in range(k):
                slope = s[j] * (float(i == j) - s[i])
                c += slope * (outputs[j] @ g)
            second += c * weight[top[i]]
        terms.append((j1.T @ g, second))
    return terms


@pytest.mark.parametrize(("router", "k"), [("smoe", 2), ("smoe", 5), ("smoe-dropout", 3), ("hyperrouter", 3)])
def test_against_the_papers_equations(router, k):
    layer = layer_of(router, k)
    weight, bias = (t.detach() for t in layer.router.score.plain_linear())
    hidden = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    gradient = torch.randn(TOKENS, DIM, dtype=torch.float64)
    diagnostic = JacobianTerms(layer)
    diagnostic.update(hidden, gradient)
    found = diagnostic.result()
    terms = transcription(layer, weight, bias, hidden[0], gradient, k)
    first, second = torch.stack([t[0] for t in terms]), torch.stack([t[1] for t in terms])
    basis = torch.linalg.qr(weight.T).Q.T
    for name, values in (("j1", first), ("j2", second), ("both", first + second)):
        of = found["gradient"][name]
        squares = torch.linalg.svdvals(values).square()
        share = squares / squares.sum()
        assert of["norm_mean"] == pytest.approx(float(values.norm(dim=1).mean()))
        assert of["rank"] == int(torch.linalg.matrix_rank(values))
        assert of["effective_rank"] == pytest.approx(float(torch.special.entr(share).sum().exp()), rel=1e-6)
        assert of["in_span"] == pytest.approx(float((values @ basis.T).square().sum() / values.square().sum()))
    assert found["gradient"]["j2"]["in_span"] == pytest.approx(1)
    assert found["gradient"]["j2"]["rank"] <= EXPERTS
    assert (found["span_rank"], found["span_share"]) == (EXPERTS, EXPERTS / DIM)


WEIGHTS_ELSEWHERE = (
    "smoe:weigh=input",
    "smoe:weigh=input:gate=sigmoid:renormalize=false",
    "smoe:nulls=3",
    "smoe:nulls=3:kind=copy",
    "smoe:nulls=3:kind=constant",
)


@pytest.mark.parametrize("router", ["smoe:weigh=input", "soft", "smoe:nulls=3:kind=copy"])
def test_gradients_of_layers_that_do_not_only_weigh_outputs(router):
    layer = layer_of(router)
    hidden = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    found = layer_gradients(layer, lambda: layer(hidden).square().sum())[""]
    assert torch.allclose(found.gradient, 2 * layer(hidden).reshape(-1, DIM))
    assert not layer._forward_hooks


def test_both_terms_are_the_layers_gradient():
    for router in ("smoe", "xmoe", "hyperrouter", "smoe:gate=sigmoid", "soft", *WEIGHTS_ELSEWHERE):
        layer = layer_of(router)
        hidden = torch.randn(1, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
        gradient = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
        (whole,) = torch.autograd.grad(layer(hidden), hidden, gradient)
        diagnostic = JacobianTerms(layer)
        diagnostic.update(hidden, gradient)
        assert diagnostic.result()["gradient"]["both"]["norm_mean"] == pytest.approx(
            float(whole[0].norm(dim=1).mean())
        ), router


def test_xmoe_sends_its_gradient_into_the_projections_span():
    layer = layer_of("xmoe:routing_dim=3")
    diagnostic = JacobianTerms(layer)
    diagnostic.update(torch.randn(1, TOKENS, DIM, dtype=torch.float64), torch.randn(TOKENS, DIM, dtype=torch.float64))
    found = diagnostic.result()
    assert found["span_rank"] == 3
    assert found["gradient"]["j2"]["in_span"] == pytest.approx(1)
    assert found["gradient"]["j2"]["rank"] == 3
    assert found["gradient"]["j1"]["in_span"] < 0.6


@pytest.mark.parametrize(("router", "k"), [("smoe", 1), ("thor", 2)])
def test_a_router_without_gradient_has_no_second_term(router, k):
    layer = layer_of(router, k)
    diagnostic = JacobianTerms(layer)
    diagnostic.update(torch.randn(1, TOKENS, DIM, dtype=torch.float64), torch.randn(TOKENS, DIM, dtype=torch.float64))
    found = diagnostic.result()
    assert found["gradient"]["j2"]["norm_mean"] == pytest.approx(0, abs=1e-15)
    assert found["norm_ratio"] == pytest.approx(0, abs=1e-15)
    assert {key: found["gradient"]["j2"][key] for key in ("rank", "effective_rank", "in_span")} == {
        "rank": 0, "effective_rank": None, "in_span": None
    }  # fmt: skip
    assert found["gradient"]["j1"]["rank"] > 1
    assert same(found, found)


def test_padding_counts_nothing_and_shards_equal_one_pass():
    layer = layer_of("smoe")
    hidden = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    gradient = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    mask = torch.rand(2, TOKENS) < 0.7
    context = RoutingContext(padding_mask=mask)
    whole = JacobianTerms(layer)
    whole.update(hidden[mask], gradient[mask])
    masked, shards = JacobianTerms(layer), JacobianTerms(layer)
    masked.update(torch.where(mask[..., None], hidden, torch.nan), gradient, context)
    for row in (0, 1):
        shard = JacobianTerms(layer)
        shard.update(hidden[row : row + 1], gradient[row], RoutingContext(padding_mask=mask[row : row + 1]))
        shards.merge(pickle.loads(pickle.dumps(shard)))
    assert whole.result()["tokens"] == int(mask.sum())
    assert same(whole.result(), masked.result())
    assert same(whole.result(), shards.result())


def test_what_is_not_finite_is_none():
    layer, hidden = layer_of("smoe"), torch.randn(1, TOKENS, DIM)
    diagnostic = JacobianTerms(layer)
    diagnostic.update(hidden, torch.full((TOKENS, DIM), torch.nan))
    none = {"norm_mean": None, "rank": None, "effective_rank": None, "in_span": None}
    assert diagnostic.result()["gradient"] == dict.fromkeys(("j1", "j2", "both"), none)
    with torch.no_grad():
        layer.router.score.weight.fill_(torch.nan)
    assert JacobianTerms(layer).result()["span_rank"] is None


def test_gradients_of_a_models_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = MoE(DIM, HIDDEN, EXPERTS), MoE(DIM, HIDDEN, EXPERTS, router="smoe:balance=9")

        def forward(self, hidden):
            hidden = hidden + self.first(hidden, return_routing=True)[0]
            return hidden + self.second(hidden)

    model = Model()
    hidden = torch.randn(2, 7, DIM)
    found = layer_gradients(model, lambda: model(hidden).square().sum())
    assert set(found) == {"first", "second"}
    seen, gradient, _ = found["second"]
    middle = hidden + model.first(hidden)
    assert torch.allclose(seen, middle, atol=1e-6)
    expected = 2 * (middle + model.second(middle)).reshape(-1, DIM)
    assert torch.allclose(gradient, expected, atol=1e-5)
    frozen = layer_gradients(model.requires_grad_(False), lambda: model(hidden).square().sum())
    assert torch.allclose(frozen["first"].gradient, found["first"].gradient, atol=1e-6)
    assert all(not module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.first.delivery.how == "collect"
    balanced = MoE(DIM, HIDDEN, EXPERTS, router="loss-free")
    layer_gradients(balanced, lambda: balanced(hidden.requires_grad_()).square().sum())
    assert not balanced.router.gathered(), "nobody trained on these tokens"
    with pytest.raises(ValueError, match="layer_gradients: no MoE layer of Linear ran"):
        layer_gradients(nn.Linear(DIM, 1), lambda: hidden.sum().requires_grad_())


def test_dropout_is_off_and_modes_come_back():
    layer = MoE(DIM, HIDDEN, EXPERTS, dropout=0.5).train()
    layer.router.eval()
    hidden, gradient = torch.randn(1, TOKENS, DIM), torch.randn(TOKENS, DIM)
    results = []
    for _ in range(2):
        diagnostic = JacobianTerms(layer)
        diagnostic.update(hidden, gradient)
        results.append(diagnostic.result())
    assert results[0] == results[1]
    assert layer.training
    assert not layer.router.training
    assert JacobianTerms(layer).result()["gradient"]["j1"]["norm_mean"] is None


def test_under_a_mixer_the_gradient_leaves_the_routers_span():
    layer = layer_of("smoe+similarity:tau=0.5")
    diagnostic = JacobianTerms(layer)
    diagnostic.update(torch.randn(1, TOKENS, DIM, dtype=torch.float64), torch.randn(TOKENS, DIM, dtype=torch.float64))
    found = diagnostic.result()["gradient"]["j2"]
    assert found["in_span"] < 1 - 1e-6
    assert found["rank"] > EXPERTS


def test_hidden_states_of_autocast():
    layer = layer_of("smoe").float()
    hidden, gradient = torch.randn(1, TOKENS, DIM), torch.randn(TOKENS, DIM)
    exact, rounded = JacobianTerms(layer), JacobianTerms(layer)
    exact.update(hidden.bfloat16().float(), gradient.bfloat16().float())
    rounded.update(hidden.bfloat16(), gradient.bfloat16())
    assert exact.result() == rounded.result()
