"""Transformer-XL (Dai et al. 2019) with sparse feed-forward layers: the backbone of HyperRouter and SMoE-Dropout.

Layers remember their inputs of earlier segments, detached; what routers carry on is remembered beside them, equally
long, so that a text taken in segments, or a token at a time, gives what one long forward gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman.lab.models.blocks import (
    FeedForward,
    FeedForwardLayer,
    Norm,
    RelativeAttention,
    Surroundings,
    TransformerLayer,
)
from pointsman.lab.models.config import TransformerXLConfig as TransformerXLConfig
from pointsman.lab.models.initial import initialize, seeded
from pointsman.lab.models.vocabulary import AdaptiveEmbedding, TiedEmbedding
from pointsman.layer import MoE
from pointsman.routers.registry import BASELINES, build_router, split_specs
from pointsman.routers.router import Router
from pointsman.routing import RouterState, check_padding_mask

DENSE_DROPOUT = {"dense": 0.0, "dense-dropout": 0.1}


@dataclass(frozen=True)
class Memory:
    """What earlier segments leave behind. M positions, the newest last.

    Attributes:
        hidden: the input of each layer, [B, M, dim], detached.
        carries: layer name -> what its router carries on, tensors [B, M, ...], detached.
        padding: [B, M] bool, True for a real token; None where all are real.
    """

    hidden: tuple[Tensor, ...]
    carries: Mapping[str, RouterState] = field(default_factory=dict)
    padding: Tensor | None = None

    @property
    def length(self) -> int:
        return self.hidden[0].shape[1]

    def to_tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint; `from_tensors` is the inverse."""
        tensors = {f"hidden/{index}": hidden for index, hidden in enumerate(self.hidden)}
        for layer, carry in self.carries.items():
            tensors |= {f"carry/{layer}/{name}": value for name, value in carry.items()}
        return tensors | ({} if self.padding is None else {"padding": self.padding})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Memory:
        """What `to_tensors` gave."""
        count = sum(name.startswith("hidden/") for name in tensors)
        carries: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("carry/"):
                _, layer, key = name.split("/", 2)
                carries.setdefault(layer, {})[key] = value
        return cls(tuple(tensors[f"hidden/{index}"] for index in range(count)), carries, tensors.get("padding"))

    def to(self, device: torch.device | str) -> Memory:
        """The same on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Memory:
        """The same with this function of each tensor."""
        return Memory.from_tensors({name: function(tensor) for name, tensor in self.to_tensors().items()})


@dataclass(frozen=True)
class Output:
    """What a forward gives.

    Attributes:
        loss: mean nats a token, or [B, T] with reduction="none"; None without targets.
        logits: [B, T, V], only without targets.
        hidden: the last hidden states, [B, T, dim].
        memory: for the next segment.
    """

    loss: Tensor | None
    logits: Tensor | None
    hidden: Tensor
    memory: Memory


class TransformerXL(nn.Module):
    """A causal language model of relative-attention layers with memory.

    Raises:
        ValueError: a router that looks at later tokens, unless the configuration says `allow_non_causal=True`; one
            that does so in training only, unless it says `allow_non_causal_training=True`.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        self._specs = split_specs(config.router)
        self._shared: dict[str, nn.Module] = {}
        self._positions: Tensor | None = None
        with seeded(config.seed, "model"):  # modules draw as they are built; the caller's generator stays as it was
            self._build(config)
        initialize(self, config.seed, config.init_std)

    def _build(self, config: TransformerXLConfig) -> None:
        dim, layout, norm = config.dim, config.layout, config.pre_norm
        self.embedding: TiedEmbedding | AdaptiveEmbedding
        if config.adaptive_cutoffs:
            self.embedding = AdaptiveEmbedding(config.vocab_size, dim, config.adaptive_cutoffs)
        else:
            self.embedding = TiedEmbedding(config.vocab_size, dim)
        self.position_encoding = PositionBiases(config.num_heads, config.head_dim)
        self.layers = nn.ModuleList()
        sparse = 0
        for index in range(config.num_layers):
            attention = RelativeAttention(dim, config.num_heads, config.head_dim, dropout=config.attention_dropout)
            inner = self._sparse(f"layers.{index}", sparse) if index in layout.sparse else self._dense()
            sparse += index in layout.sparse
            self.layers.append(TransformerLayer(dim, attention, inner, dropout=config.dropout, pre_norm=norm))
        self.inserted: FeedForwardLayer | None = None
        if layout.after is not None:
            inner = self._sparse("inserted", 0)
            self.inserted = FeedForwardLayer(dim, inner, dropout=config.dropout, pre_norm=norm)
        self.final_norm = Norm(dim) if norm else None

    def _sparse(self, name: str, place: int) -> MoE | FeedForward:
        """What stands in a sparse place: the `place`-th of them."""
        config = self.config
        spec = self._specs[place % len(self._specs)]
        if spec in BASELINES:
            return FeedForward(
                config.dim,
                config.hidden_dim * (config.num_experts + config.shared_experts),
                activation=config.activation,
                dropout=DENSE_DROPOUT[spec],
                blocks=config.num_experts + config.shared_experts,
            )
        with seeded(config.seed, f"{name}.router"):
            router = build_router(
                spec,
                dim=config.dim,
                num_experts=config.num_experts,
                top_k=config.top_k,
                shared=self._shared,
                vocab_size=config.vocab_size,
            )
        self._check_causal(router)
        return MoE(
            config.dim,
            config.hidden_dim,
            config.num_experts,
            top_k=config.top_k,
            router=router,
            activation=config.activation,
            dropout=config.dropout,
            experts=config.experts,
            shared_experts=config.shared_experts,
            shared_gate=config.shared_gate,
        )

    def _dense(self) -> FeedForward:
        config = self.config
        dropout = DENSE_DROPOUT.get(self._specs[0], config.dropout)
        return FeedForward(config.dim, config.hidden_dim, activation=config.activation, dropout=dropout)

    def _check_causal(self, router: Router) -> None:
        if not router.causal and not self.config.allow_non_causal:
            raise ValueError(
                f"router {router.spec!r} looks at later tokens, which a language model predicts; "
                "allow_non_causal=True takes it all the same"
            )
        allowed = self.config.allow_non_causal or self.config.allow_non_causal_training
        if not router.training_causal and not allowed:
            raise ValueError(
                f"router {router.spec!r} looks at later tokens in training, though not in evaluation; "
                "allow_non_causal_training=True takes it all the same"
            )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        memory: Memory | None = None,
        *,
        memory_length: int = 0,
        padding_mask: Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
    ) -> Output:
        """Runs a segment.

        Args:
            tokens: [B, T] int64.
            targets: [B, T] int64, the token after each; negative ones, and those of padded positions, count nothing.
            memory: what the segment before returned.
            memory_length: how many positions the returned memory holds at most.
            padding_mask: [B, T] bool, True for a real token; None where all are real.
            reduction: "mean" over the targets that count, or "none": [B, T].
        """
        hidden, remembered = self.encode(tokens, memory, memory_length=memory_length, padding_mask=padding_mask)
        if targets is None:
            return Output(None, self.embedding.logits(self._drop(hidden)), hidden, remembered)
        return Output(self._loss(hidden, targets, padding_mask, reduction), None, hidden, remembered)

    def encode(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        memory_length: int = 0,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """The last hidden states [B, T, dim] and the memory for the next segment; arguments as of `forward`."""
        batch, length = tokens.shape
        embedded = self.embedding.embed(tokens)
        if memory is None:
            memory = Memory(tuple(embedded.new_zeros(batch, 0, self.config.dim) for _ in self.layers))
        if len(memory.hidden) != len(self.layers) or memory.hidden[0].shape[0] != batch:
            raise ValueError(
                f"memory is of {len(memory.hidden)} layers and {memory.hidden[0].shape[0]} sequences; "
                f"the model has {len(self.layers)} layers, the tokens {batch} sequences"
            )
        key_mask = _key_mask(memory, padding_mask, tokens)
        around = Surroundings(
            self._drop(self._sinusoids(memory.length + length, embedded)),
            self.position_encoding.content_bias,
            self.position_encoding.position_bias,
            key_mask,
            padding_mask,
            tokens,
            causal=not self.config.allow_non_causal,
        )
        hidden = self._drop(embedded)
        kept: list[Tensor] = []
        carries: dict[str, RouterState] = {}

        def keep(name: str, carry: RouterState | None) -> None:
            if carry is not None:
                carries[name] = {key: _last(value.detach(), memory_length) for key, value in carry.items()}

        def past(name: str) -> RouterState | None:
            return memory.carries.get(name) if memory.length else None

        for index, layer in enumerate(self.layers):
            kept.append(_last(torch.cat([memory.hidden[index], hidden.detach()], 1), memory_length))
            name = f"layers.{index}"
            inserted = self.inserted if self.config.layout.after == index + 1 else None
            trace = inserted is not None and inserted.needs_attention
            arguments = (hidden, memory.hidden[index], around, past(name), trace)
            if self.config.checkpoint_activations and self.training and torch.is_grad_enabled():
                hidden, carry, seen = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden, carry, seen = layer(*arguments)
            keep(name, carry)
            if inserted is not None:
                hidden, carry = inserted.mix(hidden, around, seen, past("inserted"))
                keep("inserted", carry)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        padding = None if key_mask is None else _last(key_mask, memory_length)
        return hidden, Memory(tuple(kept), carries, padding)

    def _loss(self, hidden: Tensor, targets: Tensor, padding_mask: Tensor | None, reduction: str) -> Tensor:
        counted = targets >= 0
        if padding_mask is not None:
            counted = counted & padding_mask
        flat = torch.where(counted, targets, 0).reshape(-1)
        losses = self.embedding.loss(self._drop(hidden).reshape(len(flat), -1), flat).view(targets.shape)
        losses = torch.where(counted, losses, 0)
        return losses if reduction == "none" else losses.sum() / counted.sum().clamp_min(1)

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.config.dropout, self.training)

    def _sinusoids(self, keys: int, like: Tensor) -> Tensor:
        """[keys, dim], by falling distance: sin and cos of distance / 10000^(2 i / dim)."""
        table = self._positions
        if table is None or len(table) < keys or table.device != like.device or table.dtype != like.dtype:
            with torch.inference_mode(False):
                exact = torch.float64 if like.dtype == torch.float64 else torch.float32
                longest = 1 << (keys - 1).bit_length()
                distance = torch.arange(longest - 1, -1, -1, dtype=exact, device=like.device)
                even = torch.arange(0, self.config.dim, 2, dtype=exact, device=like.device)
                angles = distance[:, None] * torch.pow(10000.0, -even / self.config.dim)
                table = self._positions = torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)
        return table[len(table) - keys :]


class PositionBiases(nn.Module):
    """u and w of the relative attention, [H, D], shared by all layers."""

    role = "attention"

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.position_bias = nn.Parameter(torch.empty(num_heads, head_dim))


def _last(tensor: Tensor, count: int) -> Tensor:
    """The last `count` positions, as a tensor that does not keep the others alive."""
    return tensor[:, max(0, tensor.shape[1] - count) :].contiguous().clone()


def _key_mask(memory: Memory, padding_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    if padding_mask is None and memory.padding is None:
        return None
    before, now = memory.padding, padding_mask
    if before is None:
        before = torch.ones(len(tokens), memory.length, dtype=torch.bool, device=tokens.device)
    if now is None:
        now = torch.ones_like(tokens, dtype=torch.bool)
    check_padding_mask(now, tokens.shape)
    return torch.cat([before, now], 1)
