import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pointsman import MoE, set_top_k
from pointsman.diagnostics import Diagnostics, Fluctuation, JacobianTerms, layer_gradients
from pointsman_lab.evaluation.diagnose import Batch, diagnose
from tests.library.diagnostics.helpers import same

VOCABULARY = 50


class Model(nn.Module):
    def __init__(self, seed=0, experts=4, router="smoe"):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.first = MoE(8, 16, experts, router=router, dropout=0.5)
        self.second = MoE(8, 16, experts, router=router, dropout=0.5)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden = hidden + self.first(hidden)
        return (hidden + self.second(hidden)) @ self.embedding.weight.T


def loss_reader():
    def read(model, batch):
        return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.reshape(-1), reduction="sum")

    return read


@pytest.fixture
def batches():
    torch.manual_seed(1)
    tokens = [torch.randint(0, VOCABULARY, (3, 11)) for _ in range(4)]
    return [Batch(t[:, :-1], t[:, 1:]) for t in tokens]


def test_one_model(batches):
    model = Model().train()
    found = diagnose(model, batches, top_k=(1, 4), reader=loss_reader)
    json.dumps(found, allow_nan=False)
    assert (found["batches"], set(found["layers"])) == (4, {"first", "second"})
    layer = found["layers"]["second"]
    assert (layer["router"], layer["num_experts"], layer["top_k"]) == ("smoe", 4, 2)
    expected = Diagnostics()
    model.eval()
    for batch in batches:
        with torch.no_grad(), expected.observe(model, batch.inputs):
            model(batch.inputs)
    for name, of in expected.result().items():
        assert all(same(found["layers"][name][kind], result) for kind, result in of.items())
    assert layer["load"]["tokens"] == 120
    assert [row["top_k"] for row in layer["agreement"]] == [1, 4]
    assert found["layers"]["first"]["agreement"][0]["overlap"] == 1  # the same inputs: the first expert stays
    assert layer["jacobian"]["tokens"] == 30
    terms = JacobianTerms(model.second)
    seen = layer_gradients(model, lambda: loss_reader()(model, batches[0]))["second"]
    terms.update(seen.hidden, seen.gradient, seen.context)
    assert same(layer["jacobian"], terms.result())
    assert found["against"] == {}
    assert found["history"] == []


def test_the_model_is_left_as_it_was(batches):
    model = Model().train()
    model.second.eval()
    state = torch.get_rng_state()
    diagnose(model, batches, top_k=(1,), reader=loss_reader)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.first.training
    assert not model.second.training
    assert model.first.top_k == 2
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_a_loss_there_is_no_jacobian(batches):
    found = diagnose(Model(), [batch.inputs for batch in batches])
    assert "jacobian" not in found["layers"]["first"]
    assert found["layers"]["first"]["load"]["tokens"] == 120


def test_against_others(batches):
    model, twin, other = Model().eval(), Model().eval(), Model(seed=5).eval()
    found = diagnose(model, batches, against={"twin": twin, "other": other})
    twins = found["against"]["twin"]["first"]
    assert (twins["fluctuation"]["top1"], twins["entropy_ratio"]) == (0, 1)
    expected = Fluctuation()
    entropies = []
    for batch in batches:
        with torch.no_grad():
            one, two = (m.first.router(m.embedding(batch.inputs)) for m in (other, model))
        expected.update(one, two)
        entropies.append([torch.special.entr(r.probs.double()).sum(-1).mean() for r in (two, one)])
    assert same(found["against"]["other"]["first"]["fluctuation"], expected.result())
    ours, theirs = torch.tensor(entropies).mean(0).tolist()
    assert found["against"]["other"]["first"]["entropy_ratio"] == pytest.approx(ours / theirs, rel=1e-6)
    consistency = found["consistency"]["first"]
    assert consistency["runs"] == 3
    assert consistency["matrix"][0][1] == pytest.approx(1)
    assert consistency["without_diagonal"] < 1


def test_entropies_are_compared_after_mixing(batches):
    model, other = (Model(seed, router="smoe+similarity").eval() for seed in (0, 5))
    found = diagnose(model, batches, against={"other": other})
    own, its = found["layers"]["first"]["entropy"], found["against"]["other"]["first"]
    assert own["mixed_mean"] != own["mean"]
    assert its["entropy_ratio"] == pytest.approx(own["mixed_mean"] / its["entropy"]["mixed_mean"])


def test_along_a_run(batches):
    first, second, last = Model(seed=1).eval(), Model(seed=2).eval(), Model(seed=3).eval()
    found = diagnose(last, batches, history={"step-1": first, "step-2": second})
    assert [row["checkpoint"] for row in found["history"]] == ["step-1", "step-2"]
    for row, pair in zip(found["history"], ((first, second), (second, last)), strict=True):
        expected = Fluctuation()
        for batch in batches:
            with torch.no_grad():
                expected.update(*(m.first.router(m.embedding(batch.inputs)) for m in pair))
        assert same(row["layers"]["first"]["fluctuation"], expected.result())
        assert row["layers"]["first"]["collapse"]["value"] is not None
    assert found["consistency"] == {}


def test_masked_tokens_count_nothing(batches):
    model = Model().eval()
    mask = torch.rand(3, 10) < 0.6
    kept = [Batch(b.inputs[mask][None], b.targets[mask][None]) for b in batches]
    masked = [Batch(torch.where(mask, b.inputs, 0), torch.where(mask, b.targets, -100), mask) for b in batches]
    one = diagnose(model, kept, top_k=(1,), reader=loss_reader, against={"other": Model(seed=7)})
    two = diagnose(model, masked, top_k=(1,), reader=loss_reader, against={"other": Model(seed=7)})
    assert same(one, two, 1e-4)


def test_random_routers_draw_the_same_each_time(batches):
    model = Model(router="thor")
    assert diagnose(model, batches, reader=loss_reader) == diagnose(model, batches, reader=loss_reader)


def test_models_that_do_not_compare_are_refused(batches):
    with pytest.raises(ValueError, match="no MoE layer"):
        diagnose(nn.Linear(2, 2), batches)
    with pytest.raises(ValueError, match="eight has the layers"):
        diagnose(Model(), batches, against={"eight": Model(experts=8)})


def test_other_k_is_only_borrowed(batches):
    model = Model().eval()
    with set_top_k(model, 3):
        found = diagnose(model, batches[:1], top_k=(1,))
    assert found["layers"]["first"]["top_k"] == 3
    assert model.first.top_k == 2
