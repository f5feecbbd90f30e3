"""Gates of Hugging Face models as router specs: the same experts with the same weights, audit, replace, and back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import pointsman
from pointsman import hf
from pointsman.hf.counterpart import (
    correction_bias,
    counterpart,
    load_gate,
    routed_by,
    same_forward,
    virtual_experts_of,
)
from pointsman.hf.gates import Gate, find_gates, run_gate, survey
from pointsman.hf.layouts import first_k
from pointsman.routers.frame import registry
from pointsman.routers.frame.registry import LayerSpec, build_router
from pointsman.routers.frame.stage_values import Loss
from pointsman.routers.frame.stages import Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext
from tests.library.hf import zoo
from tests.library.hf.test_replace import IDS, logits, spread

PLAIN, SHARE, BIASED = "smoe:bias=false", "smoe:bias=false:renormalize=false", "loss-free"
GROUPS, SOFT = "loss-free:groups=2:kept=1", "loss-free:gate=softmax"
SPECS = {
    "afmoe": BIASED,
    "aria": PLAIN,
    "axk1": GROUPS + ":scale=2.5",
    "axk2": GROUPS + ":scale=2.5",
    "bailing_hybrid": GROUPS + ":scale=2.5",
    "beam": GROUPS,
    "cohere2_moe": PLAIN,
    "dbrx": PLAIN,
    "deepseek_ocr2": SHARE,
    "deepseek_v2": SHARE,
    "deepseek_v3": GROUPS + ":scale=2.5",
    "deepseek_v32": GROUPS + ":scale=2.5",
    "deepseek_v4": "loss-free:gate=sqrtsoftplus:scale=1.5",
    "dots1": GROUPS,
    "dots3_note": GROUPS,
    "ernie4_5_moe": SOFT,
    "ernie4_5_vl_moe": SOFT,
    "exaone_moe": GROUPS + ":scale=2.5",
    "flex_olmo": PLAIN,
    "flint": "smoe:gate=sigmoid:bias=false",
    "glm4_moe": GROUPS,
    "glm4_moe_lite": GROUPS + ":scale=1.8",
    "glm4v_moe": GROUPS,
    "glm5_next": GROUPS + ":scale=2.5",
    "glm_moe_dsa": GROUPS + ":scale=2.5",
    "gpt_oss": "smoe",
    "granitemoe": PLAIN,
    "granitemoe_swa": PLAIN,
    "granitemoehybrid": PLAIN,
    "granitemoeshared": PLAIN,
    "hunyuan_v1_moe": PLAIN,
    "hy_v3": "loss-free:scale=2.826",
    "hy_v4": GROUPS + ":scale=2.827",
    "hy_v4_vl": GROUPS + ":scale=2.827",
    "inkling2": "loss-free:scale=8",
    "inkling2_loop": "loss-free:scale=8",
    "jamba": SHARE,
    "jetmoe": PLAIN,
    "kimi_linear": GROUPS + ":scale=2.446",
    "kolibri1": "loss-free:biased=logits",
    "laguna": BIASED,
    "lara_mini": "smoe:bias=false",
    "lfm2_moe": BIASED,
    "llama4": "smoe:gate=sigmoid:bias=false:renormalize=false:weigh=input",
    "longcat_flash": SOFT + ":nulls=256:kind=copy:renormalize=false:scale=6",
    "mellum": PLAIN,
    "mimo_v2_flash": GROUPS,
    "minimax": PLAIN,
    "minimax_m2": BIASED,
    "minimax_m3_vl": BIASED,
    "mistral4": SOFT + ":groups=2:kept=1",
    "mistral_large4": SOFT + ":groups=2:kept=1",
    "mixtral": PLAIN,
    "muse_spark": BIASED,
    "nemotron_h": GROUPS,
    "nllb_moe": PLAIN,
    "olmoe": PLAIN,
    "openai_privacy_filter": "smoe:scale=0.5",
    "phimoe": "sparsemixer:r=0.01",
    "qwen2_moe": PLAIN,
    "qwen3_5_moe": PLAIN,
    "qwen3_moe": PLAIN,
    "qwen3_next": PLAIN,
    "qwen3_omni_moe": PLAIN,
    "qwen3_vl_moe": PLAIN,
    "qwen4_exp": PLAIN,
    "solar_open": GROUPS,
    "step3p7": BIASED,
    "switch_transformers": "switch:bias=false:jitter=0.01:capacity=64:capacity_unit=tokens",
    "unlimited_ocr": SHARE,
}
"""Every class with a counterpart: the spec of its tiny model (two groups of four experts, one kept)."""
NONE = ("diffusion_gemma", "gemma4", "inkling")
NO_GATE = ("doge", "vitpose_backbone", "zaya")
"""Classes whose choice is no function of one linear map: `find_gates` says of each why."""


def with_bias(gate: Gate) -> None:
    """Gives the correction bias values: it starts at zero in every class."""
    bias = correction_bias(gate)
    if bias is not None:
        bias.data.copy_(0.2 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(5)))


def test_every_class_is_here() -> None:
    if transformers.__version__ == "5.24.0":
        assert sorted([*SPECS, *NONE, *NO_GATE]) == sorted(zoo.moe_modules())


@pytest.mark.parametrize("name", SPECS)
def test_the_spec_with_the_gates_weights_routes_like_the_gate(name: str) -> None:
    if name not in zoo.moe_modules():
        pytest.skip(f"this transformers has no {name}")
    model = zoo.tiny_model(name)
    gate = gates_of(model)[-1]
    with_bias(gate)
    spec = counterpart(gate)
    assert spec == SPECS[name]
    real = gate.num_experts - virtual_experts_of(gate)
    k = first_k(gate.module, gate.block, gate.form)
    router = load_gate(build_router(spec, dim=gate.dim, num_experts=real, top_k=k), gate)
    hidden = torch.randn(100, gate.dim, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected = routed_by(gate, hidden)
    found = router.eval()(hidden).dense_weights
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    of_hidden, of_weight = gradients(found, hidden, router.score.weight)
    wanted = gradients(differentiable(gate, hidden), hidden, gate.module.get_submodule(gate.form.owner).weight)
    atol = 2e-6 if name == "lfm2_moe" else 1e-6  # which adds 1e-6 to the sum that it divides by
    torch.testing.assert_close(of_hidden, wanted[0], rtol=1e-5, atol=atol)
    torch.testing.assert_close(of_weight * gate.form.multiplier, wanted[1], rtol=1e-5, atol=atol)
    hf.replace_routers(model, spec)
    found = routed_by(gate, hidden)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def differentiable(gate: Gate, hidden: Tensor) -> Tensor:
    """What `routed_by` gives, with gradients."""
    output, _ = run_gate(gate.module, hidden, gate.arguments(len(hidden)))
    _, weights, experts = (one.reshape(len(hidden), -1) for one in gate.routed(output))
    return torch.zeros(len(hidden), gate.num_experts + 1).scatter(1, experts.long() + 1, weights)[:, 1:]


def gradients(weights: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Of a fixed sum of combine weights."""
    factors = torch.linspace(-1, 1, weights.numel()).view(weights.shape)
    return torch.autograd.grad((weights * factors).sum(), leaves)


