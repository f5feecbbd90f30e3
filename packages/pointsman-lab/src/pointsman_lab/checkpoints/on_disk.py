"""A model whose experts stay on the disk, for an audit of one that does not fit in memory."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pointsman._errors import RunError
from pointsman.hf.loading import INFORMED, load_named, whole_model


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
    tensors = [*shape.named_parameters(remove_duplicate=False), *shape.named_buffers(remove_duplicate=False)]
    memory = [tensor for tensor, _ in tensors if not any(tensor.startswith(f"{one}.") for one in experts)]
    places = {**dict.fromkeys(memory, "cpu"), **dict.fromkeys(experts, "disk")}
    given: dict[str, Any] = {"device_map": places, "offload_folder": str(folder), "trust_remote_code": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following device_map keys do not match any submodules")  # but tensors
        try:
            model = whole_model(name, lambda: factory.from_pretrained(name, dtype=dtype, **INFORMED, **given))
        except RunError as error:
            if "No space left" in str(error):
                raise RunError(f"{folder}: no space for the experts of {name}; set TMPDIR to another folder") from None
            raise
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    except RuntimeError as error:  # DBRX and JetMoE multiply with weights of modules that they do not call
        raise RunError(f"{name}: {type(model).__name__} does not run with its experts on the disk ({error})") from None
    return model
