"""Figures of an audit on numbers small enough to compute by hand."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pointsman.hf.counterpart import virtual_experts_of
from pointsman.hf.gates import find_gates
from pointsman.traces import RoutingTrace
from pointsman_lab.checkpoints import audit
from pointsman_lab.checkpoints.audit.analyses import across, typical
from pointsman_lab.checkpoints.audit.blocks import Block, Blocks, _divergence, _shares, row_losses
from pointsman_lab.checkpoints.audit.serving import MACHINES, serving
from pointsman_lab.checkpoints.audit.trials import _greedy, verdict
from pointsman_lab.checkpoints.text import PADDING, SPECIAL, TEXT, TextBatch
from pointsman_lab.intervals import student_quantile
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread

A = torch.tensor([[8.0, 1, 1], [5, 4, 1], [9, 1, 0]], dtype=torch.float64)
B = torch.tensor([[2.0, 6, 2], [1, 9, 0], [3, 3, 4], [2, 2, 6]], dtype=torch.float64)
"""Choices of three experts: two domains, of three and of four blocks."""


def leaving_one_out(function: object, parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The jackknife's bias and variance of a function of the sums of several parts."""
    sums = [part.sum(0) for part in parts]
    whole = np.asarray(function(sums))  # type: ignore[operator]
    bias = variance = np.zeros_like(whole)
    for place, part in enumerate(parts):
        each = [function([*sums[:place], sums[place] - row, *sums[place + 1 :]]) for row in part]  # type: ignore[operator]
        bias = bias + (len(part) - 1) * (np.mean(each, 0) - whole)
        variance = variance + (len(part) - 1) / len(part) * ((np.array(each) - np.mean(each, 0)) ** 2).sum(0)
    return bias, variance


def test_divergence_and_shares_by_a_plain_jackknife() -> None:
    from scipy.spatial.distance import jensenshannon

    def apart(sums: Sequence[np.ndarray]) -> float:
        return float(jensenshannon(*(one / one.sum() for one in sums), base=2) ** 2)

    parts = [A.numpy(), B.numpy()]
    bias, variance = leaving_one_out(apart, parts)
    found = _divergence([A], [B], 2)
    assert found["mean"] == pytest.approx(apart([part.sum(0) for part in parts]) - float(bias))
    assert found["half"] == pytest.approx(student_quantile(1 - 0.05 / 4, 2) * math.sqrt(variance))
    assert found["blocks"] == 3

    def shares(sums: Sequence[np.ndarray]) -> np.ndarray:
        rates = np.stack([one[:3] / one[3] for one in sums])
        return rates / rates.sum(0)

    read = [[6, 14, 10], [20, 10, 40, 10]]  # a block that is left out takes its tokens with it
    share, half = _shares([A, B], read)
    parts = [np.column_stack([part, tokens]) for part, tokens in zip(parts, read, strict=True)]
    np.testing.assert_allclose(share.numpy(), shares([part.sum(0) for part in parts]))
    _, variance = leaving_one_out(shares, parts)
    np.testing.assert_allclose(half.numpy(), student_quantile(1 - 0.05 / 12, 2) * np.sqrt(variance))
    alike = [torch.tensor(tokens, dtype=torch.float64)[:, None] for tokens in read]  # chosen by every token
    assert torch.allclose(_shares(alike, read)[1], torch.zeros(2, 1, dtype=torch.float64))


def test_the_blocks_that_coverage_needs_at_least() -> None:
    blocks = Blocks()
    blocks.all = [Block("a", 10, {}, {"layer": row}) for row in B]
    (one,) = blocks.coverage(["layer"], [7])
    assert (one["reached"], one["at_least"], one["blocks"]) == (3, 3, 3), "the first expert has 3 + 2 + 2"


def test_text_tokens_after_any_token_are_predicted() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    kinds = torch.tensor([[SPECIAL, TEXT, TEXT, SPECIAL, TEXT], [TEXT, SPECIAL, TEXT, PADDING, PADDING]])
    ids = torch.arange(10).view(2, 5) + 3
    rows = row_losses(model, TextBatch(ids, kinds))
    assert rows is not None
    assert [sum(count for _, count in row) for row in rows] == [3, 1]
    with torch.no_grad():
        logs = model(input_ids=ids[:1]).logits[0].float().log_softmax(-1)
    assert sum(nats for nats, _ in rows[0]) == pytest.approx(
        -sum(float(logs[at, ids[0, at + 1]]) for at in (0, 1, 3)), rel=1e-5
    )


def test_a_rise_is_within_the_margin_with_its_whole_interval() -> None:
    found = [verdict({"mean": mean, "half": half}, 10.0, 0.01)["within"] for mean, half in (
        (0.05, 0.04), (0.05, 0.06), (0.2, 0.15), (0.2, 0.05), (0.05, None),
    )]  # fmt: skip
    assert found == [True, None, None, False, None]
    assert verdict({"mean": 0.5, "half": 0.2}, 10.0, 0.01)["share_half"] == pytest.approx(0.02)


