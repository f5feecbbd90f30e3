"""The parts of an audit against plain computations, and faults that are planted."""

import itertools
import math
import statistics
import sys
from dataclasses import replace

import pytest
import torch

import pointsman
from pointsman.hf.gates import find_gates
from pointsman.traces import RoutingTrace
from pointsman_lab.checkpoints import audit
from pointsman_lab.checkpoints.audit import measure, run
from pointsman_lab.checkpoints.audit.blocks import Block, Blocks
from pointsman_lab.checkpoints.audit.serving import distinct
from pointsman_lab.checkpoints.audit.trials import halves, mean_of, measured, schedules, super_experts
from pointsman_lab.checkpoints.text import text_batches
from pointsman_lab.intervals import half_width, ratio, smallest_within, student_quantile
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread
from tests.library.hf.zoo import WORDS, texts, tokenizer


def test_a_ratio_over_equal_blocks_is_a_mean_with_students_interval() -> None:
    tops = [3.0, 5.0, 4.0, 8.0]
    found = ratio(tops, [2.0] * 4)
    error = statistics.stdev(top / 2 for top in tops) / 2
    assert found["mean"] == 2.5
    assert found["error"] == pytest.approx(error)
    assert found["half"] == pytest.approx(student_quantile(0.975, 3) * error)
    assert ratio([1.0, 2.0], [1.0, 1.0])["half"] is None
    assert ratio([1.0, 2.0, 3.0], [1.0] * 3)["half"] == pytest.approx(4.302653 / math.sqrt(3))
    assert ratio([], [])["mean"] is None


def test_of_prunings_as_small_the_one_with_the_least_loss_is_shown() -> None:
    shares = {(3, True): 0.002, (4, True): -0.01, (2, None): 0.0, (1, False): 0.5}
    tried = [{"kept": kept, "within": within, "share": share} for (kept, within), share in shares.items()]
    assert smallest_within([*tried, {**tried[0], "share": 0.001}]) == {"kept": 3, "within": True, "share": 0.001}
    assert smallest_within(tried[2:]) is None


def made(loads: dict[str, torch.Tensor], count: int, seed: int = 0) -> Blocks:
    """Blocks whose 40 choices are drawn from each domain's load."""
    generator, found = torch.Generator().manual_seed(seed), Blocks()
    for domain, load in loads.items():
        for _ in range(count):
            drawn = torch.multinomial(load, 40, replacement=True, generator=generator)
            found.all.append(Block(domain, 40, {}, {"layer": torch.bincount(drawn, minlength=len(load))}))
    return found


def test_the_divergence_of_equal_loads_is_within_its_interval_and_has_no_bias() -> None:
    load = torch.tensor([4.0, 2.0, 1.0, 1.0, 0.5, 0.5])
    found = [made({"a": load, "b": load}, 12, seed).divergences(["layer"])[0] for seed in range(60)]
    assert sum(one["mean"] > one["half"] for one in found) <= 6
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    exact = 0.5  # bits
    apart = [made({"a": p, "b": q}, 12, seed).divergences(["layer"])[0] for seed in range(60)]
    assert statistics.fmean(one["mean"] for one in apart) == pytest.approx(exact, abs=0.01)
    assert sum(abs(one["mean"] - exact) <= one["half"] for one in apart) >= 52


def test_experts_of_one_domain_are_named() -> None:
    found = made({"a": torch.tensor([4.0, 4, 0.1]), "b": torch.tensor([4.0, 0.1, 4])}, 10).specialists(["layer"])
    assert [(one["expert"], one["domain"]) for one in found] == [(1, "a"), (2, "b")]
    same = torch.tensor([1.0, 1.0, 1.0])
    assert made({"a": same, "b": same}, 10).specialists(["layer"]) == []


def test_coverage_against_every_subset() -> None:
    blocks = made({"a": torch.tensor([8.0, 4, 2, 1, 0.3])}, 9)
    counts = blocks.counts("layer")
    parts = [list(part) for size in range(1, 10) for part in itertools.combinations(range(9), size)]
    for one in blocks.coverage(["layer"], [1, 4, 12]):
        reached = counts[:, counts.sum(0) >= one["times"]]
        assert one["reached"] == reached.shape[1]
        best = min(len(part) for part in parts if bool((reached[part].sum(0) >= one["times"]).all()))
        assert one["at_least"] <= best <= one["blocks"]
        assert one["blocks"] <= best + 1
        assert one["tokens"] == 40 * one["blocks"]


