"""Models, assembled from blocks; each takes a router spec."""

from pointsman.lab.models.config import MODEL_PRESETS, TransformerXLConfig, preset_config
from pointsman.lab.models.transformer_xl import Memory, Output, TransformerXL

__all__ = ["MODEL_PRESETS", "Memory", "Output", "TransformerXL", "TransformerXLConfig", "preset_config"]
