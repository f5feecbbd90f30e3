"""Gates are found by what they return; k is set wherever a model keeps it."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import pointsman
from pointsman import hf
from pointsman.hf.gates import find_gates, survey
from tests.library.hf import zoo
from tests.library.hf.test_replace import IDS, logits, spread

FORMS = {
    "mixtral": ("", (), "softmax"),
    "gpt_oss": ("", (), "softmax"),
    "deepseek_v3": ("", (), "sigmoid"),
    "afmoe": ("gate", ("expert_bias",), "sigmoid"),
    "hunyuan_v1_moe": ("wg", (), "softmax"),
    "minimax_m2": ("", ("e_score_correction_bias",), "sigmoid"),
    "longcat_flash": ("classifier", (), "softmax"),
    "phimoe": ("", (), "other"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    model = zoo.tiny_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gates, reasons = survey(model)
    assert not reasons
    assert gates
    for gate in gates:
        assert (gate.form.owner, gate.form.extras, gate.form.kind) == FORMS[name]
        assert gate.form.linear
        assert gate.dim == 32
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_sets_at_once_and_restores(five: str) -> None:
    model = spread(zoo.tiny_model(five))
    seen: list[int] = []
    handles = [
        gate.module.register_forward_hook(lambda module, args, out: seen.append(out[2].shape[-1]))
        for gate in find_gates(model)
    ]
    before = logits(model)
    with pointsman.set_top_k(model, 1):
        one = logits(model)
        assert model.config.num_experts_per_tok == 1
        if hasattr(model, "num_experts_per_tok"):
            assert model.num_experts_per_tok == 1
        model(IDS, output_router_logits=True, labels=IDS)
    seen.clear()
    assert torch.equal(logits(model), before)
    assert not torch.allclose(one, before, atol=1e-6)
    assert set(seen) == {2}
    assert model.config.num_experts_per_tok == 2
    seen.clear()
    pointsman.set_top_k(model, 3)
    logits(model)
    assert set(seen) == {3}
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("spec", ["smoe-dropout", "frozen-scaled"])
def test_of_routers_without_a_trained_tensor(spec: str) -> None:
    model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), spec)
    with pointsman.set_top_k(model, 1):
        assert [gate.module.top_k for gate in find_gates(model)] == [1, 1]
    hf.balance(hf.replace_routers(zoo.tiny_model("deepseek_v3"), spec), how="bias")


def test_a_configuration_with_one_k_for_each_layer(tmp_path: Path) -> None:
    model = zoo.tiny_model("hunyuan_v1_moe", moe_topk=[2, 2])
    with pointsman.set_top_k(model, 3):
        pass
    assert model.config.moe_topk == [2, 2]
    pointsman.set_top_k(model, 1)
    model.save_pretrained(tmp_path)
    assert [gate.module.top_k for gate in find_gates(type(model).from_pretrained(tmp_path))] == [1, 1]


def test_a_gate_with_an_adapter_has_to_be_merged_first() -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings(action="ignore"):  # of PEFT's own pattern for experts
        model = peft.get_peft_model(zoo.tiny_model("mixtral"), peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match=r"mlp.gate: it has an adapter of PEFT; merge_and_unload\(\) gives"):
        pointsman.set_top_k(model, 1)
    merged = model.merge_and_unload()
    pointsman.set_top_k(merged, 1)
    assert [gate.module.top_k for gate in find_gates(merged)] == [1, 1]


def test_a_gate_whose_weight_is_computed_has_to_be_made_plain_first() -> None:
    model = zoo.tiny_model("mixtral")
    torch.nn.utils.parametrizations.weight_norm(find_gates(model)[0].module)
    with pytest.raises(ValueError, match=r"its weight is computed; .*remove_parametrizations makes it plain"):
        pointsman.set_top_k(model, 1)


def test_restores_after_an_error() -> None:
    model = zoo.tiny_model("mixtral")
    with pytest.raises(RuntimeError, match="stop"), pointsman.set_top_k(model, 1):
        raise RuntimeError("stop")
    assert [gate.module.top_k for gate in find_gates(model)] == [2, 2]


def test_refusals_change_nothing() -> None:
    for name, k, words in (
        ("mixtral", 9, "from 1 to 8"),
        ("mixtral", 0, "from 1 to 8"),
        ("mixtral", True, "from 1 to 8"),
        ("deepseek_v3", 5, "from 1 to 4"),  # one of two groups of four
        ("phimoe", 1, "whatever k is"),
        ("deepseek_v4", 1, "chooses experts by token id"),
    ):
        model = zoo.tiny_model(name)
        kept = {path: module.top_k for path, module in model.named_modules() if hasattr(module, "top_k")}
        with pytest.raises(ValueError, match=words):
            pointsman.set_top_k(model, k)
        assert {path: module.top_k for path, module in model.named_modules() if hasattr(module, "top_k")} == kept


def test_groups_of_deepseek_v2_count_only_where_it_uses_them() -> None:
    groups = {"n_group": 2, "num_group": 2, "topk_group": 1}
    model = zoo.tiny_model("deepseek_v2", topk_method="group_limited_greedy", **groups)
    with pytest.raises(ValueError, match="from 1 to 4"):
        pointsman.set_top_k(model, 5)
    model = zoo.tiny_model("deepseek_v2", topk_method="greedy", **groups)
    pointsman.set_top_k(model, 5)
    assert {gate.module.top_k for gate in find_gates(model)} == {5}


def test_other_modules_do_not_need_transformers() -> None:
    layer = pointsman.MoE(8, 8, 4)
    with pointsman.set_top_k(nn.Sequential(layer), 1):
        assert layer.top_k == 1
    with pytest.raises(ValueError, match="no MoE layer"):
        pointsman.set_top_k(nn.Linear(2, 2), 1)
