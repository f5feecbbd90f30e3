"""Models, assembled from blocks; each takes a router spec. A name imports its module when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman_lab.models.config import ModelConfig, build_model
    from pointsman_lab.models.decoder import Decoder, DecoderConfig
    from pointsman_lab.models.encoder import Encoder, EncoderConfig
    from pointsman_lab.models.memory import Memory, Output
    from pointsman_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
    from pointsman_lab.registry import preset_config

_HOMES = {
    **dict.fromkeys(("ModelConfig", "build_model"), "models.config"),
    **dict.fromkeys(("Decoder", "DecoderConfig"), "models.decoder"),
    **dict.fromkeys(("Encoder", "EncoderConfig"), "models.encoder"),
    **dict.fromkeys(("Memory", "Output"), "models.memory"),
    **dict.fromkeys(("TransformerXL", "TransformerXLConfig"), "models.transformer_xl"),
    "preset_config": "registry",
}

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "Memory",
    "ModelConfig",
    "Output",
    "TransformerXL",
    "TransformerXLConfig",
    "build_model",
    "preset_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pointsman_lab.{_HOMES[name]}"), name)