def test_tokens_to_an_answer_against_a_loop_without_a_cache() -> None:
    model, tokens = spread(zoo.tiny_model("mixtral")), tokenizer()

    def generated(prompt: str, k: int, most: int) -> list[int]:
        ids = list(tokens(prompt)["input_ids"])
        with torch.no_grad(), pointsman.set_top_k(model, k):
            for _ in range(most):
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                if ids[-1] == tokens.eos_token_id:
                    break
        return ids[len(tokens(prompt)["input_ids"]) :]

    prompts = texts(6)
    task = [(prompt, tokens.decode(generated(prompt, 2, 12)[3 : 4 + place])) for place, prompt in enumerate(prompts)]
    found = audit(model, tokens, texts(6), top_k=[1, 2], length=16, probe_tokens=0, task=task, answer_tokens=9)
    for row, k in zip(found.analyses["answers"], (1, 2), strict=True):
        spent, reached = [], []
        for prompt, answer in task:
            ids = generated(prompt, k, 9)
            ends = [
                end for end in range(1, len(ids) + 1) if answer in tokens.decode(ids[:end], skip_special_tokens=True)
            ]
            spent.append(ends[0] if ends else len(ids))
            reached.append(bool(ends))
        assert row["tokens"]["mean"] == pytest.approx(statistics.fmean(spent))
        assert row["reached"]["mean"] == pytest.approx(statistics.fmean(reached))
        assert (row["times"] is None) == (k == 2)
    assert found.analyses["answers"][1]["reached"]["mean"] > 0.5
    assert "| tokens a prompt |" in found.markdown()


def test_joined_blocks_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    whole = audit(model, tokenizer(), texts(12), top_k=[1, 2], length=8, batch_size=4, probe_tokens=0)
    monkeypatch.setattr(sys.modules[Blocks.__module__], "MOST", 8)
    joined = audit(model, tokenizer(), texts(12), top_k=[1, 2], length=8, batch_size=4, probe_tokens=0)
    for one, two in zip(whole.quality, joined.quality, strict=True):
        assert one["loss"] == pytest.approx(two["loss"])
        assert two["blocks"] < one["blocks"]
    assert [one["reached"] for one in whole.analyses["coverage"]] == [
        one["reached"] for one in joined.analyses["coverage"]
    ]


def test_distinct_experts_against_draws() -> None:
    share, generator = [0.5, 0.3, 0.15, 0.05], torch.Generator().manual_seed(0)
    drawn = torch.multinomial(torch.tensor(share), 4000 * 5, replacement=True, generator=generator).view(4000, 5)
    mean = statistics.fmean(len(set(row)) for row in drawn.tolist())
    assert distinct(share, 1, 5) == pytest.approx(mean, abs=0.05)
    assert distinct([0.25] * 4, 2, 1) == pytest.approx(2)


def two_domains() -> dict[str, list[str]]:
    generator = torch.Generator().manual_seed(2)
    draw = [torch.randint(0, 30, (10, 24), generator=generator) + 30 * half for half in (0, 1)]
    return {name: [" ".join(WORDS[i] for i in row) for row in of.tolist()] for name, of in zip("ab", draw, strict=True)}


def test_by_domain_and_the_kept_routing() -> None:
    model = spread(zoo.tiny_model("olmoe"))
    found = audit(model, tokenizer(), two_domains(), top_k=[1, 2], length=24, max_tokens=400, probe_tokens=0)
    assert found.analyses["domains"] == {"a": 200, "b": 200}  # each half of the budget
    alone = audit(model, tokenizer(), two_domains()["b"], top_k=[2], length=24, max_tokens=200, probe_tokens=0)
    layer = "model.layers.0.mlp"
    assert found.layers[layer]["domains"]["b"]["share"] == pytest.approx(alone.layers[layer]["load"]["share"])
    own = next(row for row in found.quality if row["top_k"] == 2)
    assert own["domains"]["b"]["mean"] == pytest.approx(alone.quality[0]["loss"])
    assert own["difference"] is None
    assert found.analyses["divergence"][0]["mean"] > found.analyses["divergence"][0]["half"]
    assert math.isclose(found.analyses["serving"]["parameters"], sum(p.numel() for p in model.parameters()))
    assert found.analyses["super_experts"] == found.analyses["schedules"] == []


