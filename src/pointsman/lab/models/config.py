"""The settings of a Transformer-XL, the grammar of `moe_layers`, and presets of shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from pointsman import routers as routers  # registers the named routers
from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.experts.modules import EXPERTS
from pointsman.experts.reference import ACTIVATIONS
from pointsman.routers.registry import BASELINES, split_specs
from pointsman.routers.router import check_top_k


class Layout(NamedTuple):
    """Which layers are sparse, and after how many layers an extra sparse one stands (None: none)."""

    sparse: frozenset[int]
    after: int | None


def parse_moe_layers(text: str, num_layers: int) -> Layout:
    """`all`; `every:2` = layers 0, 2, 4 … (the GLaM layout); `0,1,3`; `after:6` = one extra sparse layer after six.

    Raises:
        ValueError: in one line, what is wrong and what is allowed.
    """
    word, colon, number = text.strip().partition(":")
    if word == "all" and not colon:
        return Layout(frozenset(range(num_layers)), None)
    if word in ("every", "after") and colon:
        value = int(number) if number.strip().isdecimal() else 0
        if not 1 <= value <= num_layers:
            raise ValueError(
                f"moe_layers={text!r}: {word}: takes a whole number from 1 to {num_layers} (the number of layers)"
            )
        if word == "every":
            return Layout(frozenset(range(0, num_layers, value)), None)
        return Layout(frozenset(), value)
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() for piece in pieces):
        raise ValueError(f"moe_layers={text!r}: allowed are all, every:2, after:6, or layer numbers such as 0,1,2,3")
    layers = [int(piece) for piece in pieces]
    if max(layers) >= num_layers or len(set(layers)) < len(layers):
        raise ValueError(f"moe_layers={text!r}: allowed are layer numbers from 0 to {num_layers - 1}, each once")
    return Layout(frozenset(layers), None)


@dataclass(frozen=True)
class TransformerXLConfig:
    """The settings of a Transformer-XL language model.

    Attributes:
        vocab_size: number of tokens.
        num_layers, dim, num_heads, head_dim: shape of the stack; attention is num_heads * head_dim wide.
        hidden_dim: inner width of each expert, and of a dense feed-forward sublayer.
        num_experts, top_k, router: of each sparse layer; `a|b` cycles specs over them; "dense" and "dense-dropout" put
            one feed-forward layer of width hidden_dim * num_experts in their place.
        moe_layers: which layers are sparse (`parse_moe_layers`).
        activation: "relu", "gelu" or "silu".
        experts: "ffn", or "base": three residual sublayers as one expert, with neither residual nor norm around it;
            with moe_layers="after:6" X-MoE's sparse layer.
        shared_experts, shared_gate: as of `MoE`; a dense baseline is as much wider.
        dropout: on embeddings, positions, sublayers, experts' hidden units and the last hidden states.
        attention_dropout: on attention probabilities.
        pre_norm: norm before each sublayer, and one after the last layer; otherwise after each sublayer.
        adaptive_cutoffs: token numbers at which the clusters of an adaptive embedding and softmax begin; () = one
            full softmax.
        seed: of the initial weights.
        init_std: standard deviation of the initial weights outside routers; norms' weights are 1 plus such numbers.
        checkpoint_activations: layers compute their activations anew in backward.
        allow_non_causal: take routers that look at later tokens; mixers then see the whole segment (`+attention` what
            the attention saw, which stays causal). For experiments: such a model sees what it is to predict.
        allow_non_causal_training: take routers that look at later tokens in training only (BASE, Sinkhorn).
    """

    vocab_size: int
    num_layers: int = 4
    dim: int = 256
    num_heads: int = 8
    head_dim: int = 64
    hidden_dim: int = 512
    num_experts: int = 16
    top_k: int = 2
    router: str = "smoe"
    moe_layers: str = "all"
    activation: str = "relu"
    experts: str = "ffn"
    shared_experts: int = 0
    shared_gate: bool = False
    dropout: float = 0.1
    attention_dropout: float = 0.0
    pre_norm: bool = False
    adaptive_cutoffs: tuple[int, ...] = ()
    seed: int = 0
    init_std: float = 0.02
    checkpoint_activations: bool = False
    allow_non_causal: bool = False
    allow_non_causal_training: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "dim", "num_heads", "head_dim", "hidden_dim", "num_experts"):
            check_whole(name, getattr(self, name))
        if self.dim % 2:
            raise ValueError(f"dim={self.dim}: allowed are even numbers (half sines, half cosines)")
        check_top_k(self.top_k, self.num_experts)
        check_whole("shared_experts", self.shared_experts, least=0)
        if self.shared_gate and not self.shared_experts:
            raise ValueError("shared_gate=True needs shared_experts, a whole number from 1")
        if not 0 < self.init_std < math.inf:
            raise ValueError(f"init_std={self.init_std!r}: allowed are numbers above 0")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are numbers from 0 up to, not including, 1")
        for name, allowed in (("activation", ACTIVATIONS), ("experts", EXPERTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: {did_you_mean(str(getattr(self, name)), allowed)}")
        object.__setattr__(self, "adaptive_cutoffs", tuple(self.adaptive_cutoffs))
        cutoffs = self.adaptive_cutoffs
        if list(cutoffs) != sorted(set(cutoffs)) or (cutoffs and not 0 < cutoffs[0] <= cutoffs[-1] < self.vocab_size):
            raise ValueError(
                f"adaptive_cutoffs={cutoffs!r}: allowed are rising token numbers between 0 and {self.vocab_size}"
            )
        parse_moe_layers(self.moe_layers, self.num_layers)
        specs = split_specs(self.router)
        if len(specs) > 1 and (dense := [spec for spec in specs if spec in BASELINES]):
            raise ValueError(f"router={self.router!r}: {dense[0]!r} stands alone, it cannot be cycled with routers")

    @property
    def layout(self) -> Layout:
        return parse_moe_layers(self.moe_layers, self.num_layers)


MODEL_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "num_layers": 2, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 128, "num_experts": 8,
        "dropout": 0.0, "pre_norm": True, "init_std": 0.06,
    },
    "small": {"num_layers": 4},
    "medium": {"num_layers": 8},
    "large": {"num_layers": 12},
    "mutual-medium": {"num_layers": 6, "dim": 352, "num_heads": 8, "head_dim": 44, "hidden_dim": 352},
    "mutual-large": {"num_layers": 12, "dim": 512, "num_heads": 8, "head_dim": 64, "hidden_dim": 512},
    "mutual-glam": {
        "num_layers": 6, "dim": 352, "num_heads": 8, "head_dim": 44, "hidden_dim": 352, "moe_layers": "every:2",
    },
}  # fmt: skip
"""Shapes by name: `small`, `medium`, `large` are HyperRouter's (the paper's text), `mutual-*` Mutual-Inform's."""


def preset_config(preset: str, vocab_size: int, **changes: Any) -> TransformerXLConfig:
    """The settings of a preset, with changes by field name.

    Raises:
        ValueError: an unknown preset or field, with the nearest name.
    """
    if preset not in MODEL_PRESETS:
        raise ValueError(f"unknown preset {preset!r}: {did_you_mean(preset, MODEL_PRESETS)}")
    known = {field.name for field in fields(TransformerXLConfig)}
    for name in changes:
        if name not in known:
            raise ValueError(f"unknown model setting {name!r}: {did_you_mean(name, known)}")
    return TransformerXLConfig(**{**MODEL_PRESETS[preset], "vocab_size": vocab_size, **changes})
