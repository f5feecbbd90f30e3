"""The settings that every family of models has."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pointsman import routers as routers  # registers the named routers
from pointsman.routers.frame.registry import BASELINES, has_one_k, split_specs
from pointsman.routers.frame.router import check_top_k
from pointsman_lab._values import check_fields


class Layout(NamedTuple):
    """Which layers are sparse, and after how many layers an extra sparse one stands (None: none)."""

    sparse: frozenset[int]
    after: int | None


ALLOWED = "allowed are all, every:2, every:2:1, last:2, last:2:2, after:6, or layer numbers such as 0,1,2,3"


def parse_moe_layers(text: str, num_layers: int) -> Layout:
    """Reads `moe_layers`.

    - `all`
    - `every:n[:start]`: layers start, start + n, ...; start is 0. `every:2` is the GLaM layout, `every:2:1` V-MoE's
      "Every 2".
    - `last:m[:stride]`: m layers that end with the last one, `stride` (1) apart. `last:2:2` is V-MoE's "Last 2".
    - `after:l`: one extra sparse layer after l layers, none in their places (X-MoE).
    - `0,1,3`: these layers.

    Raises:
        ValueError: in one line, what is wrong and what is allowed.
    """
    word, colon, rest = text.strip().partition(":")
    if word == "all" and not colon:
        return Layout(frozenset(range(num_layers)), None)
    if word in ("every", "last", "after") and colon:
        return _counted(text, word, rest, num_layers)
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(map(str.isdecimal, pieces)):
        raise ValueError(f"moe_layers={text!r}: {ALLOWED}")
    return Layout(check_layers("moe_layers", text, list(map(int, pieces)), num_layers), None)


def check_layers(name: str, given: object, layers: list[int], num_layers: int) -> frozenset[int]:
    """The numbers as a set; ValueError if one is no layer's or is given twice."""
    if any(not 0 <= layer < num_layers for layer in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"{name}={given!r}: allowed are layer numbers from 0 to {num_layers - 1}, each once")
    return frozenset(layers)


def _counted(text: str, word: str, rest: str, num_layers: int) -> Layout:
    first, *second = [int(piece) if piece.strip().isdecimal() else -1 for piece in rest.split(":")]
    if not 1 <= first <= num_layers:
        wrong = f"{word}: takes a whole number from 1 to {num_layers} (the number of layers)"
    elif len(second) > (word != "after"):
        wrong = ALLOWED
    elif word == "after":
        return Layout(frozenset(), first)
    elif word == "every":
        start = second[0] if second else 0
        if 0 <= start < num_layers:
            return Layout(frozenset(range(start, num_layers, first)), None)
        wrong = f"every:n:start takes a start from 0 to {num_layers - 1}"
    else:
        stride = second[0] if second else 1
        lowest = num_layers - 1 - (first - 1) * stride
        if stride >= 1 and lowest >= 0:
            return Layout(frozenset(range(lowest, num_layers, stride)), None)
        wrong = f"{first} layers, {stride} apart, do not fit into {num_layers} layers"
    raise ValueError(f"moe_layers={text!r}: {wrong}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings that every family of models has.

    Attributes:
        num_layers, dim, num_heads, head_dim: shape of the stack; attention is num_heads * head_dim wide.
        hidden_dim: inner width of a dense feed-forward sublayer, and of each expert unless `expert_hidden_dim` is set.
        expert_hidden_dim: inner width of each expert; None = `hidden_dim`.
        num_experts, top_k, router: of each sparse layer; `a|b` cycles specs over them. Baselines stand for a router:
            "dense" and "dense-dropout" put one feed-forward layer as wide as all experts in the place of each sparse
            layer; "dense-matched" one with the FLOPs of `top_k` experts, also where `after:` adds one (of base experts
            three residual sublayers); "plain" one as wide as one expert, and nothing where `after:` would add one: the
            papers' dense models, which are cheaper.
        moe_layers: which layers are sparse (`parse_moe_layers`).
        attention_only: layers without any feed-forward sublayer.
        activation: "relu", "gelu" or "silu".
        experts: "ffn", or "base": three residual sublayers as one expert, with neither residual nor norm around it;
            with moe_layers="after:6" X-MoE's sparse layer.
        shared_experts, shared_gate: as of `MoE`; a baseline is as much wider.
        dropout: on embeddings, positions, sublayers, experts' hidden units and the last hidden states.
        expert_dropout: on experts' hidden units; None = `dropout`.
        attention_dropout: on attention probabilities.
        seed: of the initial weights.
        init_std: standard deviation of the initial weights outside routers; norms' weights are 1 plus such numbers.
        checkpoint_activations: layers compute their activations anew in backward.
    """

    family: ClassVar[str]
    causal: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    stacks: ClassVar[int] = 1
    of_the_data: ClassVar[Mapping[str, str]] = {"vocab_size": "it is the vocabulary of the data"}
    """Settings that follow from the data -> why."""

    num_layers: int = 4
    dim: int = 256
    num_heads: int = 8
    head_dim: int = 64
    hidden_dim: int = 512
    expert_hidden_dim: int | None = None
    num_experts: int = 16
    top_k: int = 2
    router: str = "smoe"
    moe_layers: str = "all"
    attention_only: tuple[int, ...] = ()
    activation: Literal["relu", "gelu", "silu"] = "relu"
    experts: Literal["ffn", "base"] = "ffn"
    shared_experts: int = 0
    shared_gate: bool = False
    dropout: float = 0.1
    expert_dropout: float | None = None
    attention_dropout: float = 0.0
    seed: int = 0
    init_std: float = 0.02
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        check_fields(self, zero=("shared_experts", "representation"), leave=("top_k", "seed"))
        check_top_k(self.top_k, self.num_experts)
        if self.shared_gate and not self.shared_experts:
            raise ValueError("shared_gate=True needs shared_experts, a whole number from 1")
        if not 0 < self.init_std < math.inf:
            raise ValueError(f"init_std={self.init_std!r}: allowed are numbers above 0")
        for name in ("dropout", "expert_dropout", "attention_dropout"):
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are numbers from 0 up to, not including, 1")
        object.__setattr__(self, "attention_only", tuple(self.attention_only))
        without = check_layers("attention_only", self.attention_only, list(self.attention_only), self.num_layers)
        if both := sorted(self.layout.sparse & without):
            raise ValueError(
                f"attention_only={self.attention_only}: moe_layers={self.moe_layers!r} has layer {both[0]}, too"
            )
        specs = split_specs(self.router)
        if len(specs) > 1 and (dense := [spec for spec in specs if spec in BASELINES]):
            raise ValueError(f"router={self.router!r}: {dense[0]!r} stands alone, it cannot be cycled with routers")
        if (fixed := [spec for spec in specs if has_one_k(spec)]) and len(fixed) < len(specs):
            raise ValueError(
                f"router={self.router!r}: {fixed[0]!r} always uses all experts, it cannot be cycled with others"
            )

    def build(self) -> Any:
        """The model that these settings describe, with its initial weights."""
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        return parse_moe_layers(self.moe_layers, self.num_layers)

    @property
    def expert_width(self) -> int:
        """Inner width of each expert."""
        return self.hidden_dim if self.expert_hidden_dim is None else self.expert_hidden_dim


def build_model(config: ModelConfig) -> Any:
    """The model that these settings describe, with its initial weights."""
    return config.build()
