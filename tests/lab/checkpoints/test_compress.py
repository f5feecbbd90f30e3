"""Smaller models against the original with experts switched off, and what each method finds where it was planted."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pointsman import hf
from pointsman.hf.gates import find_gates
from pointsman_lab.checkpoints import audit, compress
from pointsman_lab.checkpoints.choosing import METHODS, _scores, plan
from pointsman_lab.checkpoints.cutting import cut, cuttable, distil
from pointsman_lab.checkpoints.outputs import Observed
from pointsman_lab.checkpoints.text import text_batches
from tests.lab.checkpoints.compatibility import output_of
from tests.library.hf import zoo
from tests.library.hf.test_replace import spread
from tests.library.hf.zoo import texts, tokenizer

IDS = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def batches(count: int = 12) -> list[Any]:
    return list(text_batches(tokenizer(), texts(count), length=16, batch_size=4, max_tokens=None))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_cut_model_is_the_original_whose_other_experts_cannot_be_chosen(name: str) -> None:
    model = spread(zoo.tiny_model(name))
    gates = find_gates(model)
    kept = [0, 2, 5, 7]  # of deepseek_v3's two groups two each
    smaller = cut(model, gates, {gate.layer: [[one] for one in kept] for gate in gates})
    with torch.no_grad():
        for gate in gates:
            bias = gate.module.bias if name == "gpt_oss" else gate.module.e_score_correction_bias
            bias[[one for one in range(8) if one not in kept]] = -1e9
    assert torch.allclose(logits(smaller), logits(model), atol=1e-5)


def test_the_folder_loads_in_transformers_and_the_original_stays(five: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model(five))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = compress(model, tokenizer(), {"a": texts(8), "b": texts(8, seed=1)}, length=16, batch_size=3, heal=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    found.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded), logits(found.model), atol=1e-6)
    assert all(gate.num_experts == 4 for gate in find_gates(loaded))
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in model.parameters())
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(told["domains"]) == {"a", "b"}
    assert len(told["random"]["losses"]) == 3
    assert [row["top_k"] for row in told["quality"]] == [1, 2]
    assert "| a |" in found.markdown()


@pytest.mark.parametrize("method", ["reap", "norm", "mean"])
def test_experts_that_give_out_nothing_are_pruned(method: str) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    with torch.no_grad():
        for gate in find_gates(model):
            gate.experts.down_proj[[1, 4, 6]] = 0.0
    found = compress(model, tokenizer(), texts(12), experts=5, method=method, length=16, random=1)
    assert all(groups == [[0], [2], [3], [5], [7]] for groups in found.kept.values())


def test_scores_by_hand() -> None:
    """Two outputs (1, 0), (3, 0) of weight 1/2 and 1; one output (0, 2) of weight 1/4; an expert that nobody chose."""
    found, tensor = Observed(["l"]), torch.tensor
    found.add("l", {"count": tensor([2, 1, 0]), "weighted": tensor([3.5, 0.5, 0.0])})
    found.add("l", {"square": tensor([10.0, 4.0, 0.0]), "output": tensor([[4.0, 0.0], [0.0, 2.0], [0.0, 0.0]])})
    expected = {"reap": [1.75, 0.5, 0], "frequency": [2, 1, 0], "norm": [3.5, 0.5, 0], "mean": [10 - 16 / 2, 0, 0]}
    assert {method: _scores(found, method)["l"].tolist() for method in expected} == expected


def test_frequency_keeps_the_frequent() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    gates = find_gates(model)
    groups, counts = plan(model, gates, batches(), 4, "frequency")
    assert counts is not None
    for layer, count in counts.items():
        assert {group[0] for group in groups[layer]} == set(count.topk(4).indices.tolist())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "random"])
def test_super_experts_stay_as_they_are(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    gates = find_gates(model)
    _, counts = plan(model, gates, batches(), 4, "frequency")
    assert counts is not None
    rare = counts[gates[0].layer].topk(3, largest=False).indices.tolist()
    with torch.no_grad():
        gates[0].experts.down_proj[rare] *= 1e4
    if method == "search":  # every swap lowers the loss
        falling = itertools.count(0, -1)
        monkeypatch.setattr("pointsman_lab.checkpoints.choosing.mean_of", lambda rows: next(falling))
    groups, _ = plan(model, gates, batches(), 4, method)
    assert all([one] in groups[gates[0].layer] for one in rare)
    if method != "hc-smoe":  # which joins them where there are more than places
        groups, _ = plan(model, gates, batches(), 2, method)
        assert {group[0] for group in groups[gates[0].layer]} <= set(rare)


@pytest.mark.parametrize("method", ["hc-smoe", "m-smoe"])
def test_equal_experts_are_merged_without_loss(method: str) -> None:
    model = spread(zoo.tiny_model("mixtral"))
    gates = find_gates(model)
    with torch.no_grad():
        for gate in gates:
            for one in (0, 2, 4, 6):  # experts one and one + 1 are the same, and so are the directions of their rows
                for tensor in (gate.experts.gate_up_proj, gate.experts.down_proj, gate.module.weight):
                    tensor[one + 1] = tensor[one]
            gate.module.weight[[1, 3, 5, 7]] *= 0.3  # the same direction, chosen less often
    groups, counts = plan(model, gates, batches(), 4, method)
    for layer in groups:
        assert sorted(sorted(group) for group in groups[layer]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    smaller = cut(model, gates, groups, counts)
    for gate, other in zip(gates, find_gates(smaller), strict=True):
        heads = [group[0] for group in groups[gate.layer]]
        assert torch.allclose(other.experts.down_proj, gate.experts.down_proj[heads], atol=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_units_in_another_order_are_aligned_before_a_merge(name: str) -> None:
    model = spread(zoo.tiny_model(name))
    gates = find_gates(model)
    experts = gates[0].experts
    groups = {gate.layer: [[one, one + 1] for one in (0, 2, 4, 6)] for gate in gates}
    order = torch.randperm(experts.down_proj.shape[1 if experts.is_transposed else 2])
    with torch.no_grad():
        for gate in gates:
            of: Any = gate.experts
            for one in (0, 2, 4, 6):
                up, down = of.gate_up_proj[one], of.down_proj[one]
                if name == "gpt_oss":  # [dim, hidden of gate and up in turn], biases
                    up = up.unflatten(1, (-1, 2))[:, order].flatten(1)
                    of.gate_up_proj_bias[one + 1] = of.gate_up_proj_bias[one].unflatten(0, (-1, 2))[order].flatten()
                    of.down_proj_bias[one + 1], down = of.down_proj_bias[one], down[order]
                else:
                    up, down = up.unflatten(0, (2, -1))[:, order].flatten(0, 1), down[:, order]
                of.gate_up_proj[one + 1], of.down_proj[one + 1] = up, down
    pruned, merged = (
        cut(model, gates, {k: [v[:1] for v in of] for k, of in groups.items()}),
        cut(model, gates, groups, align=True),
    )
    assert torch.allclose(logits(merged), logits(pruned), atol=1e-5)
    assert not torch.allclose(logits(cut(model, gates, groups)), logits(pruned), atol=1e-5)


def test_the_search_is_not_worse_than_its_start_and_distillation_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    from pointsman_lab.checkpoints.audit.trials import mean_of, measured

    model = spread(zoo.tiny_model("mixtral"))
    with torch.no_grad():
        for gate in find_gates(model):
            gate.experts.down_proj.mul_(300)
    monkeypatch.setattr("pointsman_lab.checkpoints.choosing.SWAPS", 12)
    gates, text = find_gates(model), batches(6)
    start, found = (cut(model, gates, plan(model, gates, text, 4, method)[0]) for method in ("reap", "search"))
    assert mean_of(measured(found, text)) <= mean_of(measured(start, text))
    far = float((logits(start) - logits(model)).square().mean())
    distil(model, start, text, 40)
    assert float((logits(start) - logits(model)).square().mean()) < far


def test_distillation_leaves_what_the_original_shares() -> None:
    model = spread(zoo.tiny_model("gemma4"))  # whose gates scale their input
    gates = find_gates(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smaller = cut(model, gates, {gate.layer: [[0], [2], [5], [7]] for gate in gates})
    distil(model, smaller, batches(4), 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    name = next(name for name in before if name.endswith("router.scale"))
    assert not torch.equal(smaller.state_dict()[name], before[name])


def test_random_prunings_are_healed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    healed = []

    def counting(model: Any, smaller: Any, batches: Any, steps: int) -> Any:
        healed.append(steps)
        return distil(model, smaller, batches, steps)

    monkeypatch.setattr(sys.modules[compress.__module__], "distil", counting)
    model = spread(zoo.tiny_model("mixtral"))
    found = compress(model, tokenizer(), texts(8), length=16, heal=2, random=2)
    assert healed == [2, 2, 2]
    assert "2 random prunings, distilled alike." in " ".join(found.markdown().split())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in found.model.parameters())


def test_distillation_in_bf16_moves_the_weights_by_steps_below_their_rounding() -> None:
    model = spread(zoo.tiny_model("mixtral"))
    with torch.no_grad():
        for gate in find_gates(model):
            gate.experts.down_proj.normal_().sign_().mul_(0.1)  # bf16 has no number within 2e-4 of it
    model.to(torch.bfloat16)
    smaller = cut(model, find_gates(model), {gate.layer: [[0], [2], [5], [7]] for gate in find_gates(model)})
    before = find_gates(smaller)[0].experts.down_proj.detach().clone()
    distil(model, smaller, batches(4), 10)  # of 1e-4 each
    assert (find_gates(smaller)[0].experts.down_proj != before).float().mean() > 0.5
    assert {parameter.dtype for parameter in smaller.parameters()} == {torch.bfloat16}
    assert smaller.model.embed_tokens.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def mixed(model: Any) -> tuple[Any, Any]:
    """The model with 6 experts in all layers but the last, which has 4; and one made of two even models."""
    gates = find_gates(model)
    last = gates[-1].layer
    few, more = ({gate.layer: [[one] for one in kept] for gate in gates} for kept in ([0, 3, 5, 7], [0, 1, 2, 4, 5, 6]))
    found, six = cut(model, gates, {**more, last: few[last]}), cut(model, gates, more)
    six.set_submodule(last, cut(model, gates, few).get_submodule(last))
    return found, six


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layers_of_several_sizes_in_every_class(tmp_path: Path) -> None:
    refused, alone = {}, []
    for name in zoo.moe_modules():
        model = spread(zoo.tiny_model(name))
        try:
            gates = cuttable(model)[0]
        except ValueError as error:
            refused[name] = str(error)
            continue
        if len(gates) < 2:
            alone.append(name)
            continue
        uneven, expected = mixed(model)
        assert torch.equal(output_of(uneven), output_of(expected)), name
        uneven.save_pretrained(tmp_path / name)
        loaded = type(uneven).from_pretrained(tmp_path / name).eval()
        assert torch.allclose(output_of(loaded), output_of(uneven), atol=1e-5), name
    assert set(alone) == {"jamba", "nemotron_h"}  # one sparse layer of two
    assert set(refused) == {
        "dbrx", "deepseek_v4", "doge", "inkling", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7",
        "switch_transformers", "vitpose_backbone", "zaya",
    }  # fmt: skip


ALONE = """
import sys, torch, transformers
assert not any(name.startswith("pointsman") for name in sys.modules)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.load(sys.argv[2])
torch.save(model(input_ids=ids).logits.detach(), sys.argv[3])
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=False)
except RuntimeError as error:
    assert "mismatched" in str(error)
