"""Memory that products of many sizes share, on a CPU.

Blocks of attention differ in size. Memory of its own for each fragments the heap of glibc: at 16,384 tokens a gigabyte
in pieces too small for the next block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

TILE = 2048
"""Keys of one product: what a product allocates has one size, whatever a block sees."""


def tiles(keys: int) -> Iterator[slice]:
    """`range(keys)` in slices of at most TILE."""
    return (slice(start, min(start + TILE, keys)) for start in range(0, keys, TILE))


class Workspace:
    """Memory by name, in the dtype and on the device of `like`. It grows where a shape needs more.

    Args:
        like: a tensor.
        least: elements of every memory: those of the largest shape, if it does not come first.
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