def test_intervals_of_one_domain_are_corrected_for_the_number_of_k() -> None:
    model = spread(zoo.tiny_model("olmoe"))
    found = audit(model, tokenizer(), two_domains(), top_k=[1, 2, 4, 8], length=24, probe_tokens=0)
    for row in (row for row in found.quality if row["top_k"] != 2):
        for one in (row["difference"], row["domains"]["a"]["difference"]):
            assert one["half"] == pytest.approx(half_width(one["error"], one["blocks"], 3))


def test_the_routing_that_is_kept_has_as_much_of_every_domain_in_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "KEPT", 192)
    traces = list[RoutingTrace]()
    monkeypatch.setattr(measure, "analysed", lambda *given: traces.append(given[2]) or {})
    model = spread(zoo.tiny_model("olmoe"))
    audit(model, tokenizer(), two_domains(), top_k=[2], length=24, batch_size=2, probe_tokens=0)
    alone = {name: [record(model, text) for text in of[:4]] for name, of in two_domains().items()}
    (trace,) = traces
    assert trace.lengths.tolist() == [24] * 8
    for layer, experts in trace.experts.items():
        in_turn = [one[layer] for pair in zip(alone["a"], alone["b"], strict=True) for one in pair]
        assert torch.equal(experts.long(), torch.cat(in_turn))


def record(model: torch.nn.Module, text: str) -> dict[str, torch.Tensor]:
    with torch.no_grad(), pointsman.record_routing(model) as found:
        model(input_ids=tokenizer()(text, return_tensors="pt")["input_ids"])
    return {layer: routing.experts for layer, routing in found.items()}


def test_a_planted_super_expert_is_found(five: str) -> None:
    model = spread(zoo.tiny_model(five))
    gates = find_gates(model)
    with torch.no_grad():
        gates[1].experts.down_proj[6].mul_(2000)
    batches = list(text_batches(tokenizer(), texts(16), length=16, batch_size=8, max_tokens=None))
    search, held_out = halves(batches)
    rows = super_experts(model, gates, search, held_out)
    largest = rows[0]
    assert (largest["layer"], largest["expert"]) == (gates[1].layer, 6)
    base, muted = measured(model, held_out), gates[1].experts.down_proj
    kept = muted[6].clone()
    with torch.no_grad():
        muted[6] = 0.0
        without = mean_of(measured(model, held_out))
        muted[6] = kept
    if five != "gpt_oss":  # whose experts have a bias, too
        assert largest["mean"] == pytest.approx(without - mean_of(base), rel=1e-3, abs=1e-6)


def test_schedules_of_k_against_setting_it() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    gates = find_gates(model)
    with torch.no_grad():  # the first layer needs its experts, the second does nothing
        gates[0].experts.down_proj.mul_(200)
        gates[1].experts.down_proj.zero_()
        model.lm_head.weight.mul_(10)
    batches = list(text_batches(tokenizer(), texts(16), length=16, batch_size=8, max_tokens=None))
    search, held_out = halves(batches)
    rows = schedules(model, gates, [1, 2], search, held_out, 0.001)
    of = {row["kind"]: row for row in rows}
    base = mean_of(measured(model, held_out))
    with pointsman.set_top_k(model, 1):
        change = mean_of(measured(model, held_out)) - base
    assert of["k = 1"]["mean"] == pytest.approx(change, rel=1e-4, abs=1e-6)
    assert list(of["exact"]["ks"].values())[1] == 1
    assert of["greedy"]["mean_k"] >= of["exact"]["mean_k"]
    tried = {}
    for ks in ((1, 1), (1, 2), (2, 1)):
        for gate, k in zip(gates, ks, strict=True):
            gate.module.top_k = k
        tried[ks] = mean_of(measured(model, search))
    for gate in gates:
        gate.module.top_k = 2
    assert tuple(of["exact, mean k 1.5"]["ks"].values()) == min(tried, key=tried.__getitem__)
    assert of["greedy, mean k 1.5"]["mean_k"] <= 1.5
    assert of["k = 2"]["share_half"] is None
    assert [gate.module.top_k for gate in gates] == [2, 2]


