import json
import logging
import math

import pytest
import torch
from torch import nn

from pointsman import MoE, RoutingContext
from pointsman.diagnostics import RoutingMonitor, scalars


class TwoLayers(nn.Module):
    def __init__(self, router: str = "smoe", num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.first = MoE(8, 16, num_experts, top_k=top_k, router=router)
        self.second = MoE(8, 16, num_experts, top_k=top_k, router=router)

    def forward(self, hidden, context=None):
        return self.second(self.first(hidden, context), context)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return TwoLayers()


def test_rows_come_at_every_nth_step_and_count_every_batch(model):
    monitor = RoutingMonitor(model, every=3)
    written, shares = [], torch.zeros(4, dtype=torch.float64)
    for step in range(1, 8):
        hidden = torch.randn(2, 5, 8)
        with monitor.observe(step):
            model(hidden)
        if step <= 3:
            chosen = model.first.router(hidden).experts
            shares += torch.bincount(chosen.reshape(-1), minlength=4).double()
        if step == 3:
            routing = model.first.router(hidden)
        written += monitor.rows()
        assert monitor.rows() == []
    assert [(row["step"], row["layer"]) for row in written] == [
        (3, "first"),
        (3, "second"),
        (6, "first"),
        (6, "second"),
    ]
    row = written[0]
    assert row["kind"] == "routing"
    assert row["batches"] == 3
    assert row["tokens"] == 30
    assert row["load"] == pytest.approx((shares / shares.sum()).tolist())
    p = routing.probs.detach().double()
    assert row["entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), abs=1e-6)
    ordered = p.sort(-1, descending=True).values
    assert row["margin"] == pytest.approx(float((ordered[:, 1] - ordered[:, 2]).mean()), abs=1e-6)
    json.dumps(written, allow_nan=False)


def test_padding_is_not_counted(model):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    hidden = torch.randn(2, 3, 8)
    garbage = hidden.clone()
    garbage[~mask] = 1e6
    found = []
    for batch in (hidden, garbage):
        monitor = RoutingMonitor(model, every=1)
        with monitor.observe(1):
            model(batch, RoutingContext(padding_mask=mask))
        found.append(monitor.rows()[0])
    assert found[0] == found[1]
    assert found[0]["tokens"] == 3


def test_padding_alone_has_no_figures(model):
    monitor = RoutingMonitor(model, every=1)
    with monitor.observe(1):
        model(torch.randn(2, 3, 8), RoutingContext(padding_mask=torch.zeros(2, 3, dtype=torch.bool)))
    row = monitor.rows()[0]  # the other ranks wait for it
    assert (row["tokens"], row["entropy"], row["experts_per_token"]) == (0, None, None)
    with monitor.observe(2), pytest.raises(ValueError, match="no router ran in 1 observed steps"):
        monitor.rows()


def test_no_margin_where_every_expert_is_chosen():
    monitor = RoutingMonitor(model := TwoLayers(top_k=4), every=1)
    with monitor.observe(1):
        model(torch.randn(1, 6, 8))
    row = monitor.rows()[0]
    assert row["margin"] is None


def test_warnings_name_layer_and_expert_and_grow_rare(model, caplog):
    with torch.no_grad():
        model.second.router.score.bias.copy_(torch.tensor([100.0, 90.0, 0.0, -10.0]))
    monitor = RoutingMonitor(model, every=1)
    rows = []
    with caplog.at_level(logging.WARNING, logger="pointsman.routing"):
        for step in range(1, 33):
            with monitor.observe(step):
                model(torch.randn(4, 16, 8))
            rows += [row for row in monitor.rows() if row["kind"] == "warning"]
    second = [row for row in rows if row["layer"] == "second"]
    dead = [row for row in second if "got no token" in row["message"]]
    assert dead[0]["experts"] == [2, 3]
    assert [row["step"] for row in dead] == [1, 2, 4, 8, 16, 32]
    assert any("collapsed" in row["message"] and row["experts"] == [0, 1] for row in second)
    assert not [row for row in rows if row["layer"] == "first"]
    assert "layer second: experts 2, 3 of 4 got no token" in caplog.text


def test_few_tokens_are_no_reason_to_warn(model, caplog):
    with torch.no_grad():
        model.second.router.score.bias.copy_(torch.tensor([100.0, 90.0, 0.0, -10.0]))
    monitor = RoutingMonitor(model, every=1)
    with monitor.observe(1):
        model(torch.randn(1, 4, 8))
    assert all(row["kind"] == "routing" for row in monitor.rows())
    assert not caplog.text


def test_a_resumed_monitor_writes_the_same_row(model):
    batches = [torch.randn(1, 7, 8) for _ in range(4)]
    rows = []
    for resumed in (False, True):
        monitor = RoutingMonitor(model, every=4)
        for step, batch in enumerate(batches, 1):
            with monitor.observe(step):
                model(batch)
            if resumed and step == 2:
                state = monitor.state_dict()
                monitor = RoutingMonitor(model, every=4)
                monitor.load_state_dict(state)
        rows.append(monitor.rows())
    assert rows[0] == rows[1]


def test_a_resumed_monitor_warns_when_the_unbroken_one_does(model):
    with torch.no_grad():
        model.second.router.score.bias.copy_(torch.tensor([100.0, 90.0, 0.0, -10.0]))
    found = []
    for resumed in (False, True):
        monitor, rows = RoutingMonitor(model, every=1), []
        for step in range(1, 9):
            with monitor.observe(step):
                model(torch.randn(4, 16, 8))
            rows += [(row["step"], row["message"][:4]) for row in monitor.rows() if row["kind"] == "warning"]
            if resumed and step in (2, 5):
                state = monitor.state_dict()
                monitor = RoutingMonitor(model, every=1)
                monitor.load_state_dict(state)
        found.append(rows)
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [1, 1, 2, 2, 4, 4, 8, 8]
    counts = {name: one for name, one in state.items() if not name.endswith(("dead", "collapse"))}
    RoutingMonitor(model).load_state_dict(counts)  # of an earlier version


@pytest.mark.parametrize("kind", ["zero", "copy", "constant"])
def test_virtual_experts_are_no_part_of_the_load(kind):
    layer = MoE(8, 16, 4, router=f"loss-free:nulls=2:kind={kind}").eval()
    hidden = torch.randn(2, 8, 8)
    monitor = RoutingMonitor(layer, every=1)
    with monitor.observe(1):
        layer(hidden)
    best = layer.router(hidden).logits.topk(2).indices
    counts = torch.bincount(best.reshape(-1), minlength=6)[:4].double()
    assert int((best >= 4).sum()) > 0
    row = monitor.rows()[0]
    assert row["raw_load"] == pytest.approx((counts / counts.sum()).tolist())
    assert len(row["load"]) == 4


def test_hooks_are_gone_afterwards(model):
    monitor = RoutingMonitor(model, every=1)
    with monitor.observe(1):
        model(torch.randn(1, 4, 8))
    assert all(not module._forward_hooks for module in model.modules())


def test_scalars_are_bounded():
    row = {"kind": "routing", "step": 1, "entropy": 1.0, "load": [0.5, 0.5], "margin": None, "dead": 0}
    few = scalars([{**row, "layer": f"layer.{i}"} for i in range(3)])
    assert len(few) == 3 * 4
    assert (few["routing/layer.0/cv"], few["routing/layer.0/largest"]) == (0.0, 0.5)
    many = scalars([{**row, "layer": f"layer.{i}", "entropy": float(i)} for i in range(100)])
    assert len(many) == 3 * 4
    assert (many["routing/least/entropy"], many["routing/greatest/entropy"]) == (0.0, 99.0)
    assert math.isclose(many["routing/mean/entropy"], 49.5)
    assert scalars([{**row, "layer": ""}])["routing/entropy"] == 1.0  # a bare layer


def test_a_variable_number_of_experts_is_counted_and_a_collapse_is_judged_by_its_mean():
    """Every token of `top-p` gets one expert, always the same: a collapse, though k, the cap, is E."""
    model = nn.Sequential(MoE(8, 16, 8, router="top-p"))
    mask = torch.ones(4, 64, dtype=torch.bool)
    mask[:, 60:] = False
    hidden, context = torch.randn(4, 64, 8).abs(), RoutingContext(padding_mask=mask)
    monitor = RoutingMonitor(model, every=1)
    with monitor.observe(1):
        model[0](hidden, context)
    row = monitor.rows()[0]
    chosen = model[0].router(hidden, context).experts
    assert row["tokens"] == 240
    assert row["experts_per_token"] == pytest.approx(float((chosen >= 0).sum()) / 240)
    with torch.no_grad():
        model[0].router.score.weight.zero_()[3] = 100.0
    with monitor.observe(2):
        model[0](hidden, context)
    found = [row for row in monitor.rows() if "collapsed" in row.get("message", "")]
    assert [row["experts"] for row in found] == [[3]]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_must_be_a_whole_number(model, every):
    with pytest.raises(ValueError, match="every="):
        RoutingMonitor(model, every=every)


@pytest.mark.parametrize(("k", "collapsed"), [(1, True), (4, True), (5, False), (7, False)])
def test_collapse_is_judged_by_k(k, collapsed, caplog):
    """All tokens agree on their k experts: a collapse while most experts are idle, no surprise at k = 7 of 8."""
    torch.manual_seed(0)
    model = TwoLayers("smoe:renormalize=false", num_experts=8, top_k=k)
    with torch.no_grad():
        model.second.router.score.bias.copy_(100.0 - torch.arange(8.0) * 10)
    monitor = RoutingMonitor(model, every=1, seed=3)
    with caplog.at_level(logging.WARNING, logger="pointsman.routing"), monitor.observe(1):
        model(torch.randn(4, 64, 8))
        rows = monitor.rows()
    found = [row for row in rows if row["kind"] == "warning" and "collapsed" in row["message"]]
    assert bool([row for row in found if row["layer"] == "second"]) == collapsed
    assert (
        "router smoe:renormalize=false, seed 3, step 1, layer second: routing has collapsed" in caplog.text
    ) == collapsed
