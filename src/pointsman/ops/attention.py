"""Causal attention with relative positions (Transformer-XL, Dai et al. 2019), in blocks of query rows.

    a_ij = scale * ((q_i + u) . k_j + (q_i + w) . r_(i + M - j)),   j <= i + M,   o_i = sum_j softmax_j(a_ij) v_j

with M memory positions before the T queries, and S = M + T keys. No [T, S] tensor lives: forward and backward work on
a block of query rows at a time, skip the keys that come after it, and backward computes the probabilities anew.

Shapes: H heads, B sequences, D head width. Heads come first, because r is the same for every sequence: its products
are then one matrix product a head, over the rows of all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MASKED = -1e30  # a padded key: finite, so that a row whose keys are all padded stays finite
ROWS = 64  # query rows a block
CPU_ELEMENTS, GPU_ELEMENTS = 2**19, 2**26  # scores that live at once: a few MB on a CPU, so that they stay in cache


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention with relative positions.

    Args:
        query: [H, B, T, D].
        key, value: [H, B, S, D], S >= T: the last T are the queries' own positions.
        positions: r, [H, S, D], by falling distance: row c belongs to the distance S - 1 - c.
        content_bias, position_bias: u and w, [H, D].
        scale: factor of the scores.
        key_mask: [B, S] bool, True for a real token; None where all are real. A query without any real key gets the
            mean of the values before it.
        dropout: probability with which attention probabilities are dropped.

    Returns:
        [H, B, T, D], in the dtype of `query`.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    output: Tensor = _RelativeAttention.apply(
        query,
        key.to(query.dtype),
        value.to(query.dtype),
        positions.to(query.dtype),
        content_bias.to(query.dtype),
        position_bias.to(query.dtype),
        _Settings(scale, dropout, seed),
        key_mask,
    )  # type: ignore[no-untyped-call]
    return output


def relative_bias(
    query: Tensor, positions: Tensor, position_bias: Tensor, scale: float, start: int, stop: int
) -> Tensor:
    """The position term scale * (q_i + w) . r_(i + M - j) of the queries `start:stop`: [H, B, stop - start, S].

    0 for keys after the query. Differentiable. Arguments as of `relative_attention`.
    """
    heads, batch, length, _ = query.shape
    keys = positions.shape[1]
    rows, seen = stop - start, keys - length + stop
    shifted = (query[:, :, start:stop] + position_bias[:, None, None]) * scale
    padded = torch.nn.functional.pad(positions[:, keys - seen :], (0, 0, 0, 1))
    products = torch.bmm(shifted.reshape(heads, batch * rows, -1), padded.transpose(1, 2))
    bias = by_key(products.view(heads * batch, rows, seen + 1)).reshape(heads, batch, rows, seen)
    after = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
    after = torch.nn.functional.pad(after, (seen - rows, 0))
    return torch.nn.functional.pad(bias.masked_fill(after, 0), (0, keys - seen))


@dataclass(frozen=True)
class RelativeBias:
    """What `relative_attention` adds to scale * q_i . k_j, in the layout of an attention trace: a function of a block
    of rows, whose parts are open to those who can do with less than all heads.

    Attributes:
        query, key: [B, H, T, D], [B, H, S, D].
        positions, content_bias, position_bias: as of `relative_attention`.
    """

    query: Tensor
    key: Tensor
    positions: Tensor
    content_bias: Tensor
    position_bias: Tensor
    scale: float

    def __call__(self, start: int, stop: int) -> Tensor:
        """[B, H, stop - start, S]."""
        query = self.query.transpose(0, 1)
        position = relative_bias(query, self.positions, self.position_bias, self.scale, start, stop).transpose(0, 1)
        return position + self.scale * (self.key @ self.content_bias[:, :, None]).transpose(2, 3)


class _Settings(NamedTuple):
    scale: float
    dropout: float
    seed: int


class _Block(NamedTuple):
    """Queries `start:stop` of some heads; they see the first `seen` keys."""

    number: int
    heads: slice
    start: int
    stop: int
    seen: int


def _blocks(query: Tensor, keys: int) -> Iterator[_Block]:
    heads, batch, length, _ = query.shape
    budget = GPU_ELEMENTS if query.is_cuda else CPU_ELEMENTS
    rows = max(8, min(length, ROWS, budget // (batch * keys)))
    number = 0
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen = keys - length + stop
        group = max(1, min(heads, budget // (batch * (stop - start) * seen)))
        for head in range(0, heads, group):
            yield _Block(number, slice(head, min(head + group, heads)), start, stop, seen)
            number += 1


def by_key(products: Tensor) -> Tensor:
    """[N, R, seen + 1] by falling distance -> a view [N, R, seen] by key: row a moves left by R - 1 - a.

    In a row of seen + 1 entries, that is a start at R - 1 and a step of `seen` from row to row. Keys after the query
    show entries of other rows: the caller masks them.
    """
    count, rows, width = products.shape
    flat = products.view(count, rows * width)
    return flat[:, rows - 1 : rows - 1 + rows * (width - 1)].view(count, rows, width - 1)


class _Products:
    """What forward and backward share: the probabilities of a block."""

    def __init__(self, query: Tensor, key: Tensor, positions: Tensor, content: Tensor, position: Tensor,
                 settings: _Settings, key_mask: Tensor | None) -> None:  # fmt: skip
        self.query, self.key, self.content, self.position, self.settings = query, key, content, position, settings
        # one row more, for the distance -1: `by_key` needs rows of seen + 1 entries
        self.positions = torch.cat([positions, positions.new_zeros(positions.shape[0], 1, positions.shape[2])], 1)
        self.padded = None if key_mask is None else ~key_mask

    def queries(self, block: _Block, bias: Tensor) -> Tensor:
        """scale * (q + bias) of the block: [heads, B, R, D], contiguous."""
        rows = self.query[block.heads, :, block.start : block.stop]
        shifted = rows.new_empty(rows.shape)  # contiguous, whatever the strides of the queries
        return torch.add(rows, bias[block.heads, None, None], out=shifted).mul_(self.settings.scale)

    def block_positions(self, block: _Block) -> Tensor:
        """r of the distances seen - 1 .. -1: [heads, seen + 1, D]."""
        return self.positions[block.heads, self.positions.shape[1] - 1 - block.seen :]

    def masked(self, block: _Block) -> Tensor | None:
        """[heads, B, 1, seen] bool, True for a padded key (a view)."""
        if self.padded is None:
            return None
        heads, batch = block.heads.stop - block.heads.start, self.padded.shape[0]
        return self.padded[None, :, None, : block.seen].expand(heads, batch, 1, block.seen)

    def probabilities(self, block: _Block, content: Tensor, position: Tensor, key: Tensor) -> Tensor:
        """[heads * B, R, seen]; `content` and `position` are the block's two kinds of queries."""
        heads, batch, rows, width = content.shape
        products = torch.bmm(
            position.view(heads, batch * rows, width), self.block_positions(block).transpose(1, 2)
        ).view(heads * batch, rows, block.seen + 1)
        scores = torch.baddbmm(by_key(products), content.view(heads * batch, rows, width), key.transpose(1, 2))
        after = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        masked = self.masked(block)
        if masked is not None:
            scores.view(heads, batch, rows, block.seen).masked_fill_(masked, MASKED)
        scores[..., block.seen - rows :].masked_fill_(after, -math.inf)
        return torch.softmax(scores, -1)

    def kept(self, block: _Block, probabilities: Tensor) -> Tensor | None:
        """What dropout multiplies the probabilities by: the same in forward and backward."""
        rate = self.settings.dropout
        if not rate:
            return None
        generator = torch.Generator(probabilities.device).manual_seed(self.settings.seed + block.number)
        return torch.empty_like(probabilities).bernoulli_(1 - rate, generator=generator).div_(1 - rate)

    def of(self, block: _Block, keys: Tensor) -> Tensor:
        """The block's part of keys or values: [heads * B, seen, D], a view."""
        return keys[block.heads].flatten(0, 1)[:, : block.seen]


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        settings: _Settings,
        key_mask: Tensor | None,
    ) -> Tensor:
        key, value = key.contiguous(), value.contiguous()
        ctx.save_for_backward(query, key, value, positions, content_bias, position_bias, key_mask)
        ctx.settings = settings
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            shared = _Products(query, key, positions, content_bias, position_bias, settings, key_mask)
            for block in _blocks(query, key.shape[2]):
                content, position = shared.queries(block, content_bias), shared.queries(block, position_bias)
                probabilities = shared.probabilities(block, content, position, shared.of(block, key))
                kept = shared.kept(block, probabilities)
                if kept is not None:
                    probabilities = probabilities.mul_(kept)
                rows = torch.bmm(probabilities, shared.of(block, value))
                output[block.heads, :, block.start : block.stop] = rows.view(content.shape)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, positions, content_bias, position_bias, key_mask = ctx.saved_tensors
        settings: _Settings = ctx.settings
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32  # sums over blocks: at least float32
        d_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        d_key = torch.zeros(key.shape, dtype=exact, device=query.device)
        d_value = torch.zeros_like(d_key)
        d_content, d_position = (torch.zeros(bias.shape, dtype=exact, device=query.device)
                                 for bias in (content_bias, position_bias))  # fmt: skip
        heads, length, width = positions.shape
        d_positions = torch.zeros(heads, length + 1, width, dtype=exact, device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            shared = _Products(query, key, positions, content_bias, position_bias, settings, key_mask)
            for block in _blocks(query, key.shape[2]):
                content, position = shared.queries(block, content_bias), shared.queries(block, position_bias)
                heads, batch, rows, width = content.shape
                keys, values = shared.of(block, key), shared.of(block, value)
                probabilities = shared.probabilities(block, content, position, keys)
                upper = gradient[block.heads, :, block.start : block.stop].reshape(heads * batch, rows, width)
                d_probabilities = torch.bmm(upper, values.transpose(1, 2))
                kept = shared.kept(block, probabilities)
                if kept is not None:
                    d_probabilities.mul_(kept)
                # the same memory twice: by key for the content term, by distance for the position term
                by_distance = probabilities.new_empty(heads * batch, rows, block.seen + 1)
                flat = by_distance.view(heads * batch, -1)
                flat[:, : rows - 1].zero_()
                flat[:, -1:].zero_()
                d_scores = by_key(by_distance)
                d_scores.copy_(torch._softmax_backward_data(d_probabilities, probabilities, -1, probabilities.dtype))
                masked = shared.masked(block)
                if masked is not None:
                    d_scores.view(heads, batch, rows, block.seen).masked_fill_(masked, 0)
                if kept is not None:
                    probabilities = probabilities.mul_(kept)
                shared.of(block, d_value).add_(torch.bmm(probabilities.transpose(1, 2), upper))
                shared.of(block, d_key).add_(
                    torch.bmm(d_scores.transpose(1, 2), content.view(heads * batch, rows, width))
                )
                by_head = by_distance.view(heads, batch * rows, block.seen + 1)
                of_positions = d_positions[block.heads, d_positions.shape[1] - 1 - block.seen :]
                of_positions.add_(torch.bmm(by_head.transpose(1, 2), position.view(heads, batch * rows, width)))
                from_content = torch.bmm(d_scores, keys).view(content.shape)
                from_position = torch.bmm(by_head, shared.block_positions(block)).view(content.shape)
                d_content[block.heads] += from_content.sum((1, 2), dtype=exact)
                d_position[block.heads] += from_position.sum((1, 2), dtype=exact)
                d_query[block.heads, :, block.start : block.stop] = from_content.add_(from_position).mul_(
                    settings.scale
                )
        return (
            d_query,
            d_key.to(key.dtype),
            d_value.to(value.dtype),
            d_positions[:, :-1].to(positions.dtype),
            (d_content * settings.scale).to(content_bias.dtype),
            (d_position * settings.scale).to(position_bias.dtype),
            None,
            None,
        )
