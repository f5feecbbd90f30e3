"""A model whose experts stay on the disk, for an audit of one that does not fit in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pointsman._errors import RunError
from pointsman.hf.loading import load_named, whole_model


def load_on_disk(name: str, folder: Path, *, dtype: str = "auto") -> Any:
    """A decoder whose experts stay on the disk: each forward reads one layer's after the other.

    Args:
        folder: gets the experts as files that can be read layer by layer, as large as the checkpoint's experts.

    Raises:
        RunError: it cannot be loaded, lacks weights, or has no mixture of experts.
    """
    factory: Any = AutoModelForCausalLM

    def build() -> Any:
        with torch.device("meta"):
            return factory.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False))

    shape = load_named(name, "model", build)
    experts = [layer for layer, _ in shape.named_modules() if layer.rpartition(".")[2] == "experts"]
    if not experts:
        raise RunError(f"{name}: {type(shape).__name__} has no experts that could stay on the disk")
    places = dict.fromkeys(experts, "disk")
    for layer, module in shape.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and not any(layer == one or layer.startswith(f"{one}.") for one in experts):
            places[layer] = "cpu"
    given: dict[str, Any] = {"device_map": places, "offload_folder": str(folder), "trust_remote_code": False}
    return whole_model(name, lambda: factory.from_pretrained(name, dtype=dtype, output_loading_info=True, **given))
