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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

import torch

from pointsman.layer import MoE
from pointsman.parallel.layout import Layout
from pointsman_lab._grid import Grid
from pointsman_lab.models.config import ModelConfig, build_model
from pointsman_lab.models.cost import parameter_table

STATE, FLOAT, HALF = 16, 4, 2
"""Bytes: of a parameter that trains with Adam, of a weight or gradient, of a number in bfloat16."""


@dataclass(frozen=True)
class Shape:
    """What the planner has to know of a model.

    Attributes:
        layers, sparse_layers, dim: of the stack.
        heads_width: heads * (width of a query + width of a value): operations a pair of positions.
        causal: whether a position sees earlier ones only.
        experts, top_k: of a sparse layer.
        parameters: all weights that train.
        expert_parameters: weights of all experts of one sparse layer, shared ones excluded.
        inputs, embeddings, positions: weights of an input embedding of its own, of input and output, of learned places.
    """

    layers: int
    sparse_layers: int
    dim: int
    heads_width: int
    causal: bool
    experts: int
    top_k: int
    parameters: int
    expert_parameters: int
    inputs: int
    embeddings: int
    positions: int

    @property
    def dense_parameters(self) -> int:
        """All but the experts."""
        return self.parameters - self.sparse_layers * self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied by: k experts a sparse layer, and the output embedding only."""
        chosen = self.sparse_layers * self.top_k * self.expert_parameters // self.experts
        return self.dense_parameters - self.inputs - self.positions + chosen

    def flops(self, length: int) -> float:
        """Operations of training on one token, forward and backward, in sequences of `length` tokens."""
        pairs = length * (0.5 if self.causal else 1.0)
        return 6 * self.active_parameters + 6 * self.layers * self.heads_width * pairs

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> Shape:
        """The shape of a model, counted on a copy without weights.

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
        embedding = int(getattr(config, "vocab_size", 0)) * config.dim
        tied = getattr(config, "tied", True)  # a setting of decoders; all others have one matrix
        return cls(
            layers=config.num_layers,
            sparse_layers=len(sparse),
            dim=config.dim,
            heads_width=2 * config.num_heads * config.head_dim,
            causal=config.causal,
            experts=experts.num_experts,
            top_k=sparse[0].top_k,
            parameters=parameter_table(model).trainable,
            expert_parameters=sum(weight.numel() for weight in experts.parameters()),
            inputs=0 if tied else embedding,
            embeddings=embedding if tied else 2 * embedding,
            positions=sum(one.numel() for name, one in model.named_parameters() if name == "embedding.position"),
        )


def state_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of weights, gradients and Adam's moments that a GPU holds."""
    return STATE * shape.parameters / layout.shards


def gathered_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes of weights and gradients that reach a GPU in a micro-batch; tokens that travel are not in it."""
    held = shape.sparse_layers * shape.expert_parameters / layout.experts
    experts = (2 * HALF / FLOAT + 1) * held * (1 - 1 / layout.expert_shards)
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
    """A line for each layout of each number of GPUs."""
    rows = []
    for world in gpus:
        for one in layouts(world, shape.experts) if layout is None else [Layout.parse(layout, world)]:
            one.check_experts(shape.experts)
            held, moved = state_bytes(shape, one) / 1e9, gathered_bytes(shape, one) / 1e9
            counts = held, moved, exchanged_bytes(shape, one) / 1e3
            rows.append([str(world), str(one), *(f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in counts)])
    return Grid(["GPUs", "layout", "state, GB", "gathered, GB", "exchanged, kB a token"], rows, code=False, labels=2)
