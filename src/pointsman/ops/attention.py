"""Causal attention with relative positions (Transformer-XL, Dai et al. 2019), in blocks of query rows.

    a_ij = scale * ((q_i + u) . k_j + (q_i + w) . r_(i + M - j)),   j <= i + M,   o_i = sum_j softmax_j(a_ij) v_j

with M memory positions before the T queries, and S = M + T keys. No [T, S] tensor is stored: forward and backward work
on one block of query rows at a time and skip later keys. Backward computes the probabilities again.

Shapes: H heads, B sequences, D head width. Heads come first, because r is the same for every sequence: its products
are then one matrix product a head, over the rows of all sequences of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops import attention_on_gpu, relative
from pointsman.ops.attention_on_gpu import Inputs
from pointsman.ops.gemm import Gemm
from pointsman.ops.kernels import active_gemm
from pointsman.ops.linear import without_autocast
from pointsman.ops.relative import by_key
from pointsman.ops.workspace import TILE, Workspace, tiles
from pointsman.ranks import ALONE, Ranks

MASKED = -1e30  # score of a padded key: finite, so that a row of padded keys alone gives no NaN
ROWS = 256  # query rows in a block
SINGLE = 2**21  # multiply-adds that keep all cores busy: from here on a block holds one sequence
CPU_ELEMENTS, GPU_ELEMENTS = 2**19, 2**26  # scores in memory at once; on a CPU they fit into cache

Heads = tuple[Tensor, ...]
"""One tensor for each head."""


def traced_attention(
    query: Tensor,
    key_value: Tensor,
    positions: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    trace: bool = True,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, tuple[Heads, Heads, Heads] | None]:
    """Causal attention with relative positions, and its queries, keys and values head by head.

    Args:
        query: [H, B, T, D], in any strides.
        key_value: [2, H, B, S, D], keys and values, S >= T: the last T are the queries' own positions.
        positions: r, [H, S, D], by falling distance: row c belongs to the distance S - 1 - c.
        content_bias, position_bias: u and w, [H, D].
        scale: factor of the scores.
        key_mask: [B, S] bool, True for a real token; None where all are real. A query without any real key gets the
            mean of the values before it.
        dropout: probability with which attention probabilities are dropped.
        trace: whether queries, keys and values are wanted.
        ranks: who shares the batch: each drops of its rows what one process drops.

    Returns:
        [H, B, T, D] in the dtype of `query`, with the strides of a contiguous [B, T, H, D]; and, if wanted, queries,
        keys and values as H tensors [B, T or S, D] each. A gradient that flows back through one of these costs that
        head's share; through `query` it would cost a tensor of all heads.
    """
    gemm = active_gemm(query.dtype) if query.device.type == "cpu" else None
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else 0
    others = (tensor.to(query.dtype) for tensor in (key_value, positions, content_bias, position_bias))
    rank, count = (ranks.rank, ranks.count) if dropout else (0, 1)
    triton = attention_on_gpu.suits(query, positions, dropout)
    settings = _Settings(scale, dropout, seed, gemm, trace, rank, count, triton)
    output, *each = _RelativeAttention.apply(query, *others, settings, key_mask)  # type: ignore[no-untyped-call]
    heads = len(query)
    return output, (tuple(each[:heads]), tuple(each[heads : 2 * heads]), tuple(each[2 * heads :])) if trace else None


def attend(inputs: Inputs, scale: float, *, triton: bool) -> Tensor:
    """The output of `traced_attention` on a GPU, through these kernels or torch's: what a timing compares."""
    settings = _Settings(scale, 0.0, 0, None, False, 0, 1, triton)
    return _RelativeAttention.apply(*inputs, settings, None)[0]  # type: ignore[no-any-return, no-untyped-call]


class _Settings(NamedTuple):
    scale: float
    dropout: float
    seed: int
    gemm: Gemm | None
    trace: bool
    rank: int
    ranks: int
    triton: bool


class _Block(NamedTuple):
    """Queries `start:stop` of some heads and sequences; they see the first `seen` keys.

    They are the sequences `own` of the `drawn` ones of a block of the whole batch, whose masks are drawn together.
    """

    number: int
    heads: slice
    batch: slice
    start: int
    stop: int
    seen: int
    own: slice
    drawn: int


