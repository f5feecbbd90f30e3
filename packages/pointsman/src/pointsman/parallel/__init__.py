"""Many processes: how ranks share a model."""

from importlib import import_module
from typing import Any

STORE = "POINTSMAN_RANKS_STORE"
"""Environment variable: a file through which the ranks find each other, instead of torchrun's address."""


def __getattr__(name: str) -> Any:  # torch.distributed is imported where it is used
    if name in ("Layout", "parallelize"):
        return getattr(import_module(f"pointsman.parallel.{'layout' if name == 'Layout' else 'shard'}"), name)
    raise AttributeError(f"module 'pointsman.parallel' has no attribute {name!r}")
