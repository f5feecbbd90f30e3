"""Whether loss and gradient are finite, known on the device: nobody waits until somebody asks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Told(NamedTuple):
    """What is read: loss and gradient's norm of the last step, or of the first that was not finite; whether one was;
    how many steps before that were finite."""

    loss: float
    norm: float
    bad: bool
    good: int


class Finite:
    """The steps since the last reading. After the first that is not finite, all are taken for such.

    Args:
        device: of the figures.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.zeros(4, dtype=torch.float64, device=device)  # as `Told`

    @property
    def bad(self) -> Tensor:
        """Bool []: whether this or an earlier step was not finite."""
        return self._kept[2] != 0

    def add(self, figures: Tensor) -> Tensor:
        """Takes in a step's loss and norm [2]; `bad` with it. Nothing waits for the device."""
        before, figures = self.bad, figures.double()
        bad = torch.isfinite(figures).all().logical_not().double()
        now = torch.cat([figures, bad[None], (self._kept[3] + 1 - bad)[None]])
        self._kept.copy_(torch.where(before, self._kept, now))
        return self.bad

    def read(self) -> Told:
        """Waits for the device. The next step is the first again, unless this one was not finite."""
        loss, norm, bad, good = self._kept.tolist()
        if not bad:
            self._kept.zero_()
        return Told(loss, norm, bool(bad), int(good))
