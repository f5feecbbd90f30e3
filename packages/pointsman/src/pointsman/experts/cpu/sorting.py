"""Assignments sorted by expert, in pieces whose rows stay in the cache.

Shapes: A assignments of tokens to experts, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST = 1 << 20
"""Elements of the widest rows of a piece: its temporaries are small, so that the allocator reuses their memory."""


class Piece(NamedTuple):
    """Rows that are computed at once: some rows of one expert, or all rows of several adjacent ones.

    Attributes:
        first, end: the experts, from `first` up to `end`.
        start, stop: the rows, among all that are sorted.
        ends: [end - first] int32, where each expert's rows end, counted from `start`.
        opens: whether these are the first rows of its expert.
    """

    first: int
    end: int
    start: int
    stop: int
    ends: Tensor
    opens: bool = True

    @property
    def alone(self) -> bool:
        """Whether it belongs to one expert."""
        return self.end - self.first == 1

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Sorted:
    """The assignments of a call, sorted by expert.

    Attributes:
        order: [A], where each stands in what the routing gave.
        token: [A], its token.
        counts: E numbers, how many each expert has.
        pieces: all rows, in order.
    """

    order: Tensor
    token: Tensor
    counts: list[int]
    pieces: list[Piece]

    @cached_property
    def expert(self) -> Tensor:
        """[A], the expert of each."""
        return torch.from_numpy(np.repeat(np.arange(len(self.counts)), self.counts))


def refuse_beyond(highest: int, num_experts: int) -> None:
    """ValueError if the highest chosen expert does not exist. Reading weights by it would not notice."""
    if highest >= num_experts:
        raise ValueError(f"a token is assigned to expert {highest}: there are {num_experts}, from 0")


def sort(token: Tensor | None, expert: Tensor, num_experts: int, widest: int, together: bool) -> Sorted:
    """Sorts assignments by expert; those to -1 are left out.

    Args:
        token: [P], the token of each pair; None: `expert` is [tokens, k].
        expert: the chosen experts, -1 for none.
        widest: the largest width of a row.
        together: whether a piece may hold several experts.
    """
    given = expert.reshape(-1).numpy()
    refuse_beyond(int(given.max(initial=-1)), num_experts)
    # shifted by one, so that what is left out comes first; NumPy sorts short integers by radix: a tenth of the time of
    # torch.argsort
    shifted = (given + 1).astype(np.uint8 if num_experts < 256 else np.uint16 if num_experts < 65536 else np.int64)
    counts = np.bincount(shifted, minlength=num_experts + 1)
    order = np.argsort(shifted, kind="stable")[counts[0] :]
    of_token = order // expert.shape[-1] if token is None else token.numpy()[order]
    counts = counts[1:]
    pieces = _pieces(counts, max(1, MOST // widest), together)
    return Sorted(torch.from_numpy(order), torch.from_numpy(of_token), counts.tolist(), pieces)


def _pieces(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]], most: int, together: bool) -> list[Piece]:
    """All rows in pieces of at most `most`."""
    pieces: list[Piece] = []
    ends = counts.cumsum()
    first = start = stop = 0  # of the piece that is open

    def close(end: int) -> None:
        if stop > start:
            pieces.append(Piece(first, end, start, stop, torch.from_numpy((ends[first:end] - start).astype(np.int32))))

    for expert, count in enumerate(counts.tolist()):
        if not together or stop - start + count > most:
            close(expert)
            first, start = expert, stop
        stop += count
        if count > most:
            for each in range(start, stop, most):
                until = min(each + most, stop)
                size = torch.tensor([until - each], dtype=torch.int32, device="cpu")
                pieces.append(Piece(expert, expert + 1, each, until, size, each == start))
            first, start = expert + 1, stop
    close(len(counts))
    return pieces
