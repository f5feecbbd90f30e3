"""Gates of Hugging Face models as router specs: the same experts with the same weights, audit, replace, and back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf import zoo
from tests.hf.test_audit import texts, tokenizer
from tests.hf.test_replace import IDS, logits, spread

import pointsman
from pointsman import hf
from pointsman.hf.counterpart import correction_bias, counterpart, load_gate, routed_by, same_forward, shared_experts
from pointsman.hf.gates import Gate, find_gates
from pointsman.routers.registry import build_router

SPECS = {
    "afmoe": "loss-free",
    "beam": "loss-free:groups=2:kept=1",
    "deepseek_v2": "smoe:bias=false:renormalize=false",
    "deepseek_v3": "loss-free:groups=2:kept=1:scale=2.5",
    "deepseek_v4": "loss-free:gate=sqrtsoftplus:scale=1.5",
    "ernie4_5_moe": "loss-free:gate=softmax",
    "flint": "smoe:gate=sigmoid:bias=false",
    "glm4_moe_lite": "loss-free:groups=2:kept=1:scale=1.8",
    "gpt_oss": "smoe",
    "granitemoe": "smoe:bias=false",
    "hunyuan_v1_moe": "smoe:bias=false",
    "hy_v3": "loss-free:scale=2.826",
    "jamba": "smoe:bias=false:renormalize=false",
    "kimi_linear": "loss-free:groups=2:kept=1:scale=2.446",
    "lfm2_moe": "loss-free",
    "minimax_m2": "loss-free",
    "mistral4": "loss-free:gate=softmax:groups=2:kept=1",
    "mixtral": "smoe:bias=false",
    "nemotron_h": "loss-free:groups=2:kept=1",
    "olmoe": "smoe:bias=false",
    "phimoe": "sparsemixer:r=0.01",
    "openai_privacy_filter": "smoe:scale=0.5",
    "qwen2_moe": "smoe:bias=false",
    "qwen3_moe": "smoe:bias=false",
    "qwen3_next": "smoe:bias=false",
}
"""A class of each rule, and the most common classes (tiny models: two groups of four experts, one kept)."""


def with_bias(gate: Gate) -> None:
    """Gives the correction bias values: it starts at zero in every class."""
    bias = correction_bias(gate)
    if bias is not None:
        bias.data.copy_(0.2 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("name", SPECS)
def test_the_spec_with_the_gates_weights_routes_like_the_gate(name: str) -> None:
    gate = gates_of(zoo.tiny_model(name))[-1]
    with_bias(gate)
    spec = counterpart(gate)
    assert spec == SPECS[name]
    router = load_gate(build_router(spec, dim=gate.dim, num_experts=gate.num_experts, top_k=gate.module.top_k), gate)
    hidden = torch.randn(100, gate.dim, generator=torch.Generator().manual_seed(3))
    expected = routed_by(gate, hidden)
    with torch.no_grad():
        routing = router.eval()(hidden)
    found = torch.zeros_like(expected).scatter(1, routing.experts, routing.weights)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def gates_of(model: Any) -> list[Gate]:
    from pointsman.hf.gates import survey

    return survey(spread(model))[0]


@pytest.mark.parametrize("name", ["gemma4", "zaya"])
def test_rules_of_their_own_have_no_counterpart(name: str) -> None:
    assert {counterpart(gate) for gate in gates_of(zoo.tiny_model(name))} <= {None}


def test_longcat_has_virtual_experts() -> None:
    gate = gates_of(zoo.tiny_model("longcat_flash", zero_expert_num=2))[-1]
    with_bias(gate)
    spec, scale = counterpart(gate), f"{gate.module.routed_scaling_factor:g}"
    assert spec == "loss-free:gate=softmax:nulls=2:kind=copy:renormalize=false" + (
        "" if scale == "1" else f":scale={scale}"
    )
    real = gate.num_experts - 2
    router = load_gate(build_router(spec, dim=gate.dim, num_experts=real, top_k=gate.module.top_k), gate)
    hidden = torch.randn(100, gate.dim, generator=torch.Generator().manual_seed(3))
    expected = routed_by(gate, hidden)
    with torch.no_grad():
        routing = router.eval()(hidden)
    assert bool((expected[:, real:] > 0).any())
    torch.testing.assert_close(routing.virtual_weights, expected[:, real:], rtol=1e-6, atol=1e-6)
    found = torch.zeros(100, real + 1).scatter(1, routing.experts + 1, routing.weights)[:, 1:]
    torch.testing.assert_close(found, expected[:, :real], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="needs more than weights of experts"):
        hf.replace_routers(zoo.tiny_model("longcat_flash"), spec)


def test_the_settings_of_deepseek_v3() -> None:
    model = zoo.tiny_model("deepseek_v3", n_routed_experts=64, num_local_experts=64, n_group=8, topk_group=4)
    gate = find_gates(model)[0]
    assert counterpart(gate) == "loss-free:groups=8:kept=4:scale=2.5"
    assert shared_experts(gate) == 1


def test_audit_names_router_and_shared_experts() -> None:
    result = hf.audit(spread(zoo.tiny_model("deepseek_v3")), tokenizer(), texts(1), length=12)
    assert {layer["router"] for layer in result.layers.values()} == {SPECS["deepseek_v3"]}
    assert result.findings()[0] == f"Router of 2 layers: `{SPECS['deepseek_v3']}`, with 1 shared expert."
    assert (
        "router without a counterpart" in hf.audit(spread(zoo.tiny_model("gemma4")), tokenizer(), texts(1)).markdown()
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "jamba", "flint", "gpt_oss"])
def test_replacing_by_the_named_spec_keeps_outputs_and_goes_back(name: str, tmp_path: Path) -> None:
    model = spread(zoo.tiny_model(name))
    for gate in find_gates(model):
        with_bias(gate)
    before = logits(model)
    spec = SPECS[name] + (":scale=1" if name == "gpt_oss" else "")  # scale: the router's own rule
    changed = hf.replace_routers(copy.deepcopy(model), spec)
    assert torch.allclose(logits(changed), before, atol=1e-5)
    changed.save_pretrained(tmp_path)
    assert torch.allclose(logits(type(model).from_pretrained(tmp_path)), before, atol=1e-5)
    if name != "gpt_oss":
        assert torch.allclose(logits(hf.materialize(changed)), before, atol=1e-5)


def test_loss_free_balancing_of_a_hugging_face_model() -> None:
    model = hf.replace_routers(spread(zoo.tiny_model("mixtral")), "loss-free:scale=1.5").train()
    routers = [router for _, router in pointsman.control.named_routers(model)]
    model(IDS, labels=IDS).loss.backward()
    assert all(router.score.weight.grad is not None for router in routers)
    pointsman.step_end(model)
    assert all(float(router.select.bias.abs().max()) == pytest.approx(1e-3) for router in routers)
    with pytest.raises(ValueError, match="the rule of MixtralTopKRouter is 'smoe:bias=false'"):
        hf.materialize(model)


def test_specs_with_a_rule_that_cannot_be_used() -> None:
    for spec, words in (
        ("xmoe:gate=sigmoid", "'gate' works with 'smoe' and 'loss-free' without a mixer"),
        ("smoe:scale=2+similarity", "'scale' works with"),
        ("loss-free:capacity=2", "never drops tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            hf.replace_routers(zoo.tiny_model("mixtral"), spec)


def test_options_of_training_do_not_matter_in_a_forward() -> None:
    assert same_forward("loss-free:scale=2:groups=8:kept=4", "loss-free:groups=8:kept=4:scale=2:update=none")
    assert not same_forward("loss-free", "loss-free:scale=2")