def gates_of(model: Any) -> list[Gate]:
    return survey(spread(model))[0]


@pytest.mark.parametrize("name", NONE)
def test_rules_of_their_own_have_no_counterpart(name: str) -> None:
    gates = gates_of(zoo.tiny_model(name))
    assert gates
    assert {counterpart(gate) for gate in gates} == {None}


@pytest.mark.parametrize("name", NO_GATE)
def test_classes_without_a_gate_say_why(name: str) -> None:
    with pytest.raises(ValueError, match=r"product keys|does not return|scores with 4|no gate next to experts"):
        find_gates(zoo.tiny_model(name))


def test_longcat_with_its_own_spec_keeps_its_outputs_and_goes_back(tmp_path: Path) -> None:
    model = spread(zoo.tiny_model("longcat_flash", zero_expert_num=2))
    gates = find_gates(model)
    for gate in gates:
        with_bias(gate)
    spec = counterpart(gates[0])
    assert spec == "loss-free:gate=softmax:nulls=2:kind=copy:renormalize=false:scale=6"
    before = logits(model)
    changed = hf.replace_routers(copy.deepcopy(model), spec)
    torch.testing.assert_close(logits(changed), before, rtol=0, atol=1e-5)
    assert [gate.num_experts for gate in find_gates(changed)] == [10, 10]
    with pointsman.record_routing(changed) as records:
        logits(changed)
    assert list(records) == [gate.layer for gate in gates]
    changed.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path)), before, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(hf.materialize(changed)), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "spec", "says"),
    [
        ("longcat_flash", "smoe:nulls=3:kind=copy", "LongcatFlashTopkRouter has nulls=256:kind=copy"),
        ("longcat_flash", "loss-free:nulls=256", "LongcatFlashTopkRouter has nulls=256:kind=copy"),
        ("mixtral", "smoe:nulls=2:kind=copy", "MixtralTopKRouter has none"),
    ],
)
def test_virtual_experts_are_the_classes_own(name: str, spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hf.replace_routers(zoo.tiny_model(name), spec)


def test_muse_sparks_multiplier_is_in_the_weight() -> None:
    model = spread(zoo.tiny_model("muse_spark"))
    gate = find_gates(model)[0]
    assert gate.form.multiplier == model.config.output_multiplier != 1
    weight = gate.module.weight.clone()
    hidden = torch.randn(2, 9, gate.dim, generator=torch.Generator().manual_seed(3))
    before = gate.block(hidden)
    for spec in ("smoe", "hyperrouter+similarity", "loss-free"):
        hf.replace_routers(model, spec)
        torch.testing.assert_close(gate.module.pointsman.score.plain_linear()[0], weight * gate.form.multiplier)
        if "+" not in spec:
            torch.testing.assert_close(gate.block(hidden), before)
        hf.materialize(model)
        torch.testing.assert_close(gate.module.weight, weight)


def test_the_tables_of_deepseek_v4_are_hash_routers_of_k_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = spread(zoo.tiny_model("deepseek_v4"))
    before = logits(model)
    table, *others = find_gates(model)
    specs = [counterpart(gate) for gate in (table, others[0])]
    assert specs == ["hash:columns=2:gate=sqrtsoftplus:scale=1.5", SPECS["deepseek_v4"]]
    plain = build_router(str(specs[0]), dim=table.dim, num_experts=8, top_k=2, vocab_size=96)
    hidden = torch.randn(90, table.dim, generator=torch.Generator().manual_seed(3)).requires_grad_()
    routing = load_gate(plain, table).eval()(hidden[None], RoutingContext(token_ids=torch.arange(90)[None]))
    found, expected = routing.dense_weights, differentiable(table, hidden)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(found, hidden), gradients(expected, hidden), rtol=1e-5, atol=1e-6)
    named = [str(counterpart(gate)) for gate in (table, *others)]
    assert named == [specs[0]] + [specs[1]] * 3
    with pytest.raises(ValueError, match="DeepseekV4HashRouter chooses experts by token id, from a table of 2"):
        pointsman.set_top_k(model, 4)
    only = hf.replace_routers(copy.deepcopy(model), str(specs[0]))
    assert [name for name, _ in pointsman.control.named_routers(only)] == [table.layer]
    changed = hf.replace_routers(copy.deepcopy(model), named)
    assert len(list(pointsman.control.named_routers(changed))) == 4
    assert torch.allclose(logits(changed), before, atol=1e-5)
    with pointsman.set_top_k(changed, 4):  # the table, then the walk
        assert not torch.allclose(logits(changed), before, atol=1e-5)
    changed.save_pretrained(tmp_path)
    assert "call pointsman.hf.materialize(model) before saving" in caplog.text
    assert torch.allclose(logits(type(model).from_pretrained(tmp_path)), before, atol=1e-5)
    assert torch.allclose(logits(hf.materialize(changed)), before, atol=1e-5)
    table.module.tid2eid.zero_()  # as in a model without a checkpoint
    with pytest.raises(ValueError, match="names an expert twice for a token id"):
        hf.replace_routers(model, str(specs[0]))


