"""Loads models and tokenizers from a folder or the hub, with one-line errors; the code that they bring is not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from pointsman._errors import RunError
from pointsman.hf.uneven import uneven


def load_model(name: str, *, dtype: str = "auto", device: str = "cpu", masked: bool = False) -> Any:
    """A language model, of a decoder or of encoder and decoder; `masked`: of an encoder.

    Raises:
        RunError: it cannot be loaded, or lacks weights, which would be drawn at random.
    """

    def load() -> Any:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        factory: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if masked:
            factory = AutoModelForMaskedLM
        if hasattr(config, "uneven_experts"):
            factory = uneven(factory._model_mapping[type(config)])
        return factory.from_pretrained(name, dtype=dtype, output_loading_info=True, trust_remote_code=False)

    model, info = _load(name, "model", load)
    if missing := sorted(info["missing_keys"]):
        raise RunError(
            f"{name}: the saved model lacks {len(missing)} weights of {type(model).__name__}: {missing[0]}, …"
        )
    return model.to(device)


def load_on_disk(name: str, folder: Path, *, dtype: str = "auto") -> Any:
    """A decoder whose experts stay on the disk: each forward reads one layer's after the other.

    Args:
        folder: gets the experts as files that can be read layer by layer, as large as the checkpoint's experts.

    Raises:
        RunError: it cannot be loaded, or has no mixture of experts.
    """
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        shape = factory.from_config(AutoConfig.from_pretrained(name, trust_remote_code=False))
    experts = [layer for layer, _ in shape.named_modules() if layer.rpartition(".")[2] == "experts"]
    if not experts:
        raise RunError(f"{name}: {type(shape).__name__} has no experts that could stay on the disk")
    places = dict.fromkeys(experts, "disk")
    for layer, module in shape.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and not any(layer == one or layer.startswith(f"{one}.") for one in experts):
            places[layer] = "cpu"
    given: dict[str, Any] = {"device_map": places, "offload_folder": str(folder), "trust_remote_code": False}
    return _load(name, "model", lambda: factory.from_pretrained(name, dtype=dtype, **given))


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer; RunError if it cannot be loaded."""

    def load() -> Any:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer("a")  # some settings of a wrong type are found by the first text only
        return tokenizer

    return _load(name, "tokenizer", load)


def _load(name: str, what: str, load: Callable[[], Any]) -> Any:
    path = Path(name)
    if path.is_file():
        raise RunError(f"{name}: this is a file; MODEL is a folder with a saved model, or a name on the hub")
    try:
        return load()
    except Exception as error:  # transformers, safetensors and tokenizers raise many types for a damaged folder
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
        where = "" if path.is_dir() else " (there is no such folder here)"
        raise RunError(f"{name}: no {what} that transformers can load{where}: {reason}") from None
