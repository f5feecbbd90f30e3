"""Models, assembled from blocks; each takes a router spec."""

from pointsman_lab.models.config import ModelConfig, TransformerXLConfig
from pointsman_lab.models.decoder import Decoder, DecoderConfig
from pointsman_lab.models.encoder import Encoder, EncoderConfig
from pointsman_lab.models.families import FAMILIES, MODEL_PRESETS, build_model, preset_config
from pointsman_lab.models.memory import Memory, Output
from pointsman_lab.models.transformer_xl import TransformerXL
from pointsman_lab.models.vit import VisionTransformer, VisionTransformerConfig

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
