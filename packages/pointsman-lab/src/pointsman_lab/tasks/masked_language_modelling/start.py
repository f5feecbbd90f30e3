"""Training that starts from XLM-R's weights (Conneau et al. 2020): its embeddings, layers and head, and sparse layers.

A sparse layer in the place of a feed-forward sublayer starts with copies of it as its experts (sparse upcycling); one
that is added (`moe_layers="after:l"`) starts as the identity, as X-MoE's experts do.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman.layer import MoE
from pointsman_lab.models.config import build_model
from pointsman_lab.models.encoder import Encoder
from pointsman_lab.models.huggingface.reading import open_config
from pointsman_lab.training.config import RunConfig

_FIRST = 2  # XLM-R's first position is one after that of the padding
_LAYER = {
    "attention.self.query": "attention.query", "attention.self.key": "attention.key",
    "attention.self.value": "attention.value", "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "feed_forward_norm",
}  # fmt: skip
_HEAD = {"dense": "project", "layer_norm": "norm"}


def start_config(config: RunConfig, folder: str, router: str | None) -> RunConfig:
    """The settings of a run that starts from a folder: its sizes, with the sparse layers of the preset."""
    theirs = open_config(folder)
    if theirs.model_type != "xlm-roberta":
        raise RunError(f"{folder}: {theirs.model_type!r} is no model that an encoder can be: allowed is 'xlm-roberta'")
    for name, allowed in (
        ("hidden_act", "gelu"), ("layer_norm_eps", 1e-5), ("type_vocab_size", 1), ("pad_token_id", 1),
        ("is_decoder", False), ("tie_word_embeddings", True),
    ):  # fmt: skip
        if getattr(theirs, name, allowed) != allowed:
            raise RunError(f"{folder}: {name}={getattr(theirs, name)!r}: an encoder has {allowed!r}")
    heads = int(theirs.num_attention_heads)
    own: Any = config.model
    try:
        model: Any = replace(
            own, vocab_size=int(theirs.vocab_size), num_layers=int(theirs.num_hidden_layers),
            dim=int(theirs.hidden_size), num_heads=heads, head_dim=int(theirs.hidden_size) // heads,
            hidden_dim=int(theirs.intermediate_size), expert_hidden_dim=None, activation="gelu", positions="learned",
            max_length=int(theirs.max_position_embeddings) - _FIRST, norm="post", embedding_norm=True,
            dropout=float(theirs.hidden_dropout_prob), attention_dropout=float(theirs.attention_probs_dropout_prob),
            init_std=float(theirs.initializer_range), router=own.router if router is None else router,
        )  # fmt: skip
    except ValueError as error:
        raise RunError(f"{folder}: {error}") from None
    return replace(config, model=model, own={**config.own, "start_from": folder, "pieces": model.vocab_size})


def started(config: RunConfig) -> tuple[Encoder, str]:
    """The model at step 0, and a line that says where its weights are from."""
    from pointsman.hf.loading import load_model

    folder = config.own["start_from"]
    model: Encoder = build_model(config.model)
    copied = load_xlm_roberta(model, load_model(folder, dtype="float32", masked=True).state_dict(), folder)
    sparse = f"; the experts of {copied} sparse layers start as copies of its feed-forward layers" if copied else ""
    added = "; the added layer starts as the identity" if model.inserted is not None else ""
    return model, f"the model starts from the weights of {folder}{sparse}{added}"


@torch.no_grad()
def load_xlm_roberta(model: Encoder, state: Mapping[str, Tensor], where: str) -> int:
    """Copies the weights of transformers' `XLMRobertaForMaskedLM` into an encoder, in the encoder's dtype.

    Returns:
        how many sparse layers got copies of a feed-forward layer as their experts.
    """
    own = dict(model.named_parameters())

    def theirs(name: str) -> Tensor:
        if name not in state:
            raise RunError(f"{where}: it has no weight {name}")
        return state[name].to(model.embedding.weight)

    def copy(name: str, value: Tensor) -> None:
        if name not in own:
            raise RunError(f"{where}: model.experts={model.config.experts} has no {name} to copy to: ffn has one")
        target = own[name]
        value = value.expand(len(target), *value.shape) if value.dim() == target.dim() - 1 else value
        if target.shape != value.shape:
            raise RunError(f"{where}: {name} has the shape {list(value.shape)}, expected {list(target.shape)}")
        target.copy_(value)

    base = "roberta.embeddings."
    copy("embedding.weight", theirs(f"{base}word_embeddings.weight"))
    positions = theirs(f"{base}position_embeddings.weight")[_FIRST:]  # its one token type is added to every position
    copy("embedding.position", positions + theirs(f"{base}token_type_embeddings.weight")[0])
    for end in ("weight", "bias"):
        copy(f"embedding.norm.{end}", theirs(f"{base}LayerNorm.{end}"))
        for name, ours in _HEAD.items():
            copy(f"head.{ours}.{end}", theirs(f"lm_head.{name}.{end}"))
    copy("head.bias", theirs("lm_head.bias"))
    copied = 0
    for index, layer in enumerate(model.layers):
        at = f"roberta.encoder.layer.{index}."
        for name, ours in _LAYER.items():
            for end in ("weight", "bias"):
                copy(f"layers.{index}.{ours}.{end}", theirs(f"{at}{name}.{end}"))
        sparse = isinstance(layer.moe, MoE)
        copied += sparse
        experts = f"layers.{index}.{'moe.experts' if sparse else 'feed_forward'}."
        for name, letter in (("intermediate", "in"), ("output", "out")):
            for end, kind in (("weight", "w"), ("bias", "b")):
                copy(f"{experts}{kind}_{letter}", theirs(f"{at}{name}.dense.{end}"))
    return copied
