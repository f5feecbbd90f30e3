"""Random numbers that belong to rows of the whole batch, not to ranks.

With W ranks each draws the numbers of all rows, in the shape that one process has, and keeps those of its own rows.
All ranks have the same generator state, so that the numbers are those of one process, and stay so after each draw. It
costs a rank the drawing of one process. With one process everything is as in torch.

Shapes: rows come first, alone ([B, ...]) or with the tokens of each behind one another ([B * T, ...]).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.ranks import ALONE, Ranks


def own_rows(draw: Callable[[Sequence[int]], Tensor], shape: Sequence[int], ranks: Ranks = ALONE) -> Tensor:
    """This rank's part, of this shape, of what `draw(shape)` draws for all ranks; each has as many rows."""
    if ranks.count == 1:
        return draw(shape)
    rows = shape[0]
    return draw((rows * ranks.count, *shape[1:]))[ranks.rank * rows : (ranks.rank + 1) * rows]


def rand_like(values: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Uniform numbers from 0 to 1."""
    if ranks.count == 1:
        return torch.rand_like(values)
    return own_rows(lambda shape: torch.rand_like(values.new_empty(shape)), values.shape, ranks)


def randn_like(values: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Normal numbers."""
    if ranks.count == 1:
        return torch.randn_like(values)
    return own_rows(lambda shape: torch.randn_like(values.new_empty(shape)), values.shape, ranks)


def dropout(values: Tensor, rate: float, training: bool, ranks: Ranks = ALONE) -> Tensor:
    """`torch.nn.functional.dropout`."""
    if ranks.count == 1 or not training or not rate:
        return F.dropout(values, rate, training)
    return values * own_rows(lambda shape: F.dropout(values.new_ones(shape), rate), values.shape, ranks)


def redraw(router: nn.Module, fresh: nn.Module) -> None:
    """Gives a router the weights and the state of another of its spec, also where they are divided over ranks."""
    own, drawn = (dict[str, Any]([*one.named_parameters(), *one.named_buffers()]) for one in (router, fresh))
    if {name: one.numel() for name, one in own.items()} != {name: one.numel() for name, one in drawn.items()}:
        raise ValueError(f"{router.spec}: it has other tensors than a new one: load its weights")
    for name, held in own.items():
        if held.is_meta:
            continue
        value = drawn[name].detach().to(held.device, held.dtype).view(held.shape)
        if hasattr(held, "placements"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, held.device_mesh, held.placements)
        with torch.no_grad():
            held.copy_(value)
    router.load_state_dict({}, strict=False)  # what follows from the state is found again: a draw, what is frozen
