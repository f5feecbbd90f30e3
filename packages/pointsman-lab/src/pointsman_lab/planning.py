"""What a layout of many GPUs makes each of them hold, gather and exchange: counts, no estimates.

Active parameters are those that a token meets, k experts a sparse layer among them. Training takes six operations a
parameter and token, and six a pair of positions and number of heads' width in attention, of which a causal model
computes half (Kaplan et al., 2020, arXiv:2001.08361, section 2.1, with attention counted exactly).

With P parameters in A replicas of S shards in float32, trained in bfloat16, as `parallelize` has it:

    state      16 P / S bytes a GPU: weights, gradients, Adam's two moments
    gathered   8 P_experts / R (1 - 1 / S_experts) + 12 P_dense (1 - 1 / S) + 8 P / S (1 - 1 / A) bytes that reach a GPU
               in a micro-batch: weights (of experts in bfloat16) in forward and again in backward, and gradients over
               shards (of embeddings, weights once); gradients over replicas, in a ring
    exchanged  8 D (R - 1) / R d bytes a token and sparse layer that leave a GPU, in forward and backward, in bfloat16

R ranks divide the experts of a layer, S = R S_experts, and D = R (1 - C(E - E / R, k) / C(E, k)) of them hold one of a
token's k experts, in the mean over even choices. What activations, buffers and gathered weights take at a time is not
counted, nor is any time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import comb
from typing import Any

import torch

from pointsman._grid import Grid
from pointsman.layer import MoE
from pointsman.parallel.layout import Layout
from pointsman_lab.models.config import ModelConfig, build_model
from pointsman_lab.models.cost import parameter_table

STATE, FLOAT, HALF = 16, 4, 2
"""Bytes: of a parameter that trains with Adam, of a weight or gradient, of a number in bfloat16."""


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
    other: int = 0

    @property
    def expert_parameters(self) -> int:
        """Of all experts of one sparse layer, shared ones excluded."""
        return self.matrices * self.dim * self.experts * self.hidden_dim

    @property
    def embeddings(self) -> int:
        """Parameters of the token embedding and the output layer."""
        return (1 if self.tied else 2) * self.vocabulary * self.dim

    @property
    def dense_parameters(self) -> int:
        """All but the experts: attention, dense and shared feed-forward layers, linear routers, embeddings, others."""
        dense_layers = self.layers - self.sparse_layers
        hidden = self.sparse_layers * self.shared_hidden_dim + dense_layers * self.dense_hidden_dim
        return (
            self.layers * self.attention
            + self.matrices * self.dim * hidden
            + self.sparse_layers * self.dim * self.experts
            + self.embeddings
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
        """A shape of `published_models.toml`."""
        known = {key: value for key, value in values.items() if key not in ("attention", "billions")}
        attention, heads_width = _attention(values["dim"], values["attention"])
        return cls(name=name, attention=attention, heads_width=heads_width, **known)

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> Shape:
        """The shape of a model of pointsman's families, counted on a copy without weights.

        Raises:
            ValueError: the model has no sparse layer, or encoder and decoder.
        """
        if config.stacks > 1:
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


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """`published_models.toml`."""
    return tomllib.loads(resources.files("pointsman_lab").joinpath("published_models.toml").read_text(encoding="utf-8"))


def shapes() -> dict[str, Shape]:
    """The published models."""
    return {name: Shape.published(name, values) for name, values in published().items()}


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of weights, gradients and Adam's moments that a GPU holds."""
    return STATE * shape.parameters / layout.shards


def gathered_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of weights and gradients that reach a GPU in a micro-batch; tokens that travel are not in it."""
    experts = (
        (2 * HALF / FLOAT + 1)
        * shape.sparse_layers
        * shape.expert_parameters
        / layout.experts
        * (1 - 1 / layout.expert_shards)
    )
    dense = (3 * shape.dense_parameters - shape.embeddings) * (1 - 1 / layout.shards)
    copies = 2 * shape.parameters / layout.shards * (1 - 1 / layout.replicas)
    return FLOAT * (experts + dense + copies)


def exchanged_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes a token that leave a GPU on the way to experts and back, forward and backward, with even choices."""
    ranks = layout.experts
    visited = distinct_ranks(ranks, shape.experts, shape.top_k)
    return 4 * visited * (ranks - 1) / ranks * shape.dim * HALF * shape.sparse_layers


def distinct_ranks(ranks: int, experts: int, top_k: int) -> float:
    """Ranks that a token's k experts lie on, in the mean over even choices."""
    return ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))


def layouts(world: int, experts: int) -> Iterator[Layout]:
    """Every division of `world` ranks for layers of this many experts."""
    for replicas in range(1, world + 1):
        for over in range(1, min(world // replicas, experts) + 1):
            if world % replicas == 0 and world // replicas % over == 0 and experts % over == 0:
                yield Layout(world, over, replicas)


def plan(shape: Shape, gpus: Sequence[int], layout: str | None = None) -> Grid:
    """A line for each layout of each number of GPUs.

    Args:
        shape: the model. gpus: numbers of GPUs.
        layout: only this one, as `Layout.parse` reads it.

    Raises:
        RunError: a layout that does not divide the GPUs or the experts.
    """
    rows = []
    for world in gpus:
        for one in layouts(world, shape.experts) if layout is None else [Layout.parse(layout, world)]:
            one.check_experts(shape.experts)
            counts = (
                state_bytes(shape, one) / 1e9,
                gathered_bytes(shape, one) / 1e9,
                exchanged_bytes(shape, one) / 1e3,
            )
            rows.append([str(world), str(one), *(f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in counts)])
    return Grid(["GPUs", "layout", "state, GB", "gathered, GB", "exchanged, kB a token"], rows, code=False, labels=2)
