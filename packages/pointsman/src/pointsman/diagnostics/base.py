"""The interface of all diagnostics: streaming objects with float64 sums, `update`, `merge` and `result`.

Memory never grows with the number of tokens. Only `result` synchronises with the device, except for diagnostics that
select tokens (specialisation, similarity of outputs, Jacobians): their `update` does too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor

from pointsman.routing import Routing

Given = Tensor | None


class Diagnostic:
    """A streaming statistic. Its state is the float64 tensors and `Moments` among its attributes.

    Merging the states of several shards gives the same result as one pass over all data. `result()` holds only numbers,
    lists and None (no value), so that `json.dumps(allow_nan=False)` accepts it.
    """

    def merge(self, other: Self) -> Self:
        """Adds the state of `other`; returns self."""
        for name, value in vars(other).items():
            if isinstance(value, Moments):
                getattr(self, name).merge(value)
            elif isinstance(value, Tensor):
                self._add(**{name: value})
        return self

    def _add(self, **sums: Tensor) -> None:
        """Adds each tensor to the attribute of its name, which is None before the first one."""
        for name, value in sums.items():
            mine = getattr(self, name)
            setattr(self, name, value.clone() if mine is None else mine + value.to(mine.device))

    def result(self) -> dict[str, Any]:
        raise NotImplementedError


class RoutingDiagnostic(Diagnostic):
    """A diagnostic of one layer's routings."""

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        """Adds one forward.

        Args:
            routing: the router's decision.
            mask: [tokens] bool, True for a real token; None: all are real.
            hidden: [tokens, dim], the router's input.
            token_ids: [tokens].
        """
        raise NotImplementedError


class Moments:
    """Count, mean and standard deviation of a stream, by Chan's pairwise update (no cancellation of large sums)."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def add(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds `values` [n] where `mask` [n] is True."""
        values = values.detach().double()
        real = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        values = values if mask is None else torch.where(mask, values, 0.0)
        count = real.sum()
        mean = (values * real).sum() / count.clamp_min(1)
        spread = ((values - mean).square() * real).sum()
        self._combine(count, mean, spread)

    def merge(self, other: Moments) -> None:
        if other.tensors:
            self._combine(*(tensor.clone() for tensor in other.tensors))

    def _combine(self, count: Tensor, mean: Tensor, spread: Tensor) -> None:
        if not self.tensors:
            self.tensors = [count, mean, spread]
            return
        count0, mean0, spread0 = self.tensors
        count, mean, spread = (tensor.to(count0.device) for tensor in (count, mean, spread))
        total = count0 + count
        share = count / total.clamp_min(1)
        delta = mean - mean0
        self.tensors = [total, mean0 + delta * share, spread0 + spread + delta.square() * count0 * share]

    @property
    def count(self) -> int:
        return int(self.tensors[0]) if self.tensors else 0

    @property
    def mean(self) -> float | None:
        return number(self.tensors[1]) if self.count else None

    @property
    def std(self) -> float | None:
        """Population standard deviation (divisor n)."""
        return number((self.tensors[2] / self.tensors[0]).clamp_min(0).sqrt()) if self.count else None


def number(value: Tensor | float | None) -> float | None:
    """A float; None for nan and infinity."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def numbers(values: Tensor | Iterable[float]) -> list[float | None]:
    """A flat list of floats; None for nan and infinity."""
    return [number(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def table(values: Tensor) -> list[list[float | None]]:
    """A matrix as a list of lists."""
    return [numbers(row) for row in values]


def ratio(top: float | None, bottom: float | None) -> float | None:
    """top / bottom; None if either is missing or bottom is 0."""
    return None if top is None or not bottom else number(top / bottom)


def chosen(routing: Routing, mask: Tensor | None, *, virtual: bool = False) -> Tensor:
    """The chosen experts [tokens, k]; -1 for padding, and for virtual experts; if `virtual`, these are E + v."""
    experts = routing.chosen if virtual else routing.experts
    return experts if mask is None else experts.masked_fill(~mask.to(experts.device)[:, None], -1)


def first_choice(routing: Routing, mask: Tensor | None = None) -> Tensor:
    """The expert with the largest combine weight [tokens]; the first one among equals, -1 for none."""
    experts = chosen(routing, mask)
    weights = routing.weights.detach().masked_fill(experts < 0, -torch.inf)
    best = (weights == weights.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
    return experts.gather(-1, best)[:, 0]


def unmixed(routing: Routing) -> Tensor:
    """The distribution before mixing [tokens, E]."""
    return routing.probs if routing.unmixed is None else routing.unmixed
