import numpy as np
import pytest
import torch

from pointsman.diagnostics import RepresentationCollapse
from pointsman.routing import Routing
from tests.library.diagnostics.helpers import part, random_routing, same


def reference(hidden, classes):
    """Tr(S_W pinv(S_B)) straight from the definition, and C."""
    hidden, classes = hidden.double().numpy(), classes.numpy()
    kept = [c for c in np.unique(classes) if (classes == c).sum() >= 2]
    rows = np.isin(classes, kept)
    centre = hidden[rows].mean(0)
    within = np.zeros((hidden.shape[1],) * 2)
    between = np.zeros_like(within)
    for c in kept:
        mine = hidden[classes == c]
        mean = mine.mean(0)
        within += (mine - mean).T @ (mine - mean)
        between += np.outer(mean - centre, mean - centre)
    within, between = within / rows.sum(), between / len(kept)
    return np.trace(within @ np.linalg.pinv(between, hermitian=True)), len(kept)


def of_classes(classes, num_experts):
    tokens = len(classes)
    return Routing(
        classes[:, None], torch.ones(tokens, 1), torch.rand(tokens, num_experts), torch.rand(tokens, num_experts)
    )


@pytest.mark.parametrize(("dim", "experts"), [(6, 4), (3, 8), (16, 2)])
def test_against_the_definition(dim, experts):
    routing = random_routing(200, experts, 2 if experts > 2 else 1)
    hidden = torch.randn(200, dim) + 3
    diagnostic = RepresentationCollapse()
    diagnostic.update(routing, hidden=hidden)
    found = diagnostic.result()
    value, classes = reference(hidden, routing.experts[:, 0])
    assert found["classes"] == classes
    assert found["value"] == pytest.approx(value, rel=1e-9)
    assert found["per_class"] == pytest.approx(value / classes, rel=1e-9)
    assert found["rank"] == min(dim, classes - 1)


def test_closed_form_of_two_balanced_classes():
    # means +-a e_1, deviations +-s along e_1 and +-r along e_2: S_B = a^2 e1 e1', S_W = s^2 e1 e1' + r^2 e2 e2'
    a, s, r = 2.0, 0.5, 7.0
    deviations = torch.tensor([[s, 0], [-s, 0], [0, r], [0, -r]], dtype=torch.float64)
    shift = torch.tensor([[a, 0.0]], dtype=torch.float64)
    hidden = torch.cat([deviations + shift, deviations - shift])
    diagnostic = RepresentationCollapse()
    diagnostic.update(of_classes(torch.tensor([0] * 4 + [1] * 4), 3), hidden=hidden)
    found = diagnostic.result()
    assert found["value"] == pytest.approx((s**2 / 2) / a**2)  # half of a class's tokens deviate along e_1
    assert found["between"] == pytest.approx(a**2)
    assert found["within"] == pytest.approx((s**2 + r**2) / 2)
    assert found["class_tokens"] == [4, 4, 0]


def test_collapsed_classes_have_value_zero():
    classes = torch.tensor([0, 1, 2] * 5)
    diagnostic = RepresentationCollapse()
    diagnostic.update(of_classes(classes, 3), hidden=torch.randn(3, 4)[classes])
    assert diagnostic.result()["value"] == pytest.approx(0, abs=1e-12)


def test_experts_with_one_token_are_left_out():
    classes = torch.tensor([0, 0, 0, 1, 1, 2])
    hidden = torch.randn(6, 3)
    hidden[5] = 1e4
    diagnostic = RepresentationCollapse()
    diagnostic.update(of_classes(classes, 3), hidden=hidden)
    found = diagnostic.result()
    assert found["value"] == pytest.approx(reference(hidden[:5], classes[:5])[0], rel=1e-6)
    assert (found["classes"], found["tokens"]) == (2, 5)


def test_a_far_off_mean_costs_no_digits():
    routing = random_routing(100, 4, 1)
    hidden = torch.randn(100, 5, dtype=torch.float64)
    near, far = RepresentationCollapse(), RepresentationCollapse()
    near.update(routing, hidden=hidden)
    for rows in (slice(0, 30), slice(30, 100)):
        far.update(part(routing, rows), hidden=hidden[rows] + 1e6)
    assert far.result()["value"] == pytest.approx(near.result()["value"], rel=1e-7)


def test_one_class_has_no_value():
    diagnostic = RepresentationCollapse()
    diagnostic.update(of_classes(torch.zeros(5, dtype=torch.int64), 2), hidden=torch.randn(5, 3))
    found = diagnostic.result()
    assert found["value"] is None
    assert found["classes"] == 1
    same_place = RepresentationCollapse()
    same_place.update(of_classes(torch.tensor([0, 0, 1, 1]), 2), hidden=torch.ones(4, 3))
    assert same_place.result()["value"] is None


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_hidden_states_that_are_not_finite_have_no_value(spoiled):
    diagnostic, hidden = RepresentationCollapse(), torch.randn(4, 3)
    hidden[0, 0] = spoiled
    diagnostic.update(of_classes(torch.tensor([0, 0, 1, 1]), 2), hidden=hidden)
    found = diagnostic.result()
    assert (found["classes"], found["value"], found["within"]) == (2, None, None)


def test_padding_counts_nothing_and_shards_equal_one_pass():
    routing = random_routing(80, 5, 2)
    hidden = torch.randn(80, 6)
    mask = torch.rand(80) < 0.7
    spoiled = torch.where(mask[:, None], hidden, torch.nan)
    whole, masked, shards = RepresentationCollapse(), RepresentationCollapse(), RepresentationCollapse()
    whole.update(part(routing, mask), hidden=hidden[mask])
    masked.update(routing, mask, hidden=spoiled)
    for rows in (slice(0, 1), slice(1, 30), slice(30, 80)):
        shard = RepresentationCollapse()
        shard.update(part(routing, rows), mask[rows], hidden=spoiled[rows])
        shards.merge(shard)
    assert whole.result()["value"] is not None
    assert same(whole.result(), masked.result())
    assert same(whole.result(), shards.merge(RepresentationCollapse()).result(), 1e-8)


def test_hidden_states_are_asked_for():
    with pytest.raises(ValueError, match="needs hidden"):
        RepresentationCollapse().update(random_routing(4, 4, 2))