@pytest.mark.parametrize("name", ["llama4", "jetmoe", "switch_transformers", "nllb_moe", "dbrx"])
def test_classes_that_route_in_their_blocks(name: str) -> None:
    """Another rule in training: gradients reach the router through the block; what a block does itself is refused."""
    model = spread(zoo.tiny_model(name)).train()
    ids = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    if name == "dbrx":
        with pytest.raises(ValueError, match="DbrxFFN chooses and weighs the experts itself, after the logits"):
            hf.replace_routers(model, "loss-free")
        spec = "hyperrouter"
    else:
        spec = "smoe:scale=1.5" if name == "nllb_moe" else "switch:jitter=0" if "switch" in name else "loss-free"
    hf.replace_routers(model, spec)
    routers = [router for _, router in pointsman.control.named_routers(model)]
    model(**ids).logits.square().mean().backward()
    trained = [one for router in routers for one in router.parameters() if one.requires_grad]
    assert trained
    assert all(one.grad is not None and one.grad.isfinite().all() for one in trained)
    assert any(one.grad.any() for one in trained)
    pointsman.step_end(model)
    if spec == "loss-free":
        assert all(router.select.bias.any() for router in routers)


def test_phi_moe_multiplies_its_gates_input_by_noise_and_not_the_logits() -> None:
    model = spread(zoo.tiny_model("phimoe", input_jitter_noise=0.5)).train()
    gate = find_gates(model)[0].module
    hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    expected = gate(hidden.clone())
    hf.replace_routers(model, "smoe")
    torch.manual_seed(0)
    torch.testing.assert_close(gate(hidden), expected)


