"""The numbers of HyperRouter's Tables A3 and A4, from the model itself."""

from dataclasses import replace

import pytest
import torch

from pointsman import build_router
from pointsman.routers.papers.topk import LinearScorer
from pointsman_lab.models.cost import (
    Protocol,
    cost_a_token,
    cost_row,
    cost_table,
    inference_flops,
    parameter_table,
    router_products,
)  # fmt: skip
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.registry import find_preset, preset_config

SMALL = preset_config("small", 204)


def test_parameters_of_the_small_model():
    table = cost_row(SMALL, [1]).parameters
    assert table.backbone == 19_505_356
    assert table.attention == 4 * 655_360 + 1_024
    assert table.experts + table.feed_forward == 4 * (4_207_104 - 512)
    assert table.norms == 4 * 2 * 512
    assert table.embeddings == 52_428
    assert (table.router_trainable, table.other) == (16_448, 0)
    assert table.trainable == 19_505_356 + 16_448


def test_hyperrouter_trains_its_embeddings_only():
    row = cost_row(preset_config("small", 204, router="hyperrouter"), [1])
    assert row.parameters.router_trainable == 1_024
    assert row.fixed_a_layer == 1_122_576
    assert row.parameters.router_fixed == 4 * 1_122_576
    assert row.parameters.backbone == 19_505_356
    shared = cost_row(preset_config("small", 204, router="hyperrouter:share=true"), [1])
    assert shared.parameters.router_fixed == 1_122_576


def test_flops_of_the_small_model():
    rows = cost_table(SMALL, ["smoe", "hyperrouter", "smoe-dropout", "dense"])
    for row in rows[:3]:
        assert {k: f"{flops / 1e10:.3f}" for k, flops in row.flops.items()} == {
            1: "3.735",
            2: "4.004",
            4: "4.541",
            8: "5.614",
            16: "7.762",
        }
    assert {k: f"{flops / 1e10:.3f}" for k, flops in rows[3].flops.items()} == {16: "7.758"}
    with torch.device("meta"):
        model = TransformerXL(SMALL)
    assert f"{inference_flops(model, 0) / 1e10:.3f}" == "3.467"


@pytest.mark.parametrize(("experts", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (12, [1, 2, 4, 8, 12])])
def test_the_number_of_experts_is_the_last_k(experts, ks):
    [row] = cost_table(replace(SMALL, num_experts=experts, top_k=1), ["smoe"])
    assert list(row.flops) == ks


@pytest.mark.parametrize(
    ("router", "same"),
    [
        ("stable", "mask"), ("hyperrouter@stable", "stable"), ("hyperrouter@vmoe", "vmoe"),
        ("hyperrouter:generate=expert@mask", "mask"), ("hash:columns=2:gate=softmax", "mask"),
    ],
)  # fmt: skip
def test_look_ups_and_what_is_generated_cost_no_products(router, same):
    one, other = (cost_row(replace(SMALL, router=spec), [2]).flops[2] for spec in (router, same))
    light = 2 * 4 * 1280 * 16 * 50 if router == "stable" else 0
    assert one == other + light


def test_what_a_scorer_says_of_its_cost(monkeypatch):
    def products(spec):
        return router_products(build_router(spec, dim=8, num_experts=4, vocab_size=16))

    wide = products("smoe")
    monkeypatch.setattr(LinearScorer, "cost", lambda self: 5 * self.weight.shape[0])
    assert (wide, products("smoe"), products("smoe@mask")) == (32, 20, 20)


def test_no_token_has_more_than_the_experts_that_its_id_sees():
    def costs(visible, k):
        config = replace(SMALL, router=f"mask:visible={visible}", top_k=k)
        cost = cost_a_token(config, 16, 0)
        return cost_row(config, [k]).flops[k], cost["flops"], cost["active"]

    assert costs(2, 4) == costs(2, 2) == costs(16, 2)


def test_of_soft_moe_all_is_active():
    shape = replace(SMALL, num_layers=1, dim=16, head_dim=8, hidden_dim=32, num_experts=8, allow_non_causal=True)
    one, two = (cost_a_token(replace(shape, router="soft", top_k=k), 16, 0) for k in (1, 2))
    assert one["active"] == one["total"] == two["active"]
    assert (one["top_k"], two["top_k"]) == (1, 2)


@pytest.mark.parametrize("router", ["smoe", "hyperrouter", "smoe-dropout", "thor", "dense"])
@pytest.mark.parametrize("layout", ["all", "every:2", "after:1"])
def test_components_add_up_to_all_parameters(router, layout):
    config = TransformerXLConfig(
        50, num_layers=3, dim=16, num_heads=2, head_dim=8, hidden_dim=12, num_experts=4, router=router,
        moe_layers=layout, pre_norm=True,
    )  # fmt: skip
    model = TransformerXL(config)
    table = parameter_table(model)
    assert table.trainable == sum(parameter.numel() for parameter in model.parameters())
    assert table.other == 0
    assert cost_row(config, [2]).parameters == table


def test_dense_has_the_parameters_of_the_experts_up_to_output_biases():
    sparse, dense = (row.parameters for row in cost_table(SMALL, ["smoe", "dense"]))
    assert sparse.experts - dense.feed_forward == 4 * 15 * 256


def test_flops_equal_what_a_forward_multiplies():
    """Counted by hand from the linear maps that a forward runs, with one token more to see what grows."""
    config = TransformerXLConfig(50, num_layers=1, dim=16, num_heads=2, head_dim=4, hidden_dim=12, num_experts=4)
    with torch.device("meta"):
        model = TransformerXL(config)
    protocol = Protocol(batch=2, length=3, memory=5)
    attention = 2 * 8 * 16 * 24 + 8 * 16 * 8 + 6 * 8 * 16
    assert inference_flops(model, 3, protocol) == 2 * (attention + 6 * (3 * 2 * 16 * 12 + 16 * 4))


@pytest.mark.parametrize(
    ("name", "kind", "changes", "total", "active"),
    [
        ("olmoe-1b-7b", "olmoe", {"intermediate_size": 1024}, 6_919_161_856, 1.3e9),
        (
            "qwen3-30b-a3b", "qwen3_moe",
            {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
             "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
             "vocab_size": 151_936}, 30_532_122_624, 3.3e9,
        ),
        ("deepseek-like", "deepseek_v3", {}, None, None),
    ],
)  # fmt: skip
def test_published_shapes_have_the_published_parameters(name, kind, changes, total, active):
    """Of transformers' model with the published configuration; DeepSeek's without attention, which is another one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = preset_config(name, find_preset(name)["vocabulary"], router=find_preset(name)["router"])
    row = cost_row(config, [8]).parameters
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes))
    counted = {key: value.numel() for key, value in theirs.named_parameters()}
    attention = sum(value for key, value in counted.items() if ".self_attn." in key)
    norms = sum(value for key, value in counted.items() if ".self_attn." in key and "norm" in key)
    if total is None:
        assert row.trainable - row.attention == sum(counted.values()) - attention
        return
    assert row.trainable == sum(counted.values()) == total
    assert row.attention == attention - norms
    idle = row.experts * (config.num_experts - config.top_k) // config.num_experts
    assert row.trainable - idle == pytest.approx(active, rel=0.02)
