"""A decoder of today: RMSNorm before each sublayer, rotary positions, grouped-query attention, gated experts.

With copied weights it gives the logits of transformers' Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, Dots1 and GLM-4-MoE, and
of DeepSeek-V3 apart from its latent attention (`models/huggingface`). Not here: latent attention, sliding windows.

Shapes: B sequences, T tokens, M remembered positions, S = M + T keys, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman_lab.models.attention import Attention
from pointsman_lab.models.blocks import LayerContext
from pointsman_lab.models.config import ModelConfig
from pointsman_lab.models.embedding import TokenEmbedding
from pointsman_lab.models.initial import initialize, seeded
from pointsman_lab.models.stack import LanguageModel


def rotated(cos: Tensor, sin: Tensor, heads: Tensor, first: int) -> Tensor:
    """heads [B, S, H, D], the first at position `first`, pairs (i, i + D / 2) turned by the angles [positions, D]."""
    cos, sin = (table[first : first + heads.shape[1], None] for table in (cos, sin))
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The settings of a decoder; the others are in `ModelConfig`. Dense first layers: `moe_layers="last:26"` of 28.

    Attributes:
        vocab_size: number of tokens.
        kv_heads: heads of keys and values, a divisor of `num_heads`; None = `num_heads`.
        qk_norm: RMSNorm of queries and keys over each "head" (Qwen3), over "all" heads (OLMoE), or "none".
        rope_theta: base of the frequencies theta^(-2 i / D) of rotary positions.
        context_length: the longest text that it is meant for; None = what the run trains and evaluates with.
        gated: W_out (act(W_gate x) * (W_in x)), SwiGLU with "silu"; otherwise W_out act(W_in x). No biases.
        tied: output and embedding share one matrix.
        norm_eps: of RMSNorm.
        allow_non_causal, allow_non_causal_training: as of `TransformerXLConfig`.
    """

    family: ClassVar[str] = "decoder"

    vocab_size: int
    activation: Literal["relu", "gelu", "silu"] = "silu"
    dropout: float = 0.0
    kv_heads: int | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    rope_theta: float = 10_000.0
    context_length: int | None = None
    gated: bool = True
    tied: bool = True
    norm_eps: float = 1e-5
    allow_non_causal: bool = False
    allow_non_causal_training: bool = False

    def build(self) -> Decoder:
        return Decoder(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None and self.num_heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: allowed are divisors of num_heads={self.num_heads}")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are numbers above 0")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: allowed are even numbers (rotary positions turn pairs)")


class RootMeanSquareNorm(nn.RMSNorm):
    """x / sqrt(mean x^2 + eps) * weight, with a role."""

    role = "norm"

    def forward(self, x: Tensor) -> Tensor:
        # under autocast in the dtype of x: of two dtypes torch has no fused norm
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Decoder(LanguageModel[DecoderConfig]):
    """A causal language model with a cache of keys and values.

    A memory of earlier segments is the cache. Keys are kept before rotation: rotary positions act through differences,
    so a memory that forgets its oldest positions needs no count of them.

    Raises:
        ValueError: a router that looks at later tokens, unless the settings allow it.
    """

    joins_memory = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.memory_width = 2 * (config.kv_heads or config.num_heads) * config.head_dim
        dim = config.dim
        norm = partial(RootMeanSquareNorm, eps=config.norm_eps)
        with seeded(config.seed, "model"):
            self.embedding = TokenEmbedding(config.vocab_size, dim, tied=config.tied)

            self.build_layers(
                lambda: Attention(
                    dim,
                    config.num_heads,
                    config.head_dim,
                    kv_heads=config.kv_heads,
                    dropout=config.attention_dropout,
                    bias=False,
                    qk_norm=None if config.qk_norm == "none" else norm,
                    norm_heads=config.qk_norm == "head",
                ),
                causal=True,
                norm=norm,
                gated=config.gated,
                bias=False,
            )
            self.final_norm = norm(dim)
        initialize(self, config.seed, config.init_std)

    def position_table(self, count: int, like: Tensor) -> Tensor:
        """cos and sin of position * theta^(-2 i / D), [2, count, D].

        sin is negative for the first D / 2, where a rotation subtracts.
        """
        even = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32)
        frequencies = 1.0 / self.config.rope_theta ** (even / self.config.head_dim)
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        places = torch.arange(count, dtype=exact, device=like.device)
        turned = places[:, None] * frequencies.to(places)
        cos, sin = (one.to(like.dtype) for one in (turned.cos(), turned.sin()))
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])

    def positioned(self, table: Tensor, keys: int, **common: Any) -> LayerContext:
        cos, sin = table[:, :keys]
        return LayerContext(rotate=partial(rotated, cos, sin), **common)
