"""Evaluation by several ranks: the same figures as by one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pointsman.control import named_routers
from pointsman.lab.progress import Stop
from pointsman.ranks import ALONE, Ranks


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


def divides_rows(model: nn.Module) -> bool:
    """Whether a sequence gets the same figures whatever is evaluated beside it, so that ranks may share them out."""
    return all(router.batch_invariant and not router.stochastic for _, router in named_routers(model))
