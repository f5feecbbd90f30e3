"""Settings, presets and the grammar of moe_layers."""

import pytest

from pointsman_lab.models.config import parse_moe_layers
from pointsman_lab.models.transformer_xl import TransformerXLConfig
from pointsman_lab.registry import preset_config, presets


@pytest.mark.parametrize(
    ("text", "layers", "sparse", "after"),
    [
        ("all", 3, {0, 1, 2}, None),
        ("every:2", 6, {0, 2, 4}, None),
        ("every:1", 2, {0, 1}, None),
        ("0,1,2,3", 8, {0, 1, 2, 3}, None),
        (" 3, 1", 4, {1, 3}, None),
        ("after:6", 12, set(), 6),
    ],
)
def test_moe_layers(text, layers, sparse, after):
    layout = parse_moe_layers(text, layers)
    assert (set(layout.sparse), layout.after) == (sparse, after)


@pytest.mark.parametrize(
    "text", ["", "none", "every:0", "every:x", "every", "after:5", "after:0", "all:2", "0,4", "1,1", "-1", "0;1", "1,"]
)
def test_wrong_moe_layers_are_one_clear_line(text):
    with pytest.raises(ValueError, match="moe_layers=") as error:
        TransformerXLConfig(10, num_layers=4, moe_layers=text)
    assert "\n" not in str(error.value)
    assert "allowed" in str(error.value) or "takes" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"dim": 7}, "dim=7"),
        ({"top_k": 17}, "top_k=17"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"activation": "rely"}, "did you mean 'relu'"),
        ({"experts": "bas"}, "experts='bas'"),
        ({"router": "hyperroutr"}, "did you mean 'hyperrouter'"),
        ({"router": "smoe|dense"}, "'dense' stands alone"),
        ({"router": "smoe|soft:slots=2"}, "'soft:slots=2' always uses all experts, it cannot be cycled"),
    ],
)
def test_wrong_settings_are_named(changes, words):
    with pytest.raises(ValueError, match=words) as error:
        TransformerXLConfig(vocab_size=204, **changes)
    assert "\n" not in str(error.value)


def test_presets_are_whole_settings():
    for name in presets():
        assert getattr(preset_config(name, 204), "vocab_size", 204) == 204
    assert preset_config("small", 204, num_experts=8).num_experts == 8
    assert preset_config("mutual-glam", 204).layout.sparse == {0, 2, 4}
    assert preset_config("tiny-glam", 204).layout.sparse == {0, 2}
    code = preset_config("mutual-glam-code", 204)  # MoE, FFN, none, none, twice
    assert (code.num_layers, code.layout.sparse, code.attention_only) == (8, {0, 4}, (2, 3, 6, 7))


def test_unknown_presets_and_settings_get_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'small'"):
        preset_config("smal", 204)
    with pytest.raises(ValueError, match="did you mean 'num_experts'"):
        preset_config("small", 204, num_expert=8)
