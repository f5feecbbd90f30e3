"""The shape of a transformer with sparse layers: parameters and operations a token.

Equations: active parameters are those that a token meets, k experts a sparse layer among them. Training takes six
operations a parameter and token, and six a pair of positions and number of heads' width in attention, of which a causal
model computes half (Kaplan et al., 2020, arXiv:2001.08361, section 2.1, with attention counted exactly).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pointsman.layer import MoE
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.models.cost import parameter_table
from pointsman_lab.models.families import build_model
from pointsman_lab.models.translation import TranslationConfig


@dataclass(frozen=True)
class Shape:
    """What the planner has to know of a model.

    Attributes:
        name: for messages.
        layers, sparse_layers, dim: of the stack.
        attention: parameters of one layer's attention.
        heads_width: heads * (width of a query + width of a value): operations a pair of positions.
        windowed: part of the layers whose attention sees a short window only; its operations are left out.
        causal: whether a position sees earlier ones only.
        experts, top_k, hidden_dim: of a sparse layer.
        shared_hidden_dim: hidden units of the shared experts of a sparse layer together.
        dense_hidden_dim: hidden units of a dense layer.
        vocabulary: tokens; 0 = no embedding is counted.
        matrices: weights an expert has: 2, gated ones 3.
        tied: one embedding serves input and output.
        nodes_per_token: limit on the nodes that a token's experts lie on (group-limited routing); None = no limit.
        other: parameters beside these, used for every token: norms, biases, what routers have beyond a linear score.
    """

    name: str
    layers: int
    sparse_layers: int
    dim: int
    attention: int
    heads_width: int
    experts: int
    top_k: int
    hidden_dim: int
    shared_hidden_dim: int = 0
    dense_hidden_dim: int = 0
    vocabulary: int = 0
    matrices: int = 3
    windowed: float = 0.0
    causal: bool = True
    tied: bool = False
    nodes_per_token: int | None = None
    other: int = 0

    @property
    def expert_parameters(self) -> int:
        """Of all experts of one sparse layer, shared ones excluded."""
        return self.matrices * self.dim * self.experts * self.hidden_dim

    @property
    def dense_parameters(self) -> int:
        """All but the experts: attention, dense and shared feed-forward layers, linear routers, embeddings, others."""
        dense_layers = self.layers - self.sparse_layers
        hidden = self.sparse_layers * self.shared_hidden_dim + dense_layers * self.dense_hidden_dim
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.dim
        return (
            self.layers * self.attention
            + self.matrices * self.dim * hidden
            + self.sparse_layers * self.dim * self.experts
            + embeddings
            + self.other
        )

    @property
    def parameters(self) -> int:
        """All weights that train."""
        return self.dense_parameters + self.sparse_layers * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied by: k experts a sparse layer, and the output embedding only."""
        inputs = 0 if self.tied else self.vocabulary * self.dim
        chosen = self.sparse_layers * self.top_k * self.matrices * self.dim * self.hidden_dim
        return self.dense_parameters - inputs + chosen

    def flops(self, length: int) -> float:
        """Operations of training on one token, forward and backward, in sequences of `length` tokens."""
        pairs = length * (0.5 if self.causal else 1.0) * (1 - self.windowed)
        return 6 * self.active_parameters + 6 * self.layers * self.heads_width * pairs

    @classmethod
    def published(cls, name: str, values: Mapping[str, Any]) -> Shape:
        """A shape of `published.toml`."""
        known = {key: value for key, value in values.items() if key not in ("attention", "billions")}
        attention, heads_width = _attention(values["dim"], values["attention"])
        return cls(name=name, attention=attention, heads_width=heads_width, **known)

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> Shape:
        """The shape of a model of pointsman's families, counted on a copy without weights.

        Raises:
            ValueError: the model has no sparse layer, or encoder and decoder.
        """
        if isinstance(config, TranslationConfig):
            raise ValueError(f"{name}: a plan is for one stack of layers, not for an encoder with a decoder")
        with torch.device("meta"):
            model = build_model(config)
        sparse = [module for module in model.modules() if isinstance(module, MoE)]
        if not sparse:
            raise ValueError(f"{name}: no sparse layer; a plan is for mixtures of experts")
        experts = sparse[0].experts
        weights = sum(weight.numel() for weight in experts.parameters() if weight.dim() == 3)
        hidden = config.expert_hidden_dim or config.hidden_dim
        table = parameter_table(model)
        dense_layers = config.num_layers - len(sparse)
        vocabulary = int(getattr(config, "vocab_size", 0))
        shape = cls(
            name=name,
            layers=config.num_layers,
            sparse_layers=len(sparse),
            dim=config.dim,
            attention=table.attention // config.num_layers,
            heads_width=2 * config.num_heads * config.head_dim,
            experts=experts.num_experts,
            top_k=sparse[0].top_k,
            hidden_dim=hidden,
            dense_hidden_dim=config.hidden_dim if dense_layers else 0,
            vocabulary=vocabulary,
            matrices=weights // (experts.num_experts * config.dim * hidden),
            causal=config.causal,
            tied=table.embeddings < 2 * vocabulary * config.dim,
        )
        return replace(shape, other=table.trainable - shape.parameters)


def _attention(dim: int, heads: Mapping[str, int]) -> tuple[int, int]:
    """Parameters of a layer's attention, and heads * (query + value width): grouped-query, or latent (DeepSeek-V2)."""
    count = heads["heads"]
    if "head_dim" in heads:
        width = heads["head_dim"]
        return 2 * dim * width * (count + heads["kv_heads"]), 2 * count * width
    query, value = heads["nope"] + heads["rope"], heads["value"]
    queries = heads["query_rank"] * (dim + count * query)
    keys = dim * (heads["kv_rank"] + heads["rope"]) + heads["kv_rank"] * count * (heads["nope"] + value)
    return queries + keys + count * value * dim, count * (query + value)
