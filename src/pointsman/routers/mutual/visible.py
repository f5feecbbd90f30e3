"""Who informs whom, and the blocks that this is worked on in.

Shapes: N sequences, T queries, S keys, of which the last T are the queries' own tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ENTROPY_TOLERANCE = 1e-5  # nats: equal distributions are equally sure, whatever the rounding
CPU_ROWS, GPU_ROWS = 128, 512  # rows a block
CPU_CELLS, GPU_CELLS = 2**19, 2**26  # scores of one block up to which sequences are worked on together


class Visible(NamedTuple):
    """Who informs whom. A token always informs itself.

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
        """How many keys the rows before `stop` see at most."""
        return self.past + stop if self.causal else self.keys

    def blocks(self, device: torch.device) -> list[tuple[int, int]]:
        """(start, stop) of the blocks of rows."""
        rows = CPU_ROWS if device.type == "cpu" else GPU_ROWS
        return [(start, min(start + rows, self.length)) for start in range(0, self.length, rows)]

    def groups(self, count: int, device: torch.device) -> list[slice]:
        """Sequences that are worked on together: on a CPU one, unless they are short."""
        rows, most = (CPU_ROWS, CPU_CELLS) if device.type == "cpu" else (GPU_ROWS, GPU_CELLS)
        together = max(1, most // (min(self.length, rows) * self.keys))
        return [slice(start, min(start + together, count)) for start in range(0, count, together)]

    def hide_(self, scores: Tensor, start: int) -> Tensor:
        """Fills with -inf, in place, what does not inform the rows from `start`: scores [n, (heads,) rows, keys]."""
        rows, keys = scores.shape[-2:]
        own = slice(self.past + start, self.past + start + rows)
        if self.real is None and self.entropy is None:
            if self.causal and rows > 1:
                scores[..., own.start :] += _later(scores, own.start)
            return scores
        later = torch.ones(rows, keys - own.start, dtype=torch.bool, device=scores.device).triu_(1)
        hidden = torch.zeros(len(scores), rows, keys, dtype=torch.bool, device=scores.device)
        if self.causal:
            hidden[:, :, own.start :] = later
        if self.real is not None:
            hidden |= ~self.real[:, None, :keys]
            hidden |= ~self.real[:, own, None]
        if self.entropy is not None:
            hidden |= self.entropy[:, None, :keys] > self.entropy[:, own, None] + ENTROPY_TOLERANCE
        hidden[:, :, own].diagonal(dim1=1, dim2=2).fill_(False)
        return scores.masked_fill_(hidden[:, None] if scores.dim() == 4 else hidden, -torch.inf)


def _later(scores: Tensor, first: int) -> Tensor:
    """-inf above the diagonal, else 0, for the last keys of a block of scores."""
    rows, keys = scores.shape[-2:]
    return torch.full((rows, keys - first), -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
