"""Attention through `scaled_dot_product_attention`: of encoders, of decoders with a cache, across sequences.

Shapes: B sequences, T queries, S keys, H heads, G heads of keys and values (H a multiple of G), D head width. Memory is
linear in T: where a mask is needed that differs between queries, they are worked on in blocks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ops.drawing import dropout as drop
from pointsman.ops.linear import linear
from pointsman.ranks import ALONE, Ranks
from pointsman.routing import AttentionTrace

ROWS = 256  # queries a block where each has a mask or bias of its own

Bias = Callable[[int, int], Tensor]
"""(start, stop) of a block of queries -> what is added to their scaled products, broadcastable to [B, H, rows, S]."""


Rotate = Callable[[Tensor, int], Tensor]
"""(queries or keys [B, S, H, D], the position of the first) -> the same with positions rotated in."""


class Attention(nn.Module):
    """softmax(q k' / sqrt(D) + bias) v through an output projection.

    Args:
        dim: width of the hidden states.
        num_heads, head_dim: H and D.
        kv_heads: G (grouped-query attention); None = H.
        dropout: on attention probabilities.
        bias: whether the four maps have biases.
        qk_norm: makes a norm of queries, and one of keys, from the width that it is to normalise; None: none.
        norm_heads: whether these norms are over each head (D) or over all of them (H D).
    """

    role = "attention"
    ranks: Ranks = ALONE

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        qk_norm: Callable[[int], nn.Module] | None = None,
        norm_heads: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = num_heads, kv_heads or num_heads, head_dim
        self.dropout, self.norm_heads = dropout, norm_heads
        self.query = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, self.kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, self.kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.query_norm = qk_norm(head_dim if norm_heads else num_heads * head_dim) if qk_norm else None
        self.key_norm = qk_norm(head_dim if norm_heads else self.kv_heads * head_dim) if qk_norm else None

    def forward(
        self,
        hidden: Tensor,
        *,
        source: Tensor | None = None,
        memory: Tensor | None = None,
        key_mask: Tensor | None = None,
        causal: bool = False,
        rotate: Rotate | None = None,
        bias: Bias | None = None,
        keep: bool = False,
        trace: bool = False,
    ) -> tuple[Tensor, Tensor | None, AttentionTrace | None]:
        """hidden [B, T, dim] -> output [B, T, dim], all keys and values [B, S, 2 G D] and the trace, both if asked.

        Args:
            source: [B, S, dim], where keys and values come from instead of `hidden` (cross-attention).
            memory: [B, M, 2 G D], keys (before rotation) and values of earlier tokens: S = M + T.
            key_mask: [B, S] bool, True for a real token. A real query sees itself; without a real key all keys, with a
                bias or causally itself alone.
            causal: token i sees keys up to its own.
            rotate: applied to queries and keys.
            bias: added to the scaled products.
            keep: whether to return keys (before rotation) and values, detached.
            trace: the output in the trace is without the output projection's bias.
        """
        looked_at = hidden if source is None else source
        maps = ((hidden, self.query), (looked_at, self.key), (looked_at, self.value))
        query, key, value = (linear(given, one.weight, one.bias) for given, one in maps)
        query, key = self._normed(query, self.query_norm), self._normed(key, self.key_norm)
        kept = None
        if keep or (memory is not None and memory.shape[1]):
            kept = torch.cat([key, value], -1)
            if memory is not None and memory.shape[1]:
                kept = torch.cat([memory.to(kept.dtype), kept], 1)
                key, value = kept.chunk(2, -1)
        query = query.view(*query.shape[:2], self.num_heads, self.head_dim)
        key, value = (one.view(*one.shape[:2], self.kv_heads, self.head_dim) for one in (key, value))
        if rotate is not None:
            query, key = rotate(query, key.shape[1] - query.shape[1]), rotate(key, 0)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        side_by_side = self._attend(query, key, value, key_mask, causal, bias).transpose(1, 2).flatten(2)
        bare = linear(side_by_side, self.output.weight)
        output = bare if self.output.bias is None else bare + self.output.bias
        kept = kept.detach() if keep and kept is not None else None
        if not trace:
            return output, kept, None
        groups = self.num_heads // self.kv_heads
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out_weight = self.output.weight.view(-1, self.num_heads, self.head_dim).permute(1, 2, 0)
        scale = self.head_dim**-0.5
        seen = AttentionTrace(query, key, value, out_weight, bare, scale, bias, side_by_side, causal=causal)
        return output, kept, seen

    def _normed(self, mapped: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, S, heads D], normalised."""
        if norm is None:
            return mapped
        if not self.norm_heads:
            return norm(mapped)  # type: ignore[no-any-return]
        heads: Tensor = norm(mapped.view(*mapped.shape[:2], mapped.shape[2] // self.head_dim, self.head_dim))
        return heads.flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, causal: bool, bias: Bias | None
    ) -> Tensor:
        """[B, H, T, D]."""
        length, keys = query.shape[2], key.shape[2]
        dropout = self.dropout if self.training else 0.0
        grouped = self.kv_heads != self.num_heads
        if key_mask is not None and key_mask.device.type == "cpu" and bool(key_mask.all()):
            key_mask = None
        each = bias is not None or (causal and length > 1 and (key_mask is not None or keys > length))
        if not each:
            mask = None if key_mask is None else (key_mask | ~key_mask.any(1, keepdim=True))[:, None, None]
            below = causal and length > 1
            return _attended(query, key, value, mask, dropout, self.ranks, causal=below, grouped=grouped)
        mixed = []
        for start in range(0, length, ROWS):
            stop = min(start + ROWS, length)
            mask = _mask(start, stop, keys - length, keys, key_mask, causal, bias, query)
            part = query[:, :, start:stop]
            mixed.append(_attended(part, key, value, mask, dropout, self.ranks, grouped=grouped))
        return torch.cat(mixed, 2)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, ranks: Ranks, *,
    causal: bool = False, grouped: bool,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`; of several ranks each drops of its rows what one process drops."""
    if ranks.count == 1 or not dropout:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) if grouped else one for one in (key, value))
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return drop(torch.softmax(scores, -1), dropout, True, ranks).to(value.dtype) @ value


def _mask(
    start: int, stop: int, past: int, keys: int, key_mask: Tensor | None, causal: bool, bias: Bias | None, like: Tensor
) -> Tensor:
    """What is added to the products of a block of queries: the bias, and -inf where they do not look."""
    own = torch.arange(start, stop, device=like.device)[:, None] + past
    place = torch.arange(keys, device=like.device)
    sees = (place <= own) if causal else torch.ones_like(place, dtype=torch.bool).expand(stop - start, keys)
    if key_mask is not None:
        sees = (sees & key_mask[:, None, :]) | (place == own)
        sees = sees[:, None]
    added = torch.zeros((), dtype=like.dtype, device=like.device) if bias is None else bias(start, stop)
    return torch.where(sees, added.to(like.dtype), -torch.inf)
