"""Decoders as models of transformers, and models of transformers as decoders: same weights, same logits."""

from pointsman_lab.models.huggingface.convert import (
    NoClassError,
    difference,
    from_transformers,
    load_theirs,
    read_config,
    to_transformers,
)

__all__ = ["NoClassError", "difference", "from_transformers", "load_theirs", "read_config", "to_transformers"]
