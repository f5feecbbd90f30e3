"""What `balance` keeps of a model: where its gates are, what they returned in a forward, and the loss of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pointsman import auxiliary
from pointsman.hf.bias import Bias
from pointsman.hf.forms import Form, Kind
from pointsman.hf.gates import read_any


class Seat:
    """What a gate returned in the forward that runs, while it is `open`: (output, shape of its tokens)."""

    def __init__(self) -> None:
        self.open = False
        self.seen: list[tuple[Any, torch.Size]] = []


@dataclass(frozen=True)
class Place:
    """A gate of a model: its path, its form (None: read what it returns), and whether the decoder's mask is its own."""

    path: str
    form: Form | None
    decoder: bool

    @property
    def kind(self) -> Kind:
        return "other" if self.form is None else self.form.kind

    def seats(self, home: nn.Module) -> Iterator[tuple[nn.Module, Seat]]:
        """The gates at this place: PEFT keeps the one it trains beside the one it was."""
        for module in home.get_submodule(self.path).modules():
            seat = module.__dict__.get("pointsman_seat")
            if seat is not None:
                yield module, seat

    def read(self, home: nn.Module, gate: nn.Module, output: Any, tokens: int) -> tuple[Tensor, Tensor]:
        """Logits [tokens, E] and experts [tokens, k], with their gradients."""
        block = home.get_submodule(self.path.rpartition(".")[0])
        logits, _, experts = read_any(self.form, gate, block, output, tokens)
        return logits, experts


def scores(logits: Tensor, kind: Kind, linear: bool) -> Tensor:
    """The distribution [tokens, E] whose mean is P: softmax, or sigmoids divided by their sum. Float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if kind == "sigmoid":
        found = torch.sigmoid(logits)
        return found / found.sum(-1, keepdim=True).clamp_min(torch.finfo(found.dtype).tiny)
    if not linear and bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
        return logits  # a few classes return probabilities
    return torch.softmax(logits, -1)


@dataclass(frozen=True)
class Balancing:
    """The settings of one balanced model; kept at the model as `pointsman_balancing`."""

    coefficient: float
    how: Literal["loss", "bias"]
    like: Literal["transformers"] | None
    places: tuple[Place, ...]
    mask_at: int | None
    shifts: bool
    biases: tuple[Bias, ...] = ()

    def routings(self, home: Any, mask: Tensor | None, decoder_mask: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """(place, distribution [tokens, E], logits, experts [tokens, k], mask [tokens] or None) of what gates saw."""
        for place in self.places:
            for gate, seat in place.seats(home):
                for output, shape in seat.seen:
                    logits, experts = place.read(home, gate, output, shape.numel())
                    real = _real(decoder_mask if place.decoder else mask, place.path, len(logits))
                    real = None if real is None else real.to(logits.device)
                    experts = experts if real is None else experts.masked_fill(~real[:, None], -1)
                    linear = place.form is not None and place.form.linear
                    yield place, scores(logits, place.kind, linear), logits, experts, real

    def loss(self, found: Sequence[tuple[Any, ...]]) -> Tensor:
        """The mean over layers of E sum_i f_i P_i; with `like`, transformers' value over all layers at once."""
        if self.like is None:
            values = [auxiliary.balance(probs, experts, mask) for _, probs, _, experts, mask in found]
            return torch.stack([value.to(values[0].device) for value in values]).mean()
        device, k = found[0][2].device, found[0][3].shape[-1]
        logits = torch.cat([one[2].to(device) for one in found]).float()
        probs = torch.softmax(logits, -1)
        experts = probs.topk(k, dim=-1).indices
        masks = [one[4] for one in found]
        mask = None if masks[0] is None else torch.cat([one.to(device) for one in masks])
        experts = experts if mask is None else experts.masked_fill(~mask[:, None], -1)
        pooled: Tensor = k * auxiliary.balance(probs, experts, mask)
        return pooled


def _real(mask: Any, path: str, tokens: int) -> Tensor | None:
    """[tokens] bool of a mask [B, T]; None where every token counts."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    length = tokens // len(mask)
    if length > mask.shape[1] or tokens != len(mask) * length:
        raise ValueError(f"hf.balance: gate {path!r} read {tokens} tokens, attention_mask has {list(mask.shape)}")
    return mask[:, -length:].reshape(-1).bool()
