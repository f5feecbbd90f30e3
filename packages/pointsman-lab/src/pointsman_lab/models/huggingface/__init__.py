"""Decoders as models of transformers, and models of transformers as decoders: same weights, same logits."""

from pointsman_lab.models.huggingface.convert import (
    NoClassError,
    difference,
    from_transformers,
    load_theirs,
    read_config,
    to_transformers,
)
from pointsman_lab.models.huggingface.reading import open_config

__all__ = [
    "NoClassError",
    "difference",
    "from_transformers",
    "load_theirs",
    "open_config",
    "read_config",
    "to_transformers",
]
