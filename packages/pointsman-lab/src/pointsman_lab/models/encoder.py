"""A bidirectional encoder with sparse layers: X-MoE's backbone (Chi et al. 2022, 4.1), XLM-R's where nothing is sparse.

Shapes: B texts, T tokens, M masked positions, V vocabulary. Texts are padded on the right with negative ids. Padding is
never attended, routed, counted or mixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.drawing import dropout
from pointsman.ops.linear import linear
from pointsman.routing import check_padding_mask
from pointsman_lab.models.attention import Bias
from pointsman_lab.models.blocks import LayerContext, Norm
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.models.embedding import linear_cross_entropy
from pointsman_lab.models.initial import initialize, seeded
from pointsman_lab.models.stack import Stack

BUCKETS, FARTHEST = 32, 128  # of T5's relative positions (torchscale: --rel-pos-buckets 32 --max-rel-pos 128)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The settings of an encoder; the others are in `ModelConfig`. The defaults are X-MoE's base model.

    Attributes:
        vocab_size: number of tokens.
        positions: "learned", one vector a position, counted over real tokens; or "t5", a bucketed bias of attention,
            one table for all layers.
        max_length: the longest text with learned positions.
        norm: "post", after each sublayer (XLM-R), or "pre", before it and once after the last layer.
        embedding_norm: a norm on the embeddings.
    """

    family: ClassVar[str] = "encoder"
    causal: ClassVar[bool] = False

    vocab_size: int
    num_layers: int = 12
    dim: int = 768
    num_heads: int = 12
    hidden_dim: int = 3072
    num_experts: int = 32
    top_k: int = 1
    router: str = "xmoe"
    moe_layers: str = "after:6"
    activation: Literal["relu", "gelu", "silu"] = "gelu"
    experts: Literal["ffn", "base"] = "base"
    attention_dropout: float = 0.1
    positions: Literal["learned", "t5"] = "learned"
    max_length: int = 512
    norm: Literal["post", "pre"] = "post"
    embedding_norm: bool = True

    def build(self) -> Encoder:
        return Encoder(self)


class Encoder(Stack[EncoderConfig]):
    """h0 = dropout(norm(E[x] + positions)), then the layers. No factor sqrt(dim) on the embedding (as in XLM-R)."""

    def __init__(self, config: EncoderConfig, *, head: bool = True) -> None:
        super().__init__(config)
        dim, pre_norm = config.dim, config.norm == "pre"
        with seeded(config.seed, "model"):
            self.embedding = EncoderEmbedding(config)
            self.position_bias = PositionBuckets(config.num_heads) if config.positions == "t5" else None

            self.build_layers(causal=False, pre_norm=pre_norm)
            self.final_norm = Norm(dim) if pre_norm else None
            self.head = MaskedLanguageModelHead(dim, config.vocab_size) if head else None
        initialize(self, config.seed, config.init_std)

    def encode(
        self, tokens: Tensor, memory: object = None, *, memory_length: int = 0, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """The last hidden states [B, T, dim]; an encoder has no memory.

        Args:
            tokens: [B, T] int64; negative ones are padding.
            padding_mask: [B, T] bool, True for a real token; None: tokens that are not negative.

        Raises:
            ValueError: a text longer than `max_length` with learned positions, or a memory.
        """
        if memory is not None or memory_length:
            raise ValueError("an encoder reads a text as a whole: it has no memory of earlier segments")
        mask = tokens >= 0 if padding_mask is None else padding_mask
        check_padding_mask(mask, tokens.shape)
        bias = None if self.position_bias is None else self.position_bias.of(tokens.shape[1])
        context = LayerContext(token_ids=tokens, causal=False, causal_attention=False, bias=bias)
        if mask.device.type != "cpu" or not bool(mask.all()):
            context = replace(context, key_mask=mask, padding_mask=mask)
        hidden = self.embedding(tokens.clamp_min(0), mask)
        hidden, _ = self.run_layers(dropout(hidden, self.config.dropout, self.training, self.ranks), context, None, 0)
        return hidden if self.final_norm is None else self.final_norm(hidden), None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, T], negative where padded -> logits [B, T, V]; with targets the nats of the masked positions.

        Args:
            targets: [B, T] int64, the masked token's id, negative where nothing is masked -> [M], in reading order.
        """
        assert self.head is not None, "built without a head"
        hidden, _ = self.encode(tokens)
        if targets is None:
            logits: Tensor = self.head(hidden, self.embedding.weight)
            return logits
        masked = targets >= 0
        nats: Tensor = self.head.loss(hidden[masked], self.embedding.weight, targets[masked])
        return nats


class EncoderEmbedding(nn.Module):
    """norm(E[token] + P[position]); positions count real tokens from 0."""

    role = "embedding"

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        learned = config.positions == "learned"
        self.position = nn.Parameter(torch.empty(config.max_length, config.dim)) if learned else None
        self.norm = Norm(config.dim) if config.embedding_norm else None

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """tokens, mask [B, T] -> [B, T, dim]."""
        hidden = F.embedding(tokens, self.weight)
        if self.position is not None:
            if tokens.shape[1] > self.max_length:
                raise ValueError(f"a text of {tokens.shape[1]} tokens: max_length is {self.max_length}")
            hidden = hidden + F.embedding((mask.cumsum(1) - 1).clamp_min(0), self.position)
        return hidden if self.norm is None else self.norm(hidden)


class PositionBuckets(nn.Module):
    """T5's relative positions (Raffel et al. 2020), in both directions: bias[h, i, j] = table[bucket(j - i), h].

    Half of the buckets are for keys after the query. Of each half the first 8 are for single distances, the others
    widen logarithmically up to 128 and beyond.
    """

    role = "attention"
    no_decay = ("table",)

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(BUCKETS, num_heads))

    def of(self, length: int) -> Bias:
        """The bias for `length` queries and keys, by blocks of queries: [1, H, rows, length]."""

        def bias(start: int, stop: int) -> Tensor:
            device = self.table.device
            distance = torch.arange(length, device=device) - torch.arange(start, stop, device=device)[:, None]
            return F.embedding(buckets(distance), self.table).permute(2, 0, 1)[None]

        return bias


def buckets(distance: Tensor) -> Tensor:
    """The bucket of each distance (key's position minus query's)."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    size = distance.abs()
    wide = torch.log(size.clamp_min(1).double() / exact) / math.log(FARTHEST / exact) * (half - exact)
    far = (exact + wide.long()).clamp_max(half - 1)
    return torch.where(size < exact, size, far) + (distance > 0) * half


class MaskedLanguageModelHead(nn.Module):
    """softmax(E norm(gelu(W h)) + b) over the vocabulary; E is the token embedding."""

    role = "head"

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)
        self.norm = Norm(dim)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def _ready(self, hidden: Tensor) -> Tensor:
        ready: Tensor = self.norm(F.gelu(linear(hidden, self.project.weight, self.project.bias)))
        return ready

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[..., dim] -> [..., V]."""
        return linear(self._ready(hidden), weight, self.bias)

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """hidden [M, dim], targets [M] -> nats [M]."""
        return linear_cross_entropy(self._ready(hidden), weight, self.bias, targets)
