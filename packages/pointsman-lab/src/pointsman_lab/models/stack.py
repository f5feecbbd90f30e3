"""What every family shares: its layers with their feed-forward sublayers, sparse or dense, and one pass through them.

Shapes: B sequences, T tokens, M remembered positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pointsman.experts.modules import BaseExperts
from pointsman.layer import MoE
from pointsman.ops.drawing import dropout
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame.registry import BASELINES, build_router, split_specs
from pointsman.routers.frame.router import Router
from pointsman.routing import RouterState
from pointsman_lab.models.attention import Attention
from pointsman_lab.models.blocks import (
    FeedForward,
    FeedForwardLayer,
    LayerContext,
    MakeNorm,
    Norm,
    ResidualFeedForward,
    RouterStates,
    Sublayer,
    TransformerLayer,
    no_view,
)
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.models.initial import seeded
from pointsman_lab.models.memory import Memory, Output, mask_of_keys, newest

Config = TypeVar("Config", bound=ModelConfig)
DENSE_DROPOUT = {"dense": 0.0, "dense-dropout": 0.1}


class Stack(nn.Module, Generic[Config]):
    """Base class of models.

    Layers are called as `layer(hidden, memory, context, past, trace)` and give (hidden, what to remember, what the
    router hands on (`RouterStates`), the attention's trace if `trace` asks for it). What to remember is None, or of new
    positions [B, T, width], or, if `joins_memory`, of all of them [B, M + T, width], detached.
    """

    joins_memory = False
    ranks: Ranks = ALONE

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self._specs = split_specs(config.router)
        self._shared: dict[str, nn.Module] = {}
        self.layers: nn.ModuleList
        self.inserted: FeedForwardLayer | None

    def build_layers(
        self,
        attention: Callable[[], nn.Module] | None = None,
        *,
        causal: bool,
        pre_norm: bool = True,
        norm: MakeNorm = Norm,
        layer: Callable[..., nn.Module] = TransformerLayer,
        **experts: Any,
    ) -> None:
        """Builds `layers`, and `inserted`, the extra layer that `moe_layers="after:l"` asks for.

        Args:
            attention: makes the attention of a layer; None: `Attention` of the settings' size.
            causal: whether routers that look at later tokens are refused, unless the settings allow them.
            pre_norm, norm: as of `FeedForwardLayer`.
            layer: the class of the layers.
            experts: further arguments of `MoE` and `FeedForward` (gated, bias).

        Raises:
            ValueError: such a router.
        """
        config, layout = self.config, self.config.layout
        attention = attention or partial(
            Attention, config.dim, config.num_heads, config.head_dim, dropout=config.attention_dropout
        )
        allowed, in_training = (getattr(config, f"allow_non_causal{end}", False) for end in ("", "_training"))
        self._causal = causal and not allowed, causal and not (allowed or in_training)
        self.layers = nn.ModuleList()
        sublayers: dict[str, Any] = {"dropout": config.dropout, "pre_norm": pre_norm, "norm": norm}
        sparse = 0
        for index in range(config.num_layers):
            inner: Sublayer = None
            if index in layout.sparse:
                inner = self._sparse(f"layers.{index}", sparse, experts)
                sparse += 1
            elif index not in config.attention_only:
                dropout = DENSE_DROPOUT.get(self._specs[0], config.dropout)
                inner = self._dense(config.hidden_dim, dropout, experts)
            self.layers.append(layer(config.dim, attention(), inner, **sublayers))
        added = layout.after is not None and self._specs[0] != "plain"
        self.inserted = (
            FeedForwardLayer(config.dim, self._sparse("inserted", 0, experts), **sublayers) if added else None
        )

    def _sparse(self, name: str, place: int, experts: dict[str, Any]) -> MoE | FeedForward | ResidualFeedForward:
        """What stands in the `place`-th sparse place: experts, or a baseline."""
        config = self.config
        spec = self._specs[place % len(self._specs)]
        if spec in BASELINES:
            chosen = {"plain": 1, "dense-matched": config.top_k}.get(spec, config.num_experts)
            blocks = config.shared_experts + chosen
            width, dropout = config.expert_width * blocks, DENSE_DROPOUT.get(spec, config.dropout)
            if spec == "dense-matched" and config.experts == "base":
                each = [self._dense(width, dropout, experts) for _ in range(BaseExperts.sublayers_each)]
                return ResidualFeedForward(config.dim, each)
            return self._dense(width, dropout, experts, blocks=blocks)
        with seeded(config.seed, f"{name}.router"):
            router = build_router(
                spec,
                dim=config.dim,
                num_experts=config.num_experts,
                top_k=config.top_k,
                shared=self._shared,
                vocab_size=getattr(config, "vocab_size", None),
                place=place,
            )
        self._check_causal(router)
        return MoE(
            config.dim,
            config.expert_width,
            config.num_experts,
            top_k=config.top_k,
            router=router,
            activation=config.activation,
            dropout=config.dropout if config.expert_dropout is None else config.expert_dropout,
            experts=config.experts,
            shared_experts=config.shared_experts,
            shared_gate=config.shared_gate,
            **experts,
        )

    def _check_causal(self, router: Router) -> None:
        causal, training = self._causal
        if causal and not router.causal:
            told, allow = ", which a language model predicts", "allow_non_causal"
        elif training and not router.training_causal:
            told, allow = " in training, though not in evaluation", "allow_non_causal_training"
        else:
            return
        way = f"{allow}=True (--set model.{allow}=true) takes it all the same"
        if not hasattr(self.config, allow):
            way = f"models of the family {self.config.family!r} take none"
        raise ValueError(f"router {router.spec!r} looks at later tokens{told}; {way}")

    def _dense(self, width: int, dropout: float, experts: dict[str, Any], blocks: int = 1) -> FeedForward:
        return FeedForward(
            self.config.dim, width, activation=self.config.activation, dropout=dropout, blocks=blocks, **experts
        )

    def checked(self, memory: Memory | None, hidden: Tensor, width: int) -> Memory:
        """`memory`, or an empty one of this width.

        Raises:
            ValueError: it is of another number of layers or sequences.
        """
        if memory is None:
            return Memory(tuple(hidden.new_zeros(len(hidden), 0, width) for _ in self.layers))
        if len(memory.hidden) != len(self.layers) or memory.hidden[0].shape[0] != len(hidden):
            raise ValueError(
                f"memory is of {len(memory.hidden)} layers and {memory.hidden[0].shape[0]} sequences; "
                f"the model has {len(self.layers)} layers, the tokens {len(hidden)} sequences"
            )
        return memory

    def run_layers(
        self, hidden: Tensor, context: LayerContext, memory: Memory | None, memory_length: int
    ) -> tuple[Tensor, Memory | None]:
        """hidden [B, T, dim] through all layers, and the memory of the newest `memory_length` positions.

        `memory` None: of a model without memory.
        """
        kept: list[Tensor] = []
        carries: dict[str, RouterState] = {}

        def keep(name: str, handed: RouterStates | None) -> LayerContext:
            """Remembers what is carried on to later tokens; returns the context for the layers above."""
            carry = None if handed is None else handed.carry
            if memory is not None and carry is not None:
                carries[name] = {key: newest(value.detach(), memory_length) for key, value in carry.items()}
            return context if handed is None or handed.above is None else replace(context, below=handed.above)

        def past(name: str) -> RouterState | None:
            return memory.carries.get(name) if memory is not None and memory.length else None

        for index, layer in enumerate(self.layers):
            name = f"layers.{index}"
            before = None if memory is None else memory.hidden[index]
            inserted = self.inserted if self.config.layout.after == index + 1 else None
            trace = inserted is not None and inserted.needs_attention
            arguments = (hidden, before, context, past(name), trace)
            if self.config.checkpoint_activations and self.training and torch.is_grad_enabled():
                hidden, new, handed, seen = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden, new, handed, seen = layer(*arguments)
            if before is not None:
                if new is None:
                    kept.append(before[:, :0])
                elif not self.joins_memory and new.shape[1] >= memory_length:  # nothing is left of the memory before
                    kept.append(newest(new.detach(), memory_length))
                else:
                    joined = new if self.joins_memory else torch.cat([before, new.detach()], 1)
                    kept.append(joined if joined.shape[1] <= memory_length else newest(joined, memory_length))
            context = keep(name, handed)
            if inserted is not None:
                hidden, handed = inserted.mix(hidden, context, seen, past("inserted"))
                context = keep("inserted", handed)
        if memory is None:
            return hidden, None
        mask = context.key_mask
        return hidden, Memory(tuple(kept), carries, None if mask is None else newest(mask, memory_length))


class LanguageModel(Stack[Config]):
    """A stack with an `embedding` whose `logits` and `loss` are those of the next token.

    Attributes:
        memory_width: of what a layer remembers of a position.
    """

    embedding: Any
    final_norm: nn.Module | None
    memory_width: int
    _table: Tensor | None = None

    def position_table(self, count: int, like: Tensor) -> Tensor:
        """What layers need of `count` positions, [..., count, width], on the device and in the dtype of `like`."""
        raise NotImplementedError

    def positioned(self, table: Tensor, keys: int, **common: Any) -> LayerContext:
        """The layers' context: what all models have in common, and `keys` positions of the table."""
        raise NotImplementedError

    def encode(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        *,
        memory_length: int = 0,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """The last hidden states [B, T, dim] and the memory for the next segment; arguments as of `forward`."""
        embedded = self.embedding.embed(tokens if padding_mask is None else tokens.clamp_min(0))
        memory = self.checked(memory, embedded, self.memory_width)
        keys = memory.length + tokens.shape[1]
        context = self.positioned(
            self._positions(keys, embedded),
            keys,
            key_mask=mask_of_keys(memory, padding_mask, tokens),
            padding_mask=padding_mask,
            token_ids=tokens,
            causal=self._causal[0],
            remember=memory_length > 0,
        )
        hidden, kept = self.run_layers(self._drop(embedded), context, memory, memory_length)
        assert kept is not None
        return hidden if self.final_norm is None else self.final_norm(hidden), kept

    def _positions(self, keys: int, like: Tensor) -> Tensor:
        """A `position_table` of at least so many positions, kept from forward to forward."""
        table = self._table
        if table is None or table.shape[-2] < keys or table.device != like.device or table.dtype != like.dtype:
            with torch.inference_mode(False):
                table = self._table = self.position_table(1 << (keys - 1).bit_length(), like)
        return table

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
            padding_mask: [B, T] bool, True for a real token, on either side; None where all are real.
            reduction: "mean" over the targets that count, or "none": [B, T].
        """
        hidden, remembered = self.encode(tokens, memory, memory_length=memory_length, padding_mask=padding_mask)
        if targets is None:
            return Output(None, no_view(self.embedding.logits(self._drop(hidden))), hidden, remembered)
        return Output(self._loss(hidden, targets, padding_mask, reduction), None, hidden, remembered)

    def _loss(self, hidden: Tensor, targets: Tensor, padding_mask: Tensor | None, reduction: str) -> Tensor:
        counted = targets >= 0
        if padding_mask is not None:
            counted = counted & padding_mask
        flat = torch.where(counted, targets, 0).reshape(-1)
        losses = self.embedding.loss(self._drop(hidden).reshape(len(flat), -1), flat).view(targets.shape)
        losses = torch.where(counted, losses, 0)
        return losses if reduction == "none" else losses.sum() / counted.sum().clamp_min(1)

    def _drop(self, hidden: Tensor) -> Tensor:
        return dropout(hidden, self.config.dropout, self.training, self.ranks)
