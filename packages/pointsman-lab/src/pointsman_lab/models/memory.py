"""What models return, and what they remember of earlier segments.

Shapes: B sequences, T tokens, M remembered positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
    """

    hidden: tuple[Tensor, ...]
    carries: Mapping[str, RouterState] = field(default_factory=dict)
    padding: Tensor | None = None

    @property
    def length(self) -> int:
        return self.hidden[0].shape[1]

    def to_tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a checkpoint; `from_tensors` is the inverse."""
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
