"""Loads models and tokenizers from a folder or the hub, with one-line errors; the code that they bring is not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from pointsman._errors import RunError
from pointsman.hf.uneven import uneven

INFORMED: Any = {"output_loading_info": True, "ignore_mismatched_sizes": True}
"""Arguments with which a model and its loading info are returned, from which `whole_model` says what is wrong."""


def load_model(name: str, *, dtype: str = "auto", device: str = "cpu", masked: bool = False) -> Any:
    """A language model, of a decoder or of encoder and decoder; `masked`: of an encoder.

    RunError if it cannot be loaded, or lacks weights, which would be drawn at random.
    """

    def load() -> Any:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        factory: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if masked:
            factory = AutoModelForMaskedLM
        if hasattr(config, "uneven_experts"):
            factory = uneven(factory._model_mapping[type(config)])
        return factory.from_pretrained(name, dtype=dtype, trust_remote_code=False, **INFORMED)

    return whole_model(name, load).to(device)


def whole_model(name: str, load: Callable[[], tuple[Any, Any]]) -> Any:
    """The model of (model, loading info); RunError if it cannot be loaded, or if the saved one lacks weights."""
    model, info = load_named(name, "model", load)
    for tensor, saved, expected in sorted(info["mismatched_keys"])[:1]:
        raise RunError(f"{name}: {tensor} is {[*saved]} in the file, and {[*expected]} by its config.json")
    if missing := sorted(info["missing_keys"]):
        raise RunError(f"{name}: the saved {type(model).__name__} lacks {len(missing)} weights: {missing[0]}, …")
    return model


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer; RunError if it cannot be loaded."""

    def load() -> Any:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # some classes make one without a file
            raise ValueError("it has no token but special ones; are its files missing?")
        tokenizer("a")  # some settings of a wrong type are found by the first text only
        return tokenizer

    return load_named(name, "tokenizer", load)


def load_named(name: str, what: str, load: Callable[[], Any]) -> Any:
    path = Path(name)
    if path.is_file():
        raise RunError(f"{name}: this is a file; MODEL is a folder with a saved model, or a name on the hub")
    try:
        return load()
    except Exception as error:  # transformers, safetensors and tokenizers raise many types for a damaged folder
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = shorten(" ".join(lines if lines[0].rstrip().endswith(":") else lines[:1]), 400)
        where = "" if path.is_dir() else " (there is no such folder here)"
        raise RunError(f"{name}: no {what} that transformers can load{where}: {reason}") from None