else:
    raise AssertionError("the folder loads as a model of even layers")
"""


@pytest.mark.slow
def test_transformers_alone_loads_layers_of_several_sizes(tmp_path: Path) -> None:
    from pointsman.hf.loading import load_model

    model, _ = mixed(spread(zoo.tiny_model("mixtral")))
    model.save_pretrained(tmp_path / "uneven")
    torch.save(IDS, tmp_path / "ids")
    words = [str(tmp_path / one) for one in ("uneven", "ids", "logits")]
    given = {"HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", ALONE, *words], env=given, check=True, cwd=tmp_path)
    assert torch.allclose(torch.load(tmp_path / "logits"), logits(model), atol=1e-6)
    assert torch.equal(logits(load_model(words[0])), logits(model))  # without the folder's code


@pytest.mark.parametrize("name", ["mixtral", "qwen3_vl_moe"])
@pytest.mark.parametrize("spec", ["smoe+similarity:strength=0.5", "hyperrouter:hyper_dim=8:share=true", "xmoe"])
def test_layers_of_several_sizes_keep_their_routers(name: str, spec: str, tmp_path: Path) -> None:
    model, _ = mixed(spread(zoo.tiny_model(name)))
    hf.replace_routers(model, spec)
    model.save_pretrained(tmp_path / "uneven")
    loaded = type(model).from_pretrained(tmp_path / "uneven").eval()
    assert torch.allclose(output_of(loaded), output_of(model), atol=1e-6)


@pytest.mark.parametrize("method", [*METHODS])
def test_uneven_layers_under_one_budget(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_lab.checkpoints.choosing.SWAPS", 4)
    model = spread(zoo.tiny_model("mixtral"))
    gates = find_gates(model)
    with (
        torch.no_grad()
    ):  # two experts of the first layer have all the tokens, the output, and a direction of their own
        gates[0].module.weight[2:] *= 1e-3
        gates[0].module.weight[:2] *= 30
        gates[0].experts.down_proj[2:] *= 1e-3
    groups, counts = plan(model, gates, batches(), 5, method, least=2)
    numbers = {layer: len(of) for layer, of in groups.items()}
    assert sum(numbers.values()) == 10
    assert min(numbers.values()) >= 2
    assert all(sorted(one for group in of for one in group)[-1] < 8 for of in groups.values())
    if method in ("frequency", "norm", "reap", "m-smoe"):
        assert numbers[gates[0].layer] < 5
    smaller = cut(model, gates, groups, counts, align=method == "m-smoe")
    assert [gate.num_experts for gate in find_gates(smaller)] == list(numbers.values())


def test_a_class_that_fixes_k_is_verified_at_it_and_a_sick_model_is_refused() -> None:
    model = spread(zoo.tiny_model("phimoe"))
    assert [row["top_k"] for row in compress(model, tokenizer(), texts(8), length=16).quality] == [2]
    with torch.no_grad():
        find_gates(model)[0].experts.down_proj.fill_(torch.nan)
    with pytest.raises(ValueError, match="compress: the model's loss is nan"):
        compress(model, tokenizer(), texts(8), length=16)


def test_an_uneven_model_is_verified_beside_an_even_one_and_stays_a_model(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("deepseek_v3"))
    model.config.output_router_logits = True  # adds up the layers' logits where a class has the loss
    with torch.no_grad():
        find_gates(model)[0].experts.down_proj[2:] *= 1e-3
    found = compress(model, tokenizer(), texts(12), experts=6, uneven=True, length=16, batch_size=3, heal=1)
    assert not found.model.config.output_router_logits
    numbers = [len(of) for of in found.kept.values()]
    assert numbers == [4, 8]  # two groups, of two experts at least
    assert found.even is not None
    assert found.even["half"] > 0
    assert "Experts by layer: 4, 8. Loss against 6 in every layer:" in " ".join(found.markdown().split())
    audited = audit(found.model, tokenizer(), texts(4), length=16, batch_size=3)
    assert [layer["num_experts"] for layer in audited.layers.values()] == numbers
    with pytest.raises(ValueError, match="it is compressed already"):
        compress(found.model, tokenizer(), texts(4), length=16)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("mixtral", {"method": "reep"}, "did you mean 'reap'"),
        ("mixtral", {"experts": 1}, "allowed are 2 to 7"),
        ("mixtral", {"experts": 2.5}, "experts=2.5: allowed are a share below 1 or a whole number"),
        ("mixtral", {"experts": float("nan")}, "experts=nan: allowed are a share"),
        ("mixtral", {"experts": 8}, "allowed are 2 to 7"),
        ("deepseek_v3", {"experts": 5}, "multiples of 2"),
        ("deepseek_v3", {"experts": 2}, "allowed are 4 to 7"),
        ("deepseek_v3", {"experts": 2}, "allowed are 4 to 7, multiples of 2, its groups$"),
        ("inkling", {}, "of which some are shared"),
        ("deepseek_v3", {"method": "m-smoe"}, "2 groups of experts limit the choice"),
        ("llama4", {}, "Llama4Router is not a plain one"),
        ("dbrx", {}, "DbrxRouter is not a plain one"),
        ("mixtral", {"length": 0}, "compress: length=0: allowed are whole numbers from 2"),
        ("mixtral", {"batch_size": 0}, "compress: batch_size=0"),
        ("mixtral", {"max_tokens": 0}, "compress: max_tokens=0"),
        ("mixtral", {"texts": "w1 w2"}, "texts: 'text' is one string"),
        ("mixtral", {"texts": ["w1", "w2"]}, "there is no held-out text with a loss"),
        ("mixtral", {"texts": ["un known"] * 9}, "at least two rows of text that the tokenizer knows are needed"),
    ],
)
def test_what_cannot_be_done_is_refused(name: str, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compress(zoo.tiny_model(name), tokenizer(), **{"texts": texts(4), "length": 16, **change})
    assert set(METHODS) >= {"reap", "frequency", "norm", "mean", "hc-smoe", "m-smoe", "search"}


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("mixtral", {"num_experts_per_tok": 8}, "needs all 8 experts of a layer: it chooses 8$"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}, "it chooses 3 from 4 groups"),
        ("mixtral", {"num_experts_per_tok": 12}, "its k is 12, of 8 experts"),
    ],
)
def test_a_model_that_needs_all_its_experts_says_so(name: str, settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compress(zoo.tiny_model(name, **settings), tokenizer(), texts(4), length=16)


def test_groups_that_a_class_does_not_use_limit_nothing() -> None:
    model = spread(zoo.tiny_model("deepseek_v2", topk_method="greedy", num_experts_per_tok=3))
    smaller = compress(model, tokenizer(), texts(4), length=16, experts=3, method="m-smoe", random=1).model
    assert {len(gate.module.weight) for gate in find_gates(smaller)} == {3}


def test_replaced_gates_have_to_be_plain_ones_first() -> None:
    model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), "hyperrouter")
    with pytest.raises(ValueError, match=r"its gate is the router 'hyperrouter'; materialize\(model\) first"):
        compress(model, tokenizer(), texts(4), length=16)