def test_the_tokens_of_an_expert_and_a_sample_of_every_domain() -> None:
    tokens, model = tokenizer(), spread(zoo.tiny_model("olmoe"))
    found = audit(model, tokens, two_domains(), top_k=[2], length=24, sample_tokens=60, probe_tokens=0)
    layer = "model.layers.0.mlp"
    top, load = found.layers[layer]["specialisation"]["top"], found.layers[layer]["load"]["share"]
    of = next(one for one in found.analyses["typical"] if one["layer"] == layer and one["tokens"])
    counts = {tokens.decode([one]): (count, share) for one, count, share in top[of["expert"]]}
    lifts = []
    for one in of["tokens"]:
        count, share = counts[one["text"]]
        assert (one["count"], one["lift"]) == (count, pytest.approx(share / load[of["expert"]]))
        lifts.append(one["lift"])
    assert lifts == sorted(lifts, reverse=True)
    assert min(lifts) > 1
    first = [" ".join(of).split()[:30] for of in two_domains().values()]
    assert [text.strip() for text in found.sample.tokens] == first[0] + first[1]


def test_differences_have_an_interval_on_two_rows_of_text() -> None:
    found = audit(spread(zoo.tiny_model("mixtral")), tokenizer(), texts(2), top_k=[1, 2], length=24, probe_tokens=0)
    change = found.quality[0]["difference"]
    assert change["blocks"] > 4  # quarters of rows
    assert change["half"] > 0
    assert found.quality[0]["half"] > 0


def test_experts_that_no_token_chooses_can_go_and_a_guessing_model_gets_no_advice() -> None:
    model = spread(zoo.tiny_model("gpt_oss"))
    with torch.no_grad():
        for gate in find_gates(model):
            gate.module.bias[[2, 5]] = -1e9
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = audit(model, tokenizer(), texts(24), top_k=[1, 2], length=16, probe_tokens=400)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    tried = {(one["method"], one["kept"]): one for one in found.analyses["prunings"]}
    assert list(tried) == [(method, size) for size in (7, 6, 4) for method in ("reap", "m-smoe")]
    assert tried["reap", 6]["groups"] == {gate.layer: [[0], [1], [3], [4], [6], [7]] for gate in find_gates(model)}
    assert tried["reap", 6]["mean"] == pytest.approx(0.0, abs=1e-6)
    assert tried["reap", 6]["within"] is True
    assert tried["reap", 6]["serving"]["memory"]["bfloat16"] < tried["reap", 7]["serving"]["memory"]["bfloat16"]
    kept = min((one for one in tried.values() if one["within"]), key=lambda one: (one["kept"], one["mean"]))
    assert any(f"With {kept['kept']} of 8 experts" in line for line in replace(found, protocol={}).findings())
    one = {"mean_k": 1.5, "share": 0.002, "share_half": 0.001, "kept": True}
    budgets = [{**one, "kind": "greedy", "mean_k": 1.0, "kept": None}, {**one, "kind": "exact, mean k 1.5"}]
    tried = [{**each, "ks": dict(zip(found.layers, (2, 1), strict=True))} for each in budgets]
    told = replace(found, protocol={}, quality=found.quality[1:], analyses={"schedules": tried}).findings()
    assert "With k by layer (2, 1; mean 1.5) the loss changes by +0.20% ± 0.10% on held-out text." in told
    assert any("The loss is that of guessing" in line for line in found.findings())
    assert not any("experts a layer" in line or "k = 1" in line for line in found.findings())
    other = audit(zoo.tiny_model("jetmoe"), tokenizer(), texts(8), top_k=[2], length=16)
    assert other.analyses["prunings"] == []
    assert any("experts that can go left out" in note for note in other.notes)
