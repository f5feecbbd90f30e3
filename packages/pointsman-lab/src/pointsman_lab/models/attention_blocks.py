"""Blocks of query rows of `traced_attention.py`, and their probabilities and products.

Shapes: H heads, B sequences, T queries, S keys, D head width, R query rows of a block.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pointsman.ops import relative
from pointsman.ops.relative import by_key
from pointsman.ops.visible import Workspace

MASKED = -1e30  # score of a padded key: finite, so that a row of padded keys alone gives no NaN
ROWS = 256  # query rows in a block
SINGLE = 2**21  # multiply-adds that keep all cores busy: from here on a block holds one sequence
CPU_ELEMENTS, GPU_ELEMENTS = 2**19, 2**26  # scores in memory at once; on a CPU they fit into cache


class Settings(NamedTuple):
    scale: float
    dropout: float
    seed: int
    trace: bool
    rank: int
    ranks: int


class Inputs(NamedTuple):
    """The tensors of `traced_attention`, and their gradients."""

    query: Tensor
    key_value: Tensor
    positions: Tensor
    content_bias: Tensor
    position_bias: Tensor


class Block(NamedTuple):
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


def blocks(query: Tensor, keys: int, rank: int, ranks: int) -> Iterator[Block]:
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
                    yield Block(number, *places, keys - length + stop, slice(start - first, end - first), drawn)
                number += 1


class Products:
    """What forward and backward share: the probabilities of a block, and products of stacks of matrices."""

    def __init__(self, query: Tensor, positions: Tensor, settings: Settings, key_mask: Tensor | None) -> None:
        self.query, self.settings = query, settings
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
        """left right' in the memory called `name`: [N, a, d], [N, b, d] -> [N, a, b]."""
        out = None if torch.compiler.is_compiling() else self.memory(name, *left.shape[:2], right.shape[1])
        return torch.bmm(left, right.transpose(1, 2), out=out)

    def queries(self, block: Block, bias: Tensor) -> Tensor:
        """scale * (q + bias) of the block: [heads, batch, R, D], contiguous."""
        rows = self.query[block.heads, block.batch, block.start : block.stop]
        bias = bias[block.heads, None, None]
        if torch.compiler.is_compiling():  # which loses the strides of `out`
            return ((rows + bias) * self.settings.scale).contiguous()
        return torch.add(rows, bias, out=rows.new_empty(rows.shape)).mul_(self.settings.scale)

    def block_positions(self, block: Block) -> Tensor:
        """r of the distances from seen - 1 down to negative ones: [heads, W, D]."""
        return self.positions[block.heads, self.distances(block)]

    def distances(self, block: Block) -> slice:
        """Their places among `positions`."""
        start = self.keys - block.seen
        return slice(start, start + relative.distances(block.seen, self.query.device))

    def mask_padding(self, block: Block, scores: Tensor, value: float) -> None:
        """Writes `value` at padded keys of [heads * batch, R, seen]."""
        if self.padded is not None:
            padded = self.padded[block.batch, None, : block.seen]
            scores.view(-1, *padded.shape[:1], *scores.shape[1:]).masked_fill_(padded, value)

    def probabilities(self, block: Block, content: Tensor, position: Tensor, keys: Tensor) -> Tensor:
        """[heads * batch, R, seen]; `content` and `position` are the block's two kinds of queries."""
        heads, batch, rows, width = content.shape
        positions = self.block_positions(block)
        products = self.by_transpose(position.view(heads, batch * rows, width), positions, "products")
        scores = by_key(products.view(heads * batch, rows, positions.shape[1]))[..., : block.seen]
        flat = content.view(heads * batch, rows, width)
        own = None if torch.compiler.is_compiling() else self.memory("probabilities", *scores.shape)
        scores = torch.baddbmm(scores, flat, keys.transpose(1, 2), out=own)
        self.mask_padding(block, scores, max(MASKED, torch.finfo(scores.dtype).min / 2))
        if rows > 1:
            after = torch.full((rows, rows), -math.inf, dtype=scores.dtype, device=scores.device).triu_(1)
            scores[..., block.seen - rows :].add_(after)
        return torch.softmax(scores, -1, out=own)

    def kept(self, block: Block, probabilities: Tensor) -> Tensor | None:
        """What dropout multiplies the probabilities by: the same in forward and backward."""
        rate = self.settings.dropout
        if not rate:
            return None
        generator = torch.Generator(probabilities.device).manual_seed(self.settings.seed + block.number)
        shape = (len(probabilities) // (block.own.stop - block.own.start), block.drawn, *probabilities.shape[1:])
        kept = self.memory("kept", *shape).bernoulli_(1 - rate, generator=generator).div_(1 - rate)
        return kept[:, block.own].reshape(probabilities.shape)


def part_of(block: Block, tensor: Tensor) -> Tensor:
    """The block's part of keys or values [H, B, S, D]: [heads * batch, seen, D], of contiguous rows."""
    return tensor[block.heads, block.batch].flatten(0, 1)[:, : block.seen]