def test_the_cheapest_step_is_that_of_the_least_rise_a_saved_expert() -> None:
    rises = {(4, 2): 1.0, (2, 2): 1.3, (1, 2): 9.0, (4, 1): 1.2}

    def loss(ks: Sequence[int]) -> float:
        return rises[tuple(ks)]

    assert _greedy((4, 2), [1, 2, 4], loss, math.inf, 2.5) == (2, 2), "0.3 for two experts, not 0.2 for one"
    assert _greedy((4, 2), [1, 2, 4], loss, 1.25, 0.0) == (4, 1), "the other step is not allowed"


def test_what_a_layer_says_of_the_next_one() -> None:
    one, two = torch.tensor([0] * 60 + [1] * 40), torch.tensor([0] * 50 + [1] * 50)
    trace = RoutingTrace(
        {"a": one[:, None].to(torch.int16), "b": two[:, None].to(torch.int16)}, {"a": 2, "b": 2}, torch.tensor([100])
    )
    (found,) = across(trace)
    joint, p, q = np.array([[50, 10], [0, 40]]) / 100, [0.6, 0.4], [0.5, 0.5]
    mutual = sum(joint[i, j] * math.log2(joint[i, j] / (p[i] * q[j])) for i, j in ((0, 0), (0, 1), (1, 1)))
    assert found["bits"] == pytest.approx(mutual - 1 / (2 * 100 * math.log(2)))  # Miller and Madow's bias
    assert [(pair["experts"], pair["tokens"]) for pair in found["pairs"]] == [([1, 1], 40), ([0, 0], 50), ([0, 1], 10)]
    assert [pair["lift"] for pair in found["pairs"]] == pytest.approx([2.0, 5 / 3, 1 / 3])


def test_tokens_of_an_expert_are_sorted_by_how_much_more_it_takes() -> None:
    top = [[(7, 99, 0.6)], [(3, 20, 0.4), (4, 30, 0.9), (5, 9, 1.0)]]  # token, count, share
    layers = {"a": {"load": {"share": [0.5, 0.1]}, "specialisation": {"top": top}}}
    found = typical(layers, SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))
    assert [[(one["text"], one["lift"]) for one in of["tokens"]] for of in found] == [
        [("<7>", pytest.approx(1.2))], [("<4>", pytest.approx(9.0)), ("<3>", pytest.approx(4.0))],
    ]  # fmt: skip


def test_virtual_experts_cost_nothing_to_serve() -> None:
    model = zoo.tiny_model("longcat_flash")
    gates = find_gates(model)
    share = [0.1] * gates[0].num_experts  # of the choices; the rest is for the last, virtual ones
    virtual = virtual_experts_of(gates[0])
    real = gates[0].num_experts - virtual
    share[real:] = [(1 - 0.1 * real) / virtual] * virtual
    found = serving(model, gates, {2: {gate.layer: (2, share) for gate in gates}})
    always = found["parameters"] - found["experts"] - model.get_input_embeddings().weight.numel()
    one = gates[0].experts.gate_up_proj[0].numel() + gates[0].experts.down_proj[0].numel()
    for row in found["rows"]:
        needed = real * (1 - 0.8 ** row["batch"])
        assert row["distinct"] == pytest.approx(needed)
        assert row["flops"] == pytest.approx(2 * (always + len(gates) * one * 0.2 * real))
        assert row["bytes"] == pytest.approx(2 * (always + len(gates) * one * needed) / row["batch"])


def test_no_cost_to_serve_where_experts_are_no_module() -> None:
    found = audit(zoo.tiny_model("jetmoe"), zoo.tokenizer(), zoo.texts(8), top_k=[1, 2], length=12)
    assert found.analyses["serving"] == {}  # its attention has experts, too, whose loads nobody measures
    assert all(one["serving"] == [] for one in found.analyses["schedules"])
    assert "cost to serve left out: JetMoeMoE has its experts as weights of its own" in found.notes


@pytest.mark.parametrize("tied", [False, True])
def test_the_cost_to_serve_by_hand(tied: bool) -> None:
    model = zoo.tiny_model("mixtral", tie_word_embeddings=tied)
    gates = find_gates(model)
    loads = {2: {gate.layer: (2, [1 / gate.num_experts] * gate.num_experts) for gate in gates}}
    found = serving(model, gates, loads)
    total = sum(one.numel() for one in model.parameters())
    experts = sum(one.numel() for gate in gates for one in gate.experts.parameters())
    assert (found["parameters"], found["experts"]) == (total, experts)
    always = total - experts - (0 if tied else model.get_input_embeddings().weight.numel())
    count = gates[0].num_experts
    for row in found["rows"]:
        needed = count * (1 - (1 - 2 / count) ** row["batch"])
        assert row["distinct"] == pytest.approx(needed)
        assert row["flops"] == pytest.approx(2 * (always + experts * 2 / count))
        assert row["bytes"] == pytest.approx(2 * (always + experts * needed / count) / row["batch"])
        for name, (width, peak) in MACHINES.items():
            assert row["seconds"][name] == pytest.approx(max(row["bytes"] / width, row["flops"] / peak))
