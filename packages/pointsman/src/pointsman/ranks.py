"""Who shares a batch: `Ranks`, and `ALONE`, the one process that has all of it.

W ranks that each have a W-th of a batch compute what one process with the whole batch computes. For that, numbers that
depend on all tokens of the batch are summed over ranks here; everything else stays local. Nothing imports
torch.distributed before a collective is called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pointsman._errors import RunError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks that share each batch, and which of them this process is.

    Every method that communicates must be called by all ranks, in the same order.

    Attributes:
        rank: this process, from 0.
        count: W.
        group: their process group; None: the default one.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """This rank's rows of a batch; RunError if it cannot be divided evenly."""
        if batch % self.count:
            allowed = ", ".join(str(one) for one in range(1, batch + 1) if batch % one == 0)
            raise RunError(f"{self.count} ranks cannot share a batch of {batch} rows evenly; {allowed} can")
        each = batch // self.count
        return slice(self.rank * each, (self.rank + 1) * each)

    def total(self, *tensors: Tensor) -> list[Tensor]:
        """The sums over ranks, detached, in one collective; whole numbers are exact up to 2^53."""
        summed = [tensor.detach() if self.count == 1 else tensor.detach().clone() for tensor in tensors]
        self.add_up(summed)
        return summed

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over ranks, in one collective in float64."""
        if self.count == 1 or not tensors:
            return
        import torch.distributed as dist

        flat = torch.cat([tensor.detach().reshape(-1).double().to(tensors[0].device) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def alike(self, number: int, device: torch.device) -> bool:
        """Whether all ranks have the same whole number; the device is one that the group takes."""
        import torch.distributed as dist

        pair = torch.tensor([number, -number], device=device)
        dist.all_reduce(pair, dist.ReduceOp.MAX, group=self.group)
        return int(pair[0]) == -int(pair[1])

    def whole(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, with the gradient of this rank's own part."""
        if self.count == 1:
            return tensor
        return tensor + (self.total(tensor)[0] - tensor.detach())

    def part(self, loss: Tensor) -> Tensor:
        """A W-th of the value of a loss that is equal on all ranks, with the whole gradient of this rank's rows.

        Summed over ranks, values and gradients are then those of one process.
        """
        return loss if self.count == 1 else loss - loss.detach() * (1 - 1 / self.count)

    def once(self, loss: Tensor) -> Tensor:
        """A loss of the weights alone, which every rank computes whole: its value, and a W-th of its gradient."""
        return loss if self.count == 1 else loss / self.count + loss.detach() * (1 - 1 / self.count)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """All ranks' rows in order, [W * rows, ...]; the gradient is that of this rank's own rows.

        Every rank must have the same number of rows.
        """
        if self.count == 1:
            return tensor
        import torch.distributed as dist

        own = tensor.detach().contiguous()
        sent = own.view(torch.uint8) if own.dtype == torch.bool else own
        parts = [torch.empty_like(sent) for _ in range(self.count)]
        dist.all_gather(parts, sent, group=self.group)
        parts = [part.view(tensor.dtype) for part in parts]
        parts[self.rank] = tensor
        return torch.cat(parts)

    def agree(self, value: Any, what: str) -> None:
        """RunError unless all ranks have equal values: names the first rank that differs from rank 0, of mappings also
        the first key."""
        if self.count == 1:
            return
        values = self.gather(value)
        others = [rank for rank, one in enumerate(values) if one != values[0]]
        if not others:
            return
        first, other = values[0], values[others[0]]
        if isinstance(first, Mapping) and isinstance(other, Mapping):
            key = next(key for key in {**first, **other} if first.get(key) != other.get(key))
            what, first, other = f"{what}: {key}", first.get(key), other.get(key)
        raise RunError(
            f"ranks differ in {what}: rank 0 has {first!r}, rank {others[0]} has {other!r}"
            + (f" (and {len(others) - 1} more differ)" if len(others) > 1 else "")
        )

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order; anything that can be pickled."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def by_first(self, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, which alone calls it; RunError on every rank as of `each`."""
        return self.each(lambda: function() if self.first else None)[0]  # type: ignore[return-value]

    def each(self, function: Callable[[], T]) -> list[T]:
        """What the function returns on every rank, in order.

        RunError on all of them if it raised one on some rank, or the system refused it something: the message names
        the first such rank unless it is 0.
        """
        if self.count == 1:
            return [function()]
        try:
            done: tuple[T | None, str | None] = (function(), None)
        except (OSError, ValueError) as error:  # a RunError is one
            done = (None, str(error))
        gathered = self.gather(done)
        for rank, (_, message) in enumerate(gathered):
            if message is not None:
                raise RunError(message if rank == 0 else f"rank {rank}: {message}")
        return [value for value, _ in gathered]  # type: ignore[misc]


ALONE = Ranks()
"""One process with the whole batch."""


def every_rank(group: Any = None) -> Ranks:
    """All ranks of a process group (None: the default one); `ALONE` where there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group)
