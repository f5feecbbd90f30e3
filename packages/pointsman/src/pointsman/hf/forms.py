"""How a gate is called and what it returns: its `Form`, and the positions in the output of most classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["softmax", "sigmoid", "other"]


class NotAGateError(ValueError):
    """A module next to the experts does not return logits, weights and indices; the message says what it does."""


@dataclass(frozen=True)
class Form:
    """How a gate is called, and what it returns.

    Attributes:
        owner: path from the gate to the module that holds the linear map ("" = the gate itself).
        sequence: whether its input must be [B, T, dim].
        extras: names of the block's tensors that are further arguments (a correction bias).
        logits, weights, indices: positions in the returned tuple.
        kind: the function from logits to scores; "other" if neither softmax nor sigmoid.
        linear: whether the logits are exactly `multiplier` * (weight @ hidden (+ bias)).
        outputs: the length of the returned tuple; 0 in configurations of earlier versions.
        multiplier: a constant of the class between the product and the logits.
        flat: whether it returns tokens [B * T] also for an input [B, T, dim].
        layout: the class whose `Layout` says what is returned; "" = logits, weights and indices, as above.
        power: of a class whose block divides the weights by their p-norm: p; None: it does not.
        table: the gate's buffer [V, k] of the experts of each token id, if it chooses by token id.
    """

    owner: str
    sequence: bool
    extras: tuple[str, ...]
    logits: int
    weights: int
    indices: int
    kind: Kind
    linear: bool
    outputs: int = 0
    multiplier: float = 1.0
    flat: bool = False
    layout: str = ""
    power: float | None = None
    table: str = ""


def positions(kind: str, output: tuple[Any, ...], tokens: int) -> tuple[int, int, int]:
    """Positions of logits, weights and indices in the output of a gate of class `kind` for this number of tokens."""
    tensors = [
        (place, item.flatten(0, -2) if item.dim() > 1 else item[:, None])
        for place, item in enumerate(output)
        if isinstance(item, Tensor) and item.dim() > 0
    ]
    tensors = [(place, item) for place, item in tensors if item.shape[0] == tokens]
    integers = [(place, item) for place, item in tensors if not item.is_floating_point() and item.dtype != torch.bool]
    floats = [(place, item) for place, item in tensors if item.is_floating_point()]
    if len(integers) != 1:
        raise NotAGateError(f"{kind} does not return the chosen experts [tokens, k]")
    indices, chosen = integers[0]
    if not chosen.shape[1]:
        raise NotAGateError(f"{kind} chooses no expert: its k is 0")
    if chosen.shape[1] > 1 and bool((chosen.sort(-1).values.diff(dim=-1) == 0).any()):
        raise NotAGateError(f"{kind} returns a mask over experts, not the chosen experts [tokens, k]")
    wide = [place for place, item in floats if item.shape[1] > chosen.shape[1]]
    narrow = [place for place, item in floats if item.shape == chosen.shape]
    if not wide and len(narrow) >= 2:  # k = E: every class returns the logits first
        wide, narrow = narrow[:1], narrow[1:]
    if not wide or not narrow:
        raise NotAGateError(f"{kind} does not return logits [tokens, experts] and weights [tokens, k]")
    return wide[0], narrow[0], indices
