"""Evaluation by several ranks: the same figures as by one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from pointsman.control import named_routers
from pointsman.ranks import ALONE, Ranks
from pointsman_lab.progress import Stop

T = TypeVar("T")


class AgreedStop:
    """A `Stop` that is set on all ranks as soon as it is on one; every rank must ask it equally often."""

    def __init__(self, ranks: Ranks, stop: Stop | None) -> None:
        self._ranks, self._stop = ranks, stop

    def is_set(self) -> bool:
        asked = torch.tensor(self._stop is not None and self._stop.is_set(), dtype=torch.float64)
        return bool(self._ranks.total(asked)[0])


@contextmanager
def each_its_own(model: nn.Module) -> Iterator[None]:
    """Inside, routers look at the rows of their own rank alone: for ranks that read the same rows, or rows apart."""
    parts: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "ranks", None), Ranks)]
    before = [part.ranks for part in parts]
    for part in parts:
        part.ranks = ALONE
    try:
        yield
    finally:
        for part, ranks in zip(parts, before, strict=True):
            part.ranks = ranks


def own_share(batches: Iterable[T], count: int, ranks: Ranks) -> Iterator[tuple[T, bool]]:
    """This rank's part of `count` batches, and whether each counts.

    Rank r reads the batches r, r + W, …. Ranks read equally many, since a model over ranks runs on all of them at once:
    one that lacks a batch reads another that does not count.
    """
    given = 0
    last: T | None = None
    for number, last in enumerate(batches):
        if number % ranks.count == ranks.rank:
            given += 1
            yield last, True
    while last is not None and given < -(-count // ranks.count):
        given += 1
        yield last, False


def draws(model: nn.Module) -> bool:
    """Whether an evaluation draws at random, so that ranks cannot share the batches out."""
    return any(router.stochastic for _, router in named_routers(model))


def divides_rows(model: nn.Module) -> bool:
    """Whether a sequence gets the same figures whatever is evaluated beside it, so that ranks may share them out."""
    return not draws(model) and all(router.batch_invariant for _, router in named_routers(model))
