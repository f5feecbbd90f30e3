"""Which tokens inform which, what their scores are made of, and the blocks and the memory in which this is computed.

Shapes: N sequences, T queries, S keys, of which the last T are the queries' own tokens; D score width, E values' width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 2048
"""Keys of one product: what a product allocates has one size, whatever a block sees."""


def tiles(keys: int) -> Iterator[slice]:
    """`range(keys)` in slices of at most TILE."""
    return (slice(start, min(start + TILE, keys)) for start in range(0, keys, TILE))


class Workspace:
    """Memory by name, in the dtype and on the device of `like`. It grows where a shape needs more.

    Blocks of attention differ in size. On a CPU memory of its own for each fragments the heap of glibc: at 16,384
    tokens a gigabyte in pieces too small for the next block. Every memory has at least `least` elements: those of the
    largest shape, if it does not come first.
    """

    def __init__(self, like: Tensor, least: int = 0) -> None:
        self.like, self.least = like, least
        self.parts: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape in the memory called `name`, not initialised."""
        size = math.prod(shape)
        if name not in self.parts or len(self.parts[name]) < size:
            self.parts[name] = self.like.new_empty(max(size, self.least))
        return self.parts[name][:size].view(shape)


ENTROPY_TOLERANCE = 1e-5  # nats: rounding must not make the entropy of one of two equal distributions lower
CPU_ROWS, GPU_ROWS = 128, 512  # rows in a block
CPU_CELLS, GPU_CELLS = 2**19, 2**26  # scores in one block; short sequences share a block up to here


class Visible(NamedTuple):
    """Which tokens inform which. A token always informs itself.

    Attributes:
        length, keys: T and S.
        causal: only earlier tokens inform a token.
        real: [N, S] bool, False for padding, which neither informs nor is informed.
        entropy: [N, S]; if given, only tokens whose entropy is at most a token's own inform it.
    """

    length: int
    keys: int
    causal: bool = True
    real: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def past(self) -> int:
        return self.keys - self.length

    def of(self, group: slice) -> Visible:
        """The same for some of the sequences."""
        real, entropy = (None if tensor is None else tensor[group] for tensor in (self.real, self.entropy))
        return self._replace(real=real, entropy=entropy)

    def seen(self, stop: int) -> int:
        """The number of keys that rows before `stop` can see."""
        return self.past + stop if self.causal else self.keys

    def blocks(self, device: torch.device) -> list[tuple[int, int]]:
        """(start, stop) of the blocks of rows."""
        rows = CPU_ROWS if device.type == "cpu" else GPU_ROWS
        return [(start, min(start + rows, self.length)) for start in range(0, self.length, rows)]

    def groups(self, count: int, device: torch.device) -> list[slice]:
        """Slices of sequences that share a block: on a CPU one sequence, unless they are short."""
        rows, most = (CPU_ROWS, CPU_CELLS) if device.type == "cpu" else (GPU_ROWS, GPU_CELLS)
        together = max(1, most // max(1, min(self.length, rows) * self.keys))
        return [slice(start, min(start + together, count)) for start in range(0, count, together)]

    def hide_(self, scores: Tensor, start: int) -> Tensor:
        """Sets scores [n, (heads,) rows, keys] of keys that do not inform rows from `start` on to -inf, in place."""
        rows, keys = scores.shape[-2:]
        own = slice(self.past + start, self.past + start + rows)
        if self.real is None and self.entropy is None:
            if self.causal and rows > 1:
                scores[..., own.start :] += _later(scores, own.start)
            return scores
        later = torch.ones(rows, keys - own.start, dtype=torch.bool, device=scores.device).triu_(1)
        hidden = torch.zeros(scores.shape[0], rows, keys, dtype=torch.bool, device=scores.device)
        if self.causal:
            hidden[:, :, own.start :] = later
        if self.real is not None:
            hidden |= ~self.real[:, None, :keys]
            hidden |= ~self.real[:, own, None]
        if self.entropy is not None:
            hidden |= self.entropy[:, None, :keys] > self.entropy[:, own, None] + ENTROPY_TOLERANCE
        hidden[:, :, own].diagonal(dim1=1, dim2=2).fill_(False)
        return scores.masked_fill_(hidden[:, None] if scores.dim() == 4 else hidden, -torch.inf)


class Prepared(NamedTuple):
    """What scores are made of.

    Attributes:
        query, key, value, key_bias: [N, T, D], [N, S, D], [N, S, E] or None, [N, S] or None.
        position_query, positions: p [N, T, D'] and r [1 or N, S + 1, D'] by falling distance, S - 1 to -1, the last
            one 0 (on a GPU 8 such, for `relative.alignment`); or None. Causal only.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None = None
    key_bias: Tensor | None = None
    position_query: Tensor | None = None
    positions: Tensor | None = None

    def detach(self) -> Prepared:
        return Prepared(*(None if tensor is None else tensor.detach() for tensor in self))  # type: ignore[arg-type]


def _later(scores: Tensor, first: int) -> Tensor:
    """-inf above the diagonal, else 0, for the last keys of a block of scores."""
    rows, keys = scores.shape[-2:]
    return torch.full((rows, keys - first), -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
