"""Decoders as models of transformers and back: the class that is chosen, the logits, and what is refused."""

from typing import Any

import pytest
import torch

from pointsman._errors import RunError
from pointsman.control import named_routers
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.huggingface.convert import difference, load_theirs, to_transformers
from pointsman_lab.models.huggingface.reading import read_config

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "num_layers": 3, "dim": 32, "num_heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_dim": 40,
    "expert_hidden_dim": 24, "num_experts": 8, "init_std": 0.2,
}  # fmt: skip


def build(**changes: Any) -> Decoder:
    model = Decoder(DecoderConfig(**{**SHAPE, **changes}))
    for _, router in named_routers(model):
        if isinstance(bias := getattr(router.select, "bias", None), torch.Tensor):
            bias.normal_(0, 0.3)
    return model


def from_transformers(theirs: Any, router: str | None = None) -> Decoder:
    """The decoder with the weights of a model of transformers."""
    config, found = read_config(theirs.config, "there", router)
    model = Decoder(config)
    load_theirs(model, theirs.state_dict(), found.shared)
    return model.eval()


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "softmax": ("Mixtral", {"router": "smoe:bias=false"}, "smoe:bias=false"),
    "frozen": ("Mixtral", {"router": "smoe-dropout"}, "smoe:bias=false"),
    "generated": ("Mixtral", {"router": "hyperrouter:bias=false:hyper_dim=8"}, "smoe:bias=false"),
    "norm of all heads": ("Olmoe", {"router": "smoe:bias=false:renormalize=false", "qk_norm": "all"},
                          "smoe:bias=false:renormalize=false"),
    "dense layers": ("Qwen3Moe", {"router": "smoe:bias=false", "qk_norm": "head", "moe_layers": "every:2",
                                  "tied": False}, "smoe:bias=false"),
    "shared": ("Qwen2Moe", {"router": "smoe:bias=false:scale=2", "shared_experts": 2},
                       "smoe:bias=false"),
    "shared, with a gate": ("Qwen2Moe", {"router": "smoe:bias=false", "shared_experts": 1, "shared_gate": True},
                            "smoe:bias=false"),
    "dense layers, no norm": ("Qwen2Moe", {"router": "smoe:bias=false", "moe_layers": "1"}, "smoe:bias=false"),
    "loss-free": ("Dots1", {"router": "loss-free:groups=4:kept=2:scale=2.5", "qk_norm": "head", "shared_experts": 1,
                            "moe_layers": "last:2"}, "loss-free:groups=4:kept=2:scale=2.5"),
    "sigmoid": ("Glm4Moe", {"router": "smoe:gate=sigmoid:bias=false", "activation": "gelu"}, "loss-free"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_the_logits_stay(name: str) -> None:
    kind, changes, spec = CASES[name]
    model = build(**changes)
    theirs = to_transformers(model, top_k=2, length=64)
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    assert difference(model, theirs, 2) < 1e-5
    again = from_transformers(theirs)
    assert again.config.router == spec
    assert again.config.context_length == 64
    assert difference(again, theirs, 2) < 1e-5


@pytest.mark.parametrize("trained", [2, 8])
def test_groups_are_kept_by_the_k_of_the_export(trained: int) -> None:
    model = build(num_experts=16, router="loss-free:groups=4:kept=1", top_k=trained)
    assert [to_transformers(model, top_k=k, length=64).config.topk_group for k in (2, 8)] == [1, 2]


@pytest.mark.parametrize("spec", ["smoe:nulls=2", "loss-free:nulls=2"])
def test_a_router_with_virtual_experts_starts_anew(spec: str) -> None:
    theirs = to_transformers(build(router="smoe:bias=false"), top_k=2, length=64)
    model = from_transformers(theirs, spec)
    assert load_theirs(model, theirs.state_dict(), None) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"router": "smoe"}, "layer layers.0: the router 'smoe' has a bias"),
        ({"router": "smoe:bias=false|xmoe"}, "layer layers.1: the router 'xmoe' has scores that no linear gate gives"),
        ({"router": "smoe:bias=false|loss-free"}, "layer layers.1 routes by 'loss-free'"),
        ({"router": "smoe:bias=false+similarity"}, "mixes tokens"),
        ({"router": "smoe:bias=false:capacity=1"}, "drops tokens"),
        ({"router": "smoe:bias=false:nulls=2"}, "has virtual experts"),
        ({"router": "smoe:bias=false:weigh=input"}, "weighs the inputs of experts"),
        ({"router": "loss-free:groups=8:kept=4"}, "groups of one expert"),
        ({"router": "loss-free:biased=logits"}, "ranks by logits"),
        ({"router": "top-p"}, "layer layers.0"),
        ({"router": "loss-free:groups=4:kept=2:group_score=max"}, "group_score=max"),
        ({"router": "smoe:bias=false", "qk_norm": "head", "shared_experts": 1}, "Qwen3Moe: it has no shared experts"),
        ({"router": "loss-free", "moe_layers": "every:2"}, "its dense layers come first"),
        ({"router": "smoe:bias=false", "gated": False}, "not gated"),
        ({"router": "smoe:bias=false", "attention_only": (1,), "moe_layers": "0,2"}, "layers.1 has no feed-forward"),
        ({"router": "smoe:bias=false", "moe_layers": "after:1"}, "adds a layer of its own"),
        ({"router": "dense"}, "no layer is sparse"),
    ],
)
def test_what_no_class_expresses_is_refused(changes: dict[str, Any], says: str) -> None:
    model = build(**changes)
    for _, router in named_routers(model):
        if isinstance(bias := getattr(router.score, "bias", None), torch.nn.Parameter):
            bias.data.fill_(0.1)
    with pytest.raises(RunError, match=says):
        to_transformers(model, top_k=2, length=64)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("deepseek_v3", {}, "latent attention"),
        ("llama", {}, "'llama' is no class that a decoder can be"),
        ("mixtral", {"sliding_window": 8, "max_position_embeddings": 64}, "sliding windows"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding windows"),
        ("qwen2_moe", {}, "biases in its attention"),
        ("glm4_moe", {}, "partial rotary positions"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("mixtral", {"hidden_act": "tanh"}, "the activation 'tanh'"),
        ("mixtral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
    ],
)
def test_settings_that_no_decoder_has_are_refused(kind: str, changes: dict[str, Any], says: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **changes)
    with pytest.raises(RunError, match=says):
        read_config(config, "there")