def _blocks(query: Tensor, keys: int, rank: int, ranks: int) -> Iterator[_Block]:
    """Blocks from the last rows to the first. The last rows see all keys: they write the gradients of keys, and earlier
    blocks add to them.

    Of several ranks: the blocks of the whole batch, as far as they hold sequences of this rank."""
    heads, each, length, width = query.shape
    batch = each * ranks
    rows, on_cpu = min(length, ROWS), query.device.type == "cpu"
    items = max(1, (CPU_ELEMENTS if on_cpu else GPU_ELEMENTS) // (rows * keys))
    if on_cpu and rows * keys * width >= SINGLE:
        items = 1
    head_step, batch_step = max(1, min(heads, items // batch)), min(batch, items)
    if on_cpu and batch_step * rows * keys * width >= SINGLE:  # so is the product of a head's positions
        head_step = 1
    number = 0
    for stop in range(length, 0, -rows):
        for head in range(0, heads, head_step):
            for first in range(0, batch, batch_step):
                start, end = max(first, rank * each), min(first + batch_step, (rank + 1) * each)
                if start < end:
                    here = slice(start - rank * each, end - rank * each)
                    places = slice(head, head + head_step), here, max(0, stop - rows), stop
                    drawn = min(first + batch_step, batch) - first
                    yield _Block(number, *places, keys - length + stop, slice(start - first, end - first), drawn)
                number += 1


class _Products:
    """What forward and backward share: the probabilities of a block, and products of stacks of matrices."""

    def __init__(self, query: Tensor, positions: Tensor, settings: _Settings, key_mask: Tensor | None) -> None:
        self.query, self.settings, self.gemm = query, settings, settings.gemm
        self.keys = positions.shape[1]
        # rows of negative distances: `by_key` needs one, and rows of a GPU's products are aligned
        more = relative.alignment(query.device)
        self.positions = torch.cat([positions, positions.new_zeros(positions.shape[0], more, positions.shape[2])], 1)
        self.padded = None if key_mask is None else ~key_mask
        self.work = Workspace(query)

    def memory(self, name: str, *shape: int) -> Tensor:
        """Not initialised; the memory called `name` is the same for all blocks, of which the first is the largest."""
        if torch.compiler.is_compiling():
            return self.query.new_empty(shape)
        return self.work(name, *shape)

    def by_transpose(self, left: Tensor, right: Tensor, name: str) -> Tensor:
        """left right' in the memory called `name`: [N, a, d], [N, b, d] -> [N, a, b]. One pair goes through the run's
        products, several as bmm."""
        if self.gemm is not None and len(left) == 1:
            if right.shape[1] <= TILE:
                return self.gemm.linear(left[0], right[0])[None]
            output = self.memory(name, *left.shape[:2], right.shape[1])
            for part in tiles(right.shape[1]):
                self.gemm.linear(left[0], right[0, part], out=output[0, :, part])
            return output
        if torch.compiler.is_compiling():
            return torch.bmm(left, right.transpose(1, 2))
        return torch.bmm(left, right.transpose(1, 2), out=self.memory(name, *left.shape[:2], right.shape[1]))

    def plain(self, left: Tensor, right: Tensor) -> Tensor:
        """left right: [N, a, b], [N, b, d] -> [N, a, d]."""
        if self.gemm is not None and len(left) == 1:
            return self.gemm.product(left[0], right[0])[None]
        return torch.bmm(left, right)

    def transposed(self, left: Tensor, right: Tensor) -> Tensor:
        """left' right: [N, a, b], [N, a, d] -> [N, b, d]."""
        if self.gemm is None or len(left) > 1:
            return torch.bmm(left.transpose(1, 2), right)
        result = right.new_empty(1, left.shape[2], right.shape[2])
        self.gemm.weight_gradient(result[0], left[0], right[0])
        return result

    def queries(self, block: _Block, bias: Tensor) -> Tensor:
        """scale * (q + bias) of the block: [heads, batch, R, D], contiguous."""
        rows = self.query[block.heads, block.batch, block.start : block.stop]
        bias = bias[block.heads, None, None]
        if torch.compiler.is_compiling():  # which loses the strides of `out`
            return ((rows + bias) * self.settings.scale).contiguous()
        return torch.add(rows, bias, out=rows.new_empty(rows.shape)).mul_(self.settings.scale)

    def block_positions(self, block: _Block) -> Tensor:
        """r of the distances from seen - 1 down to negative ones: [heads, W, D]."""
        return self.positions[block.heads, self.distances(block)]

    def distances(self, block: _Block) -> slice:
        """Their places among `positions`."""
        start = self.keys - block.seen
        return slice(start, start + relative.distances(block.seen, self.query.device))

    def mask_padding(self, block: _Block, scores: Tensor, value: float) -> None:
        """Writes `value` at padded keys of [heads * batch, R, seen]."""
        if self.padded is not None:
            padded = self.padded[block.batch, None, : block.seen]
            scores.view(-1, *padded.shape[:1], *scores.shape[1:]).masked_fill_(padded, value)

    def probabilities(self, block: _Block, content: Tensor, position: Tensor, keys: Tensor) -> Tensor:
        """[heads * batch, R, seen]; `content` and `position` are the block's two kinds of queries."""
        heads, batch, rows, width = content.shape
        positions = self.block_positions(block)
        products = self.by_transpose(position.view(heads, batch * rows, width), positions, "products")
        scores = by_key(products.view(heads * batch, rows, positions.shape[1]))[..., : block.seen]
        flat = content.view(heads * batch, rows, width)
        own = None if torch.compiler.is_compiling() else self.memory("probabilities", *scores.shape)
        if self.gemm is not None and len(flat) == 1:
            if block.seen <= TILE:
                scores = self.gemm.accumulate(scores[0], flat[0], keys[0])[None]
            else:
                for part in tiles(block.seen):
                    scores[0, :, part] += self.gemm.linear(flat[0], keys[0, part])
        elif own is None:
            scores = torch.baddbmm(scores, flat, keys.transpose(1, 2))
        else:
            scores = torch.baddbmm(scores, flat, keys.transpose(1, 2), out=own)
        self.mask_padding(block, scores, max(MASKED, torch.finfo(scores.dtype).min / 2))
        if rows > 1:
            after = torch.full((rows, rows), -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
            scores[..., block.seen - rows :].add_(after)
        return torch.softmax(scores, -1) if own is None else torch.softmax(scores, -1, out=own)

    def kept(self, block: _Block, probabilities: Tensor) -> Tensor | None:
        """What dropout multiplies the probabilities by: the same in forward and backward."""
        rate = self.settings.dropout
        if not rate:
            return None
        generator = torch.Generator(probabilities.device).manual_seed(self.settings.seed + block.number)
        shape = (len(probabilities) // (block.own.stop - block.own.start), block.drawn, *probabilities.shape[1:])
        kept = self.memory("kept", *shape).bernoulli_(1 - rate, generator=generator).div_(1 - rate)
        return kept[:, block.own].reshape(probabilities.shape)


def _of(block: _Block, tensor: Tensor) -> Tensor:
    """The block's part of keys or values [H, B, S, D]: [heads * batch, seen, D], of contiguous rows."""
    return tensor[block.heads, block.batch].flatten(0, 1)[:, : block.seen]


def _add(total: Tensor, part: Tensor, first: bool) -> None:
    """Adds to what blocks before this one have written; the first writes."""
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def _multiply(left: Tensor, right: Tensor | float, out: Tensor) -> None:
    """out = left * right, whatever its strides."""
    if torch.compiler.is_compiling():
        out.copy_(left * right)  # the compiler takes no such `out=`
    else:
        torch.mul(left, right, out=out)


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_value: Tensor,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        settings: _Settings,
        key_mask: Tensor | None,
    ) -> Heads:
        inputs = Inputs(query, key_value.contiguous(), positions, content_bias, position_bias)
        with without_autocast(query.device.type):
            if settings.triton:
                output, *rest = attention_on_gpu.forward(inputs, settings.scale, key_mask)
            else:
                output, rest = _forward(inputs, settings, key_mask), []
        ctx.save_for_backward(*inputs, key_mask, output, *rest)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        traced = (query, *inputs.key_value.unbind(0)) if settings.trace else ()
        return (output, *(part.detach()[head] for part in traced for head in range(len(query))))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, *each: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, key_mask, output = ctx.saved_tensors[:7]
        inputs, settings = Inputs(*given), ctx.settings
        gradient = torch.zeros_like(output) if gradient is None else gradient
        with without_autocast(output.device.type):
            if settings.triton:
                most, total = ctx.saved_tensors[7:]
                found = attention_on_gpu.backward(gradient, output, most, total, inputs, settings.scale, key_mask)
            else:
                found = _backward(gradient, output, inputs, settings, key_mask)
        for index, own in enumerate(each):
            if own is not None:
                part, head = divmod(index, len(output))
                (found.query, *found.key_value.unbind(0))[part][head] += own
        return *(one.to(output.dtype) for one in found), None, None


def _forward(inputs: Inputs, settings: _Settings, key_mask: Tensor | None) -> Tensor:
    query, key_value, positions, content_bias, position_bias = inputs
    heads, batch, length, width = query.shape
    key, value = key_value.unbind(0)
    output = query.new_empty(batch, length, heads, width).permute(2, 0, 1, 3)
    shared = _Products(query, positions, settings, key_mask)
    for block in _blocks(query, key.shape[2], settings.rank, settings.ranks):
        content, position = shared.queries(block, content_bias), shared.queries(block, position_bias)
        probabilities = shared.probabilities(block, content, position, _of(block, key))
        kept = shared.kept(block, probabilities)
        if kept is not None:
            probabilities = probabilities.mul_(kept)
        rows = shared.plain(probabilities, _of(block, value))
        output[block.heads, block.batch, block.start : block.stop] = rows.view(content.shape)
    return output


def _backward(gradient: Tensor, output: Tensor, inputs: Inputs, settings: _Settings, key_mask: Tensor | None) -> Inputs:
    query, key_value, positions, content_bias, position_bias = inputs
    key, value = key_value.unbind(0)
    all_heads, all_batch, length, width = query.shape
    keys = key.shape[2]
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32  # sums over blocks: at least float32
    d_query = query.new_empty(all_batch, length, all_heads, width).permute(2, 0, 1, 3)
    d_key_value = query.new_empty(all_batch, keys, 2, all_heads, width, dtype=exact).permute(2, 3, 0, 1, 4)
    more = relative.alignment(query.device)
    aligned = more > 1
    d_positions = torch.zeros(all_heads, keys + more, width, dtype=exact, device=query.device)
    d_content, d_position = torch.zeros(2, all_heads, width, dtype=exact, device=query.device).unbind(0)
    # softmax's backward is p * (dp - delta), delta = sum_j p_j dp_j = o . do
    delta = None if aligned else torch.einsum("hbtd,hbtd->hbt", gradient, output).neg_()
    shared = _Products(query, positions, settings, key_mask)
    for block in _blocks(query, keys, settings.rank, settings.ranks):
        last = block.stop == length
        content, position = shared.queries(block, content_bias), shared.queries(block, position_bias)
        heads, batch, rows, _ = content.shape
        count = heads * batch
        block_keys, block_values = _of(block, key), _of(block, value)
        probabilities = shared.probabilities(block, content, position, block_keys)
        region = (block.heads, block.batch, slice(block.start, block.stop))
        upper = gradient[region].reshape(count, rows, width)
        d_probabilities = shared.by_transpose(upper, block_values, "through")
        kept = shared.kept(block, probabilities)
        if kept is not None:
            d_probabilities = d_probabilities.mul_(kept)
        # two views of the same memory: by key for the content term, by distance for the position term
        by_distance = shared.memory("products", count, rows, relative.distances(block.seen, query.device))
        by_distance.view(count, -1)[:, : rows - 1].zero_()
        by_distance[:, -1, -1].zero_()
        d_scores = by_key(by_distance)[..., : block.seen]
        if delta is not None:
            _multiply(d_probabilities.add_(delta[region].reshape(count, rows, 1)), probabilities, d_scores)
            shared.mask_padding(block, d_scores, 0)
        else:  # by key in memory of its own: rows of the view are not aligned
            turned = d_scores
            d_scores = torch._softmax_backward_data(d_probabilities, probabilities, -1, query.dtype)
            shared.mask_padding(block, d_scores, 0)
            turned.copy_(d_scores)
            by_key(by_distance)[..., block.seen :].zero_()
        if kept is not None:
            probabilities = probabilities.mul_(kept)
        of_keys, of_values = (part[block.heads, block.batch, : block.seen] for part in d_key_value.unbind(0))
        _add(of_values, shared.transposed(probabilities, upper).view(of_values.shape), last)
        flat = content.view(count, rows, width)
        _add(of_keys, shared.transposed(d_scores, flat).view(of_keys.shape), last)
        by_head = by_distance.view(heads, batch * rows, -1)
        of_positions = d_positions[block.heads, shared.distances(block)]
        of_positions.add_(shared.transposed(by_head, position.view(heads, batch * rows, width)))
        from_content = shared.plain(d_scores, block_keys).view(content.shape)
        from_position = shared.plain(by_head, shared.block_positions(block)).view(content.shape)
        d_content[block.heads] += from_content.sum((1, 2), dtype=exact)
        d_position[block.heads] += from_position.sum((1, 2), dtype=exact)
        _multiply(from_content.add_(from_position), settings.scale, d_query[region])
    of_positions = d_positions[:, :keys]
    return Inputs(d_query, d_key_value, of_positions, d_content * settings.scale, d_position * settings.scale)
