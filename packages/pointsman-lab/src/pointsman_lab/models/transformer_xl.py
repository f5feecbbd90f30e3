"""Transformer-XL (Dai et al. 2019) with sparse feed-forward layers: the backbone of HyperRouter and SMoE-Dropout.

Layers remember their inputs of earlier segments, detached; what routers carry on is remembered beside them, equally
long, so that a text taken in segments, or a token at a time, gives what one long forward gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.linear import linear
from pointsman.ops.relative import RelativeBias
from pointsman.ranks import ALONE, Ranks
from pointsman.routing import AttentionTrace
from pointsman_lab.models.blocks import LayerContext, Norm, TransformerLayer
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.models.embedding import TokenEmbedding
from pointsman_lab.models.initial import initialize, seeded
from pointsman_lab.models.stack import LanguageModel
from pointsman_lab.models.traced_attention import traced_attention


@dataclass(frozen=True, kw_only=True)
class RelativeContext(LayerContext):
    """The same for relative attention.

    Attributes:
        positions: sinusoids, [S, dim], by falling distance.
        content_bias, position_bias: u and w, [H, D], shared by all layers.
    """

    positions: Tensor
    content_bias: Tensor
    position_bias: Tensor


class RelativeAttention(nn.Module):
    """Causal multi-head attention with relative positions over memory and new tokens (Transformer-XL, 3.3).

    a_ij = ((q_i + u) . k_j + (q_i + w) . r_(i - j)) / sqrt(D); r = `position` of the sinusoids, one map a layer.
    """

    role = "attention"
    ranks: Ranks = ALONE

    def __init__(self, dim: int, num_heads: int, head_dim: int, *, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim, dropout
        width = num_heads * head_dim
        self.qkv = nn.Linear(dim, 3 * width, bias=False)
        self.position = nn.Linear(dim, width, bias=False)
        self.output = nn.Linear(width, dim, bias=False)

    def forward(
        self, hidden: Tensor, memory: Tensor, context: RelativeContext, trace: bool = False
    ) -> tuple[Tensor, AttentionTrace | None]:
        """hidden [B, T, dim], memory [B, M, dim] -> [B, T, dim], and the trace if asked."""
        heads, width = self.num_heads, self.head_dim
        batch, length, _ = hidden.shape
        scale = width**-0.5
        # queries of the memory are never needed
        query_weight, key_value_weight = self.qkv.weight[: heads * width], self.qkv.weight[heads * width :]
        query = linear(hidden, query_weight).view(batch, length, heads, width).permute(2, 0, 1, 3)
        seen = torch.cat([memory.to(hidden.dtype), hidden], 1) if memory.shape[1] else hidden
        key_value = linear(seen, key_value_weight).view(batch, -1, 2, heads, width)
        key_value = key_value.permute(2, 3, 0, 1, 4).contiguous()  # as the attention keeps it: a trace keeps no more
        positions = linear(context.positions, self.position.weight).view(-1, heads, width).transpose(0, 1)
        mixed, each_head = traced_attention(
            query,
            key_value,
            positions,
            context.content_bias,
            context.position_bias,
            scale=scale,
            key_mask=context.key_mask,
            dropout=self.dropout if self.training else 0.0,
            trace=trace,
            ranks=self.ranks,
        )
        side_by_side = mixed.permute(1, 2, 0, 3).reshape(batch, length, heads * width)
        output = linear(side_by_side, self.output.weight)
        if not trace:
            return output, None
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, *key_value.unbind(0)))
        content_bias, position_bias = context.content_bias.to(query.dtype), context.position_bias.to(query.dtype)
        bias = RelativeBias(query, key, positions, content_bias, position_bias, scale)
        out_weight = self.output.weight.view(-1, heads, width).permute(1, 2, 0)
        return output, AttentionTrace(
            query, key, value, out_weight, output, scale, bias, side_by_side, each_head, causal=True
        )


class RelativeLayer(TransformerLayer):
    """The same with `RelativeAttention`. Its memory is its input."""

    def attend(
        self, hidden: Tensor, memory: Tensor | None, context: RelativeContext, trace: bool
    ) -> tuple[Tensor, Tensor, AttentionTrace | None]:
        """hidden, memory [B, M, dim] -> the attention's output, `hidden` detached, and the trace."""
        assert memory is not None
        normed, before = (self.attention_norm(one) if self.pre_norm else one for one in (hidden, memory))
        mixed, seen = self.attention(normed, before, context, trace)
        return mixed, hidden.detach(), seen


@dataclass(frozen=True)
class TransformerXLConfig(ModelConfig):
    """The settings of a Transformer-XL language model; the others are in `ModelConfig`.

    Attributes:
        vocab_size: number of tokens.
        pre_norm: norm before each sublayer, and one after the last layer; otherwise after each sublayer.
        allow_non_causal: take routers that look at later tokens; mixers then see the whole segment (`+attention` what
            the attention saw, which stays causal). For experiments: such a model sees what it is to predict.
        allow_non_causal_training: take routers that look at later tokens in training only (BASE, Sinkhorn).
    """

    family: ClassVar[str] = "transformer-xl"

    vocab_size: int
    pre_norm: bool = False
    allow_non_causal: bool = False
    allow_non_causal_training: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise ValueError(f"dim={self.dim}: allowed are even numbers (half sines, half cosines)")

    def build(self) -> TransformerXL:
        return TransformerXL(self)


class TransformerXL(LanguageModel[TransformerXLConfig]):
    """A causal language model of relative-attention layers with memory.

    Raises:
        ValueError: a router that looks at later tokens, unless the configuration says `allow_non_causal=True`; one
            that does so in training only, unless it says `allow_non_causal_training=True`.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.memory_width = dim = config.dim
        with seeded(config.seed, "model"):  # modules draw as they are built; the caller's generator stays as it was
            self.embedding = TokenEmbedding(config.vocab_size, dim, scale=math.sqrt(dim), bias=True)
            self.position_encoding = PositionBiases(config.num_heads, config.head_dim)

            self.build_layers(
                lambda: RelativeAttention(dim, config.num_heads, config.head_dim, dropout=config.attention_dropout),
                causal=True,
                pre_norm=config.pre_norm,
                layer=RelativeLayer,
            )
            self.final_norm = Norm(dim) if config.pre_norm else None
        initialize(self, config.seed, config.init_std)

    def position_table(self, count: int, like: Tensor) -> Tensor:
        """[count, dim], by falling distance: sin and cos of distance / 10000^(2 i / dim)."""
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        distance = torch.arange(count - 1, -1, -1, dtype=exact, device=like.device)
        even = torch.arange(0, self.config.dim, 2, dtype=exact, device=like.device)
        angles = distance[:, None] * torch.pow(10000.0, -even / self.config.dim)
        return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)

    def positioned(self, table: Tensor, keys: int, **common: Any) -> RelativeContext:
        nearest = table[len(table) - keys :]
        return RelativeContext(
            positions=F.dropout(nearest, self.config.dropout, self.training),  # equal on all ranks
            content_bias=self.position_encoding.content_bias,
            position_bias=self.position_encoding.position_bias,
            **common,
        )


class PositionBiases(nn.Module):
    """u and w of the relative attention, [H, D], shared by all layers."""

    role = "attention"
    no_decay = ("content_bias", "position_bias")

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content_bias = nn.Parameter(torch.empty(num_heads, head_dim))
        self.position_bias = nn.Parameter(torch.empty(num_heads, head_dim))
