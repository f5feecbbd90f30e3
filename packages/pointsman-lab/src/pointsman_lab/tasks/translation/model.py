"""Encoder and decoder for translation, with sparse layers on both sides (X-MoE's Table 4; torchscale's layout).

Its search is greedy or over a beam.

The encoder is `Encoder`, pre-norm. A decoder layer is causal self-attention, attention over the source, feed-forward,
each after a norm. Source, target and output share one embedding. Non-causal routers are refused in the decoder; mixers
are causal there.

Shapes: B pairs, S source and T target tokens, M cached positions, V vocabulary. Padding is negative, on the right.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.drawing import dropout
from pointsman.ops.linear import linear
from pointsman.routing import AttentionTrace, RouterState
from pointsman_lab.data.pieces import END, START
from pointsman_lab.models.attention import Attention
from pointsman_lab.models.blocks import LayerContext, Norm, RouterStates, Sublayer, TransformerLayer, no_view
from pointsman_lab.models.config import ModelConfig, parse_moe_layers
from pointsman_lab.models.encoder import Encoder, EncoderConfig
from pointsman_lab.models.initial import initialize, seeded
from pointsman_lab.models.memory import Memory
from pointsman_lab.models.stack import Stack


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(ModelConfig):
    """The settings of a translation model; the others are in `ModelConfig`, of the encoder.

    Attributes:
        vocab_size: number of tokens.
        decoder_layers: of the decoder; None = `num_layers`.
        decoder_moe_layers: which of them are sparse.
        max_length: the longest source and target.
    """

    family: ClassVar[str] = "encoder-decoder"
    stacks: ClassVar[int] = 2
    causal: ClassVar[bool] = False

    vocab_size: int
    num_layers: int = 6
    moe_layers: str = "every:2:1"
    decoder_layers: int | None = None
    decoder_moe_layers: str = "every:2:1"
    max_length: int = 256

    def build(self) -> Translator:
        return Translator(self)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.decoder_layers or self.num_layers
        sparse = parse_moe_layers(self.decoder_moe_layers, layers).sparse
        if wrong := [one for one in self.attention_only if one in sparse or one >= layers]:
            raise ValueError(
                f"attention_only={self.attention_only}: the decoder has {layers} layers and "
                f"decoder_moe_layers={self.decoder_moe_layers!r}, which do not allow layer {wrong[0]}"
            )

    @property
    def encoder(self) -> EncoderConfig:
        """The settings of the encoder."""
        shared = {each.name: getattr(self, each.name) for each in fields(ModelConfig)}
        return EncoderConfig(**shared, vocab_size=self.vocab_size, max_length=self.max_length, norm="pre")

    @property
    def decoder(self) -> TranslationConfig:
        """The settings of the decoder's stack; routers of both sides start with different numbers."""
        layers = self.decoder_layers or self.num_layers
        return replace(self, num_layers=layers, moe_layers=self.decoder_moe_layers, seed=self.seed + 2**20)


@dataclass(frozen=True, kw_only=True)
class TargetContext(LayerContext):
    """What every decoder layer needs.

    Attributes:
        source: of each layer the keys and values of the source, [B, S, 2 width].
        source_mask: [B, S] bool, True for a real token.
    """

    source: tuple[Tensor, ...]
    source_mask: Tensor


class TargetLayer(TransformerLayer):
    """Self-attention over earlier target tokens, attention over the source, feed-forward. It remembers keys, values."""

    entered_by = ("source_keys",)

    def __init__(
        self, dim: int, index: int, attention: Attention, cross: Attention, inner: Sublayer, **sublayers: Any
    ) -> None:
        super().__init__(dim, attention, inner, **sublayers)
        self.index, self.cross = index, cross
        self.cross_norm = Norm(dim)

    def source_keys(self, source: Tensor) -> Tensor:
        """[B, S, dim] -> keys and values side by side [B, S, 2 width]."""
        maps = (self.cross.key, self.cross.value)
        return torch.cat([linear(source, each.weight, each.bias) for each in maps], -1)

    def mix(
        self, hidden: Tensor, context: Any, attention: AttentionTrace | None, past: RouterState | None
    ) -> tuple[Tensor, RouterStates | None]:
        """The attention over the source comes before the feed-forward sublayer; `context`: a `TargetContext`."""
        normed = self.cross_norm(hidden)
        crossed, _, _ = self.cross(
            normed, source=normed[:, :0], memory=context.source[self.index], key_mask=context.source_mask
        )
        hidden = hidden + dropout(crossed, self.dropout, self.training, self.ranks)
        return super().mix(hidden, context, attention, past)


class TargetEmbedding(nn.Module):
    """norm(E[token] + P[position]); E is the encoder's."""

    role = "embedding"

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(length, dim))
        self.norm = Norm(dim)

    def forward(self, tokens: Tensor, weight: Tensor, start: int) -> Tensor:
        """tokens [B, T] from this position on -> [B, T, dim]."""
        stop = start + tokens.shape[1]
        if stop > len(self.position):
            raise ValueError(f"a target of {stop} tokens: max_length is {len(self.position)}")
        embedded: Tensor = self.norm(F.embedding(tokens, weight) + self.position[start:stop])
        return embedded