def test_switchs_capacity_is_of_tokens_in_each_sequence() -> None:
    model = spread(zoo.tiny_model("switch_transformers", expert_capacity=3))
    gate = find_gates(model)[0]
    spec = counterpart(gate)
    assert spec == "switch:bias=false:jitter=0.01:capacity=3:capacity_unit=tokens"
    hidden = torch.randn(2, 20, gate.dim, generator=torch.Generator().manual_seed(3))
    before = gate.block(hidden)
    assert (before == 0).all(-1).any(), "nothing was dropped"
    hf.replace_routers(model, spec)
    torch.testing.assert_close(gate.block(hidden), before)
    with pytest.raises(ValueError, match="SwitchTransformersTop1Router always chooses 1"):
        pointsman.set_top_k(model, 2)


@pytest.mark.parametrize(
    ("power", "spec"), [(2, None), (None, SHARE), (1, PLAIN)], ids=["euclidean", "as they are", "sum"]
)
def test_dbrx_divides_by_a_norm_of_its_configuration(power: int | None, spec: str | None) -> None:
    model = spread(zoo.tiny_model("dbrx"))
    gate = find_gates(model)[0]
    gate.block.moe_normalize_expert_weights = power
    gate = find_gates(model)[0]
    assert counterpart(gate) == spec
    if spec is not None:
        hidden = torch.randn(2, 9, gate.dim, generator=torch.Generator().manual_seed(3))
        before = gate.block(hidden)
        hf.replace_routers(model, [spec, PLAIN])
        torch.testing.assert_close(gate.block(hidden), before)


def test_the_settings_of_deepseek_v3() -> None:
    model = zoo.tiny_model("deepseek_v3", n_routed_experts=64, num_local_experts=64, n_group=8, topk_group=4)
    gate = find_gates(model)[0]
    assert counterpart(gate) == "loss-free:groups=8:kept=4:scale=2.5"


@pytest.mark.parametrize("name", ["deepseek_v3", "jamba", "flint", "gpt_oss", "kolibri1", "phimoe"])
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


def test_a_trained_bias_that_the_class_has_not_is_not_dropped() -> None:
    model = spread(zoo.tiny_model("deepseek_v2", topk_method="group_limited_greedy"))
    gates = find_gates(model)
    spec = counterpart(gates[0])
    assert str(spec).startswith("loss-free:gate=softmax:groups=")
    before = logits(model)
    changed = hf.replace_routers(copy.deepcopy(model), str(spec))
    assert torch.allclose(logits(hf.materialize(copy.deepcopy(changed))), before, atol=1e-5)
    trained: Any = dict(pointsman.control.named_routers(changed))[gates[-1].layer]
    trained.select.bias[0] = 0.5
    with pytest.raises(ValueError, match=rf"'{gates[-1].layer}'.* a trained correction bias; DeepseekV2\w+ has none"):
        hf.materialize(changed)


def test_a_refused_layer_leaves_the_tables_before_it_alone() -> None:
    model = spread(zoo.tiny_model("deepseek_v4"))
    table = find_gates(model)[0]
    hf.replace_routers(model, [str(counterpart(table)), "xmoe"])
    router: Any = table.module.pointsman
    kept = table.module.get_buffer("tid2eid").clone()
    router.score.table.copy_(router.score.table.flip(0))
    with pytest.raises(ValueError, match="'xmoe'"):
        hf.materialize(model)
    assert torch.equal(table.module.get_buffer("tid2eid"), kept)


def test_specs_with_a_rule_that_cannot_be_used() -> None:
    for spec, words in (
        ("xmoe:gate=sigmoid", "'gate' works with 'smoe', 'loss-free', 'sparsemixer' without a mixer"),
        ("smoe:scale=2+similarity", "'scale' works with"),
        ("smoe:gate=softmax:variance=0.1", "its loss 'variance' would train nothing there"),
        ("loss-free:capacity=2", "never drops tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            hf.replace_routers(zoo.tiny_model("mixtral"), spec)


def test_a_loss_of_weight_zero_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(layer: LayerSpec, *, own: float = 0.0) -> Stages:
        return Stages(
            LinearScorer(layer.dim, layer.columns), losses={"own": Loss(lambda given: given.probs.sum(), own)}
        )

    monkeypatch.setitem(registry.ROUTERS, "mine", registry.Entry("mine", build, "", ""))
    hf.replace_routers(zoo.tiny_model("mixtral"), "mine")
    with pytest.raises(ValueError, match="its loss 'own' would train nothing there"):
        hf.replace_routers(zoo.tiny_model("mixtral"), "mine:own=1")


def test_options_of_training_do_not_matter_in_a_forward() -> None:
    assert same_forward("loss-free:scale=2:groups=8:kept=4", "loss-free:groups=8:kept=4:scale=2:update=none")
    assert not same_forward("loss-free", "loss-free:scale=2")
