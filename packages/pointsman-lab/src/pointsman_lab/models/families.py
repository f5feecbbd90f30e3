"""The families of models by name, building one, and presets of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from pointsman._errors import did_you_mean
from pointsman_lab.models.config import ModelConfig, TransformerXLConfig
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.encoder import Encoder, EncoderConfig
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.models.translation import TranslationConfig, Translator
from pointsman_lab.models.vit import VisionTransformer, VisionTransformerConfig

OLDEST = "transformer-xl"
"""The family of runs whose config.json names none."""


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        config: its settings.
        build: the model that they describe.
        summary: one line.
    """

    config: type[ModelConfig]
    build: Callable[[Any], Any]
    summary: str


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "transformer-xl": Family(TransformerXLConfig, TransformerXL, "a language model with memory"),
        "decoder": Family(DecoderConfig, Decoder, "a language model of today, with a cache of keys and values"),
        "encoder": Family(EncoderConfig, Encoder, "a bidirectional encoder with a masked-language-model head"),
        "encoder-decoder": Family(TranslationConfig, Translator, "an encoder and a decoder, for translation"),
        "vit": Family(VisionTransformerConfig, VisionTransformer, "a vision transformer, which classifies images"),
    }
)


def family(name: object) -> Family:
    """The family of this name.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"unknown model family {name!r}: {did_you_mean(str(name), FAMILIES)}")
    return FAMILIES[name]


def build_model(config: ModelConfig) -> Any:
    """The model that these settings describe, with its initial weights."""
    return family(config.family).build(config)


_TINY = {
    "num_layers": 2, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 128, "num_experts": 8, "dropout": 0.0,
    "pre_norm": True, "init_std": 0.06,
}  # fmt: skip
_VMOE = {"family": "vit", "loss": "sigmoid", "representation": 512, "expert_dropout": 0.2, "equal_experts": True}
_EVERY_2 = {"num_experts": 32, "moe_layers": "every:2:1"}

MODEL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _TINY,
    "tiny-decoder": {
        "family": "decoder", "num_layers": 2, "dim": 128, "num_heads": 4, "kv_heads": 2, "head_dim": 32,
        "hidden_dim": 88, "num_experts": 8, "qk_norm": "head", "init_std": 0.06,
    },
    "tiny-mlm": {
        "family": "encoder", "num_layers": 4, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 256,
        "num_experts": 8, "moe_layers": "after:2", "norm": "pre", "dropout": 0.0, "attention_dropout": 0.0,
        "init_std": 0.06,
    },
    "tiny-mt": {
        "family": "encoder-decoder", "num_layers": 3, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 256,
        "expert_hidden_dim": 128, "num_experts": 8, "dropout": 0.1, "init_std": 0.06, "max_length": 128,
    },
    "xmoe-base": {"family": "encoder"},
    "xmoe-torchscale": {
        "family": "encoder", "num_experts": 64, "top_k": 2, "moe_layers": "every:2:1", "experts": "ffn",
        "positions": "t5",
    },
    "olmoe-1b-7b": {
        "family": "decoder", "num_layers": 16, "dim": 2048, "num_heads": 16, "head_dim": 128, "hidden_dim": 1024,
        "num_experts": 64, "top_k": 8, "qk_norm": "all", "tied": False, "context_length": 4096,
    },
    "qwen3-30b-a3b": {
        "family": "decoder", "num_layers": 48, "dim": 2048, "num_heads": 32, "kv_heads": 4, "head_dim": 128,
        "hidden_dim": 768, "num_experts": 128, "top_k": 8, "qk_norm": "head", "tied": False, "norm_eps": 1e-6,
        "rope_theta": 1e6, "context_length": 40960,
    },
    "deepseek-like": {
        "family": "decoder", "num_layers": 61, "dim": 7168, "num_heads": 128, "kv_heads": 8, "head_dim": 128,
        "hidden_dim": 18432, "expert_hidden_dim": 2048, "num_experts": 256, "top_k": 8, "shared_experts": 1,
        "moe_layers": "last:58", "tied": False, "norm_eps": 1e-6, "rope_scaling": "yarn", "rope_factor": 40.0,
        "rope_length": 4096, "context_length": 163840,
    },
    "small": {"num_layers": 4},
    "medium": {"num_layers": 8},
    "large": {"num_layers": 12},
    "mutual-medium": {"num_layers": 6, "dim": 352, "num_heads": 8, "head_dim": 44, "hidden_dim": 352},
    "mutual-large": {"num_layers": 12, "dim": 512, "num_heads": 8, "head_dim": 64, "hidden_dim": 512},
    "mutual-glam": {
        "num_layers": 6, "dim": 352, "num_heads": 8, "head_dim": 44, "hidden_dim": 352, "moe_layers": "every:2",
    },
    "mutual-glam-code": {
        "num_layers": 8, "dim": 352, "num_heads": 8, "head_dim": 44, "hidden_dim": 352, "moe_layers": "0,4",
        "attention_only": (2, 3, 6, 7),
    },
    "tiny-glam": {**_TINY, "num_layers": 4, "moe_layers": "every:2"},
    "tiny-vit": {
        "family": "vit", "image_size": 32, "patch": 4, "num_classes": 10, "num_layers": 4, "dim": 128, "num_heads": 4,
        "head_dim": 32, "hidden_dim": 256, "expert_hidden_dim": 128, "pooling": "mean", "init_std": 0.06,
    },
    "vmoe-s32-last2": {**_VMOE},
    "vmoe-s32-every2": {**_VMOE, **_EVERY_2},
    "vmoe-b16-every2": {
        **_VMOE, **_EVERY_2, "patch": 16, "num_layers": 12, "dim": 768, "num_heads": 12, "hidden_dim": 3072,
        "representation": 768,
    },
    "vmoe-l16-every2": {
        **_VMOE, **_EVERY_2, "patch": 16, "num_layers": 24, "dim": 1024, "num_heads": 16, "hidden_dim": 4096,
        "representation": 1024,
    },
    "vmoe-h14-every2": {
        **_VMOE, **_EVERY_2, "patch": 14, "num_layers": 32, "dim": 1280, "num_heads": 16, "head_dim": 80,
        "hidden_dim": 5120, "representation": 1280,
    },
}  # fmt: skip
"""Shapes by name, with "family" where it is not the Transformer-XL.

