"""What models return, and what they remember of earlier segments.

Shapes: B sequences, T tokens, M remembered positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from pointsman.routing import RouterState, check_padding_mask


@dataclass(frozen=True)
class Memory:
    """What earlier segments leave behind. M positions, the newest last.

    Attributes:
        hidden: what each layer keeps of M positions, [B, M, width], detached: its input (Transformer-XL), or keys and
            values (decoder).
        carries: layer name -> what its router carries on, tensors [B, M, ...], detached.
        padding: [B, M] bool, True for a real token; None where all are real.
        turned: of a decoder, the keys of each layer with positions rotated in, which spares doing it anew; () = none.
            Not part of a checkpoint.
    """

    hidden: tuple[Tensor, ...]
    carries: Mapping[str, RouterState] = field(default_factory=dict)
    padding: Tensor | None = None
    turned: tuple[Tensor, ...] = ()

    @property
    def length(self) -> int:
        return self.hidden[0].shape[1]

    def to_tensors(self) -> dict[str, Tensor]:
        """All tensors but `turned` by name, for a checkpoint; `from_tensors` is the inverse."""
        tensors = {f"hidden/{index}": hidden.contiguous() for index, hidden in enumerate(self.hidden)}
        for layer, carry in self.carries.items():
            tensors |= {f"carry/{layer}/{name}": value for name, value in carry.items()}
        return tensors | ({} if self.padding is None else {"padding": self.padding})

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Memory:
        """What `to_tensors` gave."""
        count = sum(name.startswith("hidden/") for name in tensors)
        carries: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("carry/"):
                _, layer, key = name.split("/", 2)
                carries.setdefault(layer, {})[key] = value
        return cls(tuple(tensors[f"hidden/{index}"] for index in range(count)), carries, tensors.get("padding"))

    def to(self, device: torch.device | str) -> Memory:
        """The same on another device."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Memory:
        """The same with this function of each tensor."""
        return Memory.from_tensors({name: function(tensor) for name, tensor in self.to_tensors().items()})


@dataclass(frozen=True)
class Output:
    """What a forward gives.

    Attributes:
        loss: mean nats a token, or [B, T] with reduction="none"; None without targets.
        logits: [B, T, V], only without targets.
        hidden: the last hidden states, [B, T, dim].
        memory: for the next segment; None of a model without one.
    """

    loss: Tensor | None
    logits: Tensor | None
    hidden: Tensor
    memory: Memory | None


class _Room:
    """Memory that a tensor of earlier positions can grow into: `buffer` [B, capacity, ...], of which `used` are."""

    def __init__(self, buffer: Tensor, used: int) -> None:
        self.buffer, self.used = buffer, used
        self.lock = Lock()

    def claim(self, start: int, stop: int) -> bool:
        """Whether the caller may write the positions `start:stop`: nobody has, and nobody else will."""
        with self.lock:
            frozen = self.buffer.is_inference() and not torch.is_inference_mode_enabled()
            free = start == self.used and stop <= self.buffer.shape[1] and not frozen
            if free:
                self.used = stop
            return free


def appended(before: Tensor, new: Tensor) -> Tensor:
    """[B, M, ...] and [B, T, ...] -> [B, M + T, ...].

    Without gradients, and where T is small, the result is a part of memory with room for a quarter more: the next call
    then copies the new positions only. Nothing that was returned ever changes: whoever appends to the same tensor a
    second time gets a copy.
    """
    start, stop = before.shape[1], before.shape[1] + new.shape[1]
    few = 4 * new.shape[1] <= start
    if not few or torch.is_grad_enabled() or torch.compiler.is_compiling() or before.dtype != new.dtype:
        return torch.cat([before.to(new.dtype), new], 1)
    room: _Room | None = getattr(before, "room", None)
    if room is None or not room.claim(start, stop):
        room = _Room(before.new_empty(len(before), stop + stop // 4 + 16, *before.shape[2:]), stop)
        room.buffer[:, :start] = before
    room.buffer[:, start:stop] = new
    result = room.buffer[:, :stop]
    result.room = room  # type: ignore[attr-defined]
    return result


def newest(tensor: Tensor, count: int) -> Tensor:
    """The last `count` positions of [B, S, ...], as a tensor that does not keep the others alive."""
    return tensor[:, max(0, tensor.shape[1] - count) :].clone(memory_format=torch.contiguous_format)


def mask_of_keys(memory: Memory, padding_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """[B, M + T] bool, False for padding; None where all are real."""
    if padding_mask is None and memory.padding is None:
        return None
    before, now = memory.padding, padding_mask
    if before is None:
        before = torch.ones(len(tokens), memory.length, dtype=torch.bool, device=tokens.device)
    if now is None:
        now = torch.ones_like(tokens, dtype=torch.bool)
    check_padding_mask(now, tokens.shape)
    return torch.cat([before, now], 1)
