"""The registry of families, layouts of sparse layers, and the plain baseline."""

from dataclasses import replace

import pytest
import torch

from pointsman_lab.models.config import build_model, parse_moe_layers
from pointsman_lab.models.cost import cost_a_token, cost_row, inference_flops
from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from pointsman_lab.registry import family, preset_config, presets


def test_every_preset_is_of_a_family_that_builds_it() -> None:
    for name in presets():
        config = preset_config(name, 64)
        assert type(config) is family(config.family)
        with torch.device("meta"):
            assert build_model(config).config is config


def test_an_unknown_family_has_a_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'encoder'"):
        family("encoders")


@pytest.mark.parametrize(
    ("text", "sparse"),
    [
        ("every:2", {0, 2, 4, 6}), ("every:2:1", {1, 3, 5, 7}), ("every:3:2", {2, 5}), ("last:2", {6, 7}),
        ("last:2:2", {5, 7}), ("last:4:2", {1, 3, 5, 7}), ("last:1", {7}), ("0, 4", {0, 4}), ("all", set(range(8))),
    ],
)  # fmt: skip
def test_layouts(text: str, sparse: set[int]) -> None:
    assert parse_moe_layers(text, 8) == (sparse, None)


@pytest.mark.parametrize(
    "text", ["last:0", "last:5:2", "last:2:0", "last:2:x", "every:2:8", "every:1:1:1", "after:2:1", "last", "9", "1,1"]
)
def test_bad_layouts_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="moe_layers=") as error:
        parse_moe_layers(text, 8)
    assert "\n" not in str(error.value)


SMALL = TransformerXLConfig(
    vocab_size=20, num_layers=3, dim=16, num_heads=2, head_dim=8, hidden_dim=12, num_experts=4, top_k=1
)


def test_plain_costs_what_one_expert_costs() -> None:
    sparse, plain = (build_model(replace(SMALL, router=router)) for router in ("smoe", "plain"))
    assert inference_flops(plain, 1) == inference_flops(sparse, 1) - 2 * 3 * 1280 * 4 * 16  # the router's scores
    assert plain.layers[0].feed_forward_dropout == sparse.layers[0].feed_forward_dropout
    assert list(cost_row(replace(SMALL, router="plain"), [1, 2]).flops) == [4]
    for name, parameter in plain.named_parameters():
        if "feed_forward." not in name:
            assert torch.equal(parameter, dict(sparse.named_parameters())[name]), name


def test_plain_leaves_an_extra_layer_out() -> None:
    model = TransformerXL(replace(SMALL, router="plain", moe_layers="after:2"))
    assert model.inserted is None
    assert TransformerXL(replace(SMALL, router="dense", moe_layers="after:2")).inserted is not None


@pytest.mark.parametrize(
    ("layers", "experts"), [("all", "ffn"), ("after:2", "ffn"), ("after:2", "base"), ("every:2", "base")]
)
@pytest.mark.parametrize("k", [1, 2])
def test_the_matched_dense_model_costs_what_k_experts_cost(layers: str, experts: str, k: int) -> None:
    shape = replace(SMALL, moe_layers=layers, experts=experts, top_k=k, pre_norm=True)
    sparse, dense = (build_model(replace(shape, router=router)) for router in ("smoe", "dense-matched"))
    places = {"all": 3, "after:2": 1, "every:2": 2}[layers]
    assert inference_flops(dense, k) == inference_flops(sparse, k) - 2 * places * 1280 * 4 * 16  # the router's scores
    assert (dense.inserted is None) == (sparse.inserted is None)
    one, other = (cost_a_token(replace(shape, router=router), 8, 0) for router in ("smoe", "dense-matched"))
    assert other["active"] == other["total"] == sum(parameter.numel() for parameter in dense.parameters())
    assert one["total"] == sum(parameter.numel() for parameter in sparse.parameters())
    assert 0 <= one["active"] - other["active"] < 0.1 * other["active"]  # the router, and k output biases for one
    tokens = torch.arange(10).reshape(2, 5)
    dense(tokens).logits.sum().backward()
    assert all(parameter.grad is not None for name, parameter in dense.named_parameters() if "feed_forward" in name)
    if layers == "after:2" and experts == "base":
        plain = build_model(replace(shape, router="plain")).eval()
        assert torch.equal(dense.eval()(tokens).logits, plain(tokens).logits)  # it starts as the identity


def test_layers_without_feed_forward() -> None:
    config = replace(SMALL, num_layers=4, top_k=2, moe_layers="0,3", attention_only=(1,), expert_hidden_dim=20)
    model = TransformerXL(config)
    assert [layer.moe is not None for layer in model.layers] == [True, False, False, True]
    assert [layer.feed_forward is not None for layer in model.layers] == [False, False, True, False]
    assert not [name for name, _ in model.layers[1].named_parameters() if "feed_forward" in name]
    assert model.layers[0].moe.experts.w_in.shape == (4, 20, 16)
    assert model(torch.randint(20, (2, 5))).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"attention_only=\(0,\)"):
        replace(config, attention_only=(0,))
    with pytest.raises(ValueError, match="layer numbers from 0 to 3"):
        replace(config, attention_only=(4,))