`tiny-mlm` is `xmoe-base` for two CPU cores; `xmoe-base` has the sizes that X-MoE gives (4.1), `xmoe-torchscale` those
of its released recipe (without deepnorm). `tiny-decoder` has experts of about as many weights as `tiny`.
`olmoe-1b-7b` and `qwen3-30b-a3b` are the published shapes, `deepseek-like` is DeepSeek-V3 with grouped-query attention
in the place of its latent attention. `small`, `medium`, `large` are HyperRouter's (the paper's text), `mutual-*`
Mutual-Inform's (`-code`: that of its code), `vmoe-SIZE-LAYOUT` V-MoE's (image size and classes become the data's).
"""

PUBLISHED_ROUTERS: Mapping[str, str] = {
    "olmoe-1b-7b": "smoe:bias=false:renormalize=false",
    "qwen3-30b-a3b": "smoe:bias=false",
    "deepseek-like": "loss-free:groups=8:kept=4:scale=2.5",
}
"""The published router of a shape."""
PUBLISHED_VOCABULARIES: Mapping[str, int] = {"olmoe-1b-7b": 50_304, "qwen3-30b-a3b": 151_936, "deepseek-like": 129_280}
"""The published number of tokens of a shape."""


def preset_config(preset: str, vocab_size: int, **changes: Any) -> Any:
    """The settings of a preset, with changes by field name: a `ModelConfig` of the preset's family.

    `vocab_size` is for families that read tokens.

    Raises:
        ValueError: an unknown preset or field, with the nearest name.
    """
    if preset not in MODEL_PRESETS:
        raise ValueError(f"unknown preset {preset!r}: {did_you_mean(preset, MODEL_PRESETS)}")
    values = dict(MODEL_PRESETS[preset])
    config = family(values.pop("family", OLDEST)).config
    known = {field.name for field in fields(config)}
    if config.reads_tokens:
        values["vocab_size"] = vocab_size
    for name in changes:
        if name not in known:
            raise ValueError(f"unknown model setting {name!r}: {did_you_mean(name, known)}")
    return config(**{**values, **changes})
