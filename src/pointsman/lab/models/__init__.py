"""Models, assembled from blocks; each takes a router spec."""

from pointsman.lab.models.config import ModelConfig, TransformerXLConfig
from pointsman.lab.models.decoder import Decoder, DecoderConfig
from pointsman.lab.models.encoder import Encoder, EncoderConfig
from pointsman.lab.models.families import FAMILIES, MODEL_PRESETS, build_model, preset_config
from pointsman.lab.models.memory import Memory, Output
from pointsman.lab.models.transformer_xl import TransformerXL
from pointsman.lab.models.vit import VisionTransformer, VisionTransformerConfig

__all__ = [
    "FAMILIES",
    "MODEL_PRESETS",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "Memory",
    "ModelConfig",
    "Output",
    "TransformerXL",
    "TransformerXLConfig",
    "VisionTransformer",
    "VisionTransformerConfig",
    "build_model",
    "preset_config",
]