class TargetStack(Stack[TranslationConfig]):
    """The decoder's layers."""

    joins_memory = True

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__(config)
        dim = config.dim

        def layer(dim: int, own: Attention, inner: Sublayer, **sublayers: Any) -> TargetLayer:
            cross = Attention(dim, config.num_heads, config.head_dim, dropout=config.attention_dropout)
            return TargetLayer(dim, len(self.layers), own, cross, inner, **sublayers)

        self.embedding = TargetEmbedding(config.max_length, dim)
        self.build_layers(causal=True, layer=layer)
        self.final_norm = Norm(dim)

    def forward(
        self, tokens: Tensor, weight: Tensor, source: tuple[Tensor, ...], source_mask: Tensor, memory: Memory | None
    ) -> tuple[Tensor, Memory]:
        """The hidden states [B, T, dim] of target tokens [B, T], and the cache with them in it."""
        mask = tokens >= 0
        ids = tokens.clamp_min(0)
        start = 0 if memory is None else memory.length
        hidden = dropout(self.embedding(ids, weight, start), self.config.dropout, self.training, self.ranks)
        context = TargetContext(
            padding_mask=None if bool(mask.all()) else mask,
            token_ids=ids,
            source=source,
            source_mask=source_mask,
            remember=not self.training,
        )
        width = 2 * self.config.num_heads * self.config.head_dim
        hidden, kept = self.run_layers(
            hidden, context, self.checked(memory, hidden, width), 0 if self.training else self.config.max_length
        )
        assert kept is not None, "a memory was given"
        return self.final_norm(hidden), kept


class Translator(nn.Module):
    """Source tokens and earlier target tokens -> logits of the next target tokens."""

    entered_by = ("encode", "decode")

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        with seeded(config.seed, "model"):
            self.encoder = Encoder(config.encoder, head=False)
            self.decoder = TargetStack(config.decoder)
            self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config.seed, config.init_std)

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of both sides."""
        return nn.ModuleList([*self.encoder.layers, *self.decoder.layers])

    def encode(self, source: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """source [B, S] -> of each decoder layer the source's keys and values [B, S, 2 width], and its mask [B, S]."""
        hidden, _ = self.encoder.encode(source)
        layers = (layer for layer in self.decoder.layers if isinstance(layer, TargetLayer))
        return tuple(layer.source_keys(hidden) for layer in layers), source >= 0

    def decode(
        self, tokens: Tensor, source: tuple[Tensor, ...], source_mask: Tensor, memory: Memory | None = None
    ) -> tuple[Tensor, Memory]:
        """Logits [B, T, V] after target tokens [B, T], and the cache for the next ones."""
        weight = self.encoder.embedding.weight
        hidden, kept = self.decoder(tokens, weight, source, source_mask, memory)
        return no_view(linear(hidden, weight, self.bias)), kept

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs [B, 2, L]: source tokens and target inputs, both padded -> logits [B, L, V]."""
        source, target = pairs.unbind(1)
        source = source[:, : max(1, int((source >= 0).sum(1).max()))]
        keys, mask = self.encode(source)
        return self.decode(target, keys, mask)[0]


LONGER, MORE = 1.2, 10  # a translation has at most 1.2 S + 10 tokens
LENGTH_PENALTY = 1.0


@torch.no_grad()
def search(model: Translator, source: Tensor, beam: int = 1) -> list[list[int]]:
    """The best translation of each source [B, S] as ids, without `</s>`; with beam 1 greedy.

    Score = log p / length (`</s>` counts). Each step keeps the `beam` best unfinished hypotheses of a source. A source
    of S tokens is done once it has `beam` finished ones, or at 1.2 S + 10 tokens. Keys, values and what routers carry
    are cached.
    """
    batch, device = len(source), source.device
    sizes = (source >= 0).sum(1).tolist()
    limits = [min(int(LONGER * size) + MORE, model.config.max_length) for size in sizes]
    keys, mask = model.encode(source)
    keys = tuple(each.repeat_interleave(beam, 0) for each in keys)
    mask = mask.repeat_interleave(beam, 0)
    tokens = torch.full((batch * beam, 1), START, device=device)
    scores = torch.full((batch, beam), -torch.inf, device=device)
    scores[:, 0] = 0.0  # all rows of a source begin alike
    written = torch.zeros(batch * beam, 0, dtype=torch.long, device=device)
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    memory: Memory | None = None
    for length in range(1, max(limits) + 1):
        logits, memory = model.decode(tokens, keys, mask, memory)
        logs = torch.log_softmax(logits[:, -1].float(), -1).view(batch, beam, -1)
        every = (scores[..., None] + logs).flatten(1)
        best = every.topk(2 * beam, 1)
        rows, words = best.indices // logs.shape[2], best.indices % logs.shape[2]
        kept: list[list[tuple[float, int, int]]] = [[] for _ in range(batch)]
        for place, found in enumerate(zip(best.values.tolist(), rows.tolist(), words.tolist(), strict=True)):
            for rank, (score, row, word) in enumerate(zip(*found, strict=True)):
                own = place * beam + row
                if word == END:
                    if rank < beam and len(finished[place]) < beam:
                        finished[place].append((score / length**LENGTH_PENALTY, written[own].tolist()))
                elif len(kept[place]) < beam:
                    kept[place].append((score, own, word))
        order = torch.tensor([own for each in kept for _, own, _ in each], device=device)
        tokens = torch.tensor([[word] for each in kept for _, _, word in each], device=device)
        scores = torch.tensor([[score for score, _, _ in each] for each in kept], device=device)
        written = torch.cat([written[order], tokens], 1)
        memory = memory.map(lambda tensor, order=order: tensor[order])  # type: ignore[misc]
        for place, done in enumerate(finished):
            if length == limits[place] and len(done) < beam:
                last = written[place * beam : (place + 1) * beam].tolist()
                divisor = length**LENGTH_PENALTY
                done += [(score / divisor, text) for (score, _, _), text in zip(kept[place], last, strict=True)]
        if all(len(done) >= beam for done in finished):
            break
    return [max(done, key=lambda one: one[0])[1] for done in finished]
