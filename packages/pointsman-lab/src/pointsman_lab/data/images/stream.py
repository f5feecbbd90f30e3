"""Batches of labelled images, by step number: no state, so that resuming needs only the step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman._errors import RunError
from pointsman_lab.data.images.augment import Augmentation, to_tensor
from pointsman_lab.data.images.image_set import ImagePart


class ImageStream:
    """Training batches: each epoch visits every image once, in an order drawn from (seed, epoch).

    Batches go on over the end of an epoch, so that every batch has B images.

    Args:
        part: the training split.
        batch_size: B.
        num_classes: C.
        augmentation: what is done to the images.
        seed: of the order and of the augmentations.

    Raises:
        RunError: the part is empty.
    """

    def __init__(
        self, part: ImagePart, batch_size: int, num_classes: int, augmentation: Augmentation, seed: int
    ) -> None:
        if len(part) == 0:
            raise RunError("the training split has no images")
        if batch_size < 1:
            raise ValueError(f"batch size {batch_size}: at least 1")
        self.batch_size, self.num_classes, self.seed = batch_size, num_classes, seed
        self._part, self._augmentation = part, augmentation
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    @property
    def steps_per_epoch(self) -> float:
        return len(self._part) / self.batch_size

    def indices(self, step: int) -> list[int]:
        """Which images the step, counted from 0, takes: [B]."""
        size = len(self._part)
        rows = []
        for place in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, row = divmod(place, size)
            if epoch != self._epoch:
                bits = np.random.Philox(key=[self.seed % 2**64, (1 << 60) + epoch])
                self._epoch, self._order = epoch, np.random.Generator(bits).permutation(size)
            rows.append(int(self._order[row]))
        return rows

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """images [B, 3, S, S] in [-1, 1], and labels [B, C] as probabilities."""
        rows = self.indices(step)
        labels = F.one_hot(torch.from_numpy(self._part.labels[rows]), self.num_classes).float()
        return self._augmentation(self._part.images[rows], labels, seed=self.seed, step=step)


def evaluation_batches(part: ImagePart, batch_size: int, budget: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """images [b, 3, S, S] and labels [b] int64, in file order; at most `budget` images, evenly spaced."""
    count = len(part) if budget is None else min(budget, len(part))
    rows = np.unique(np.linspace(0, len(part) - 1, count).astype(np.int64)) if count < len(part) else np.arange(count)
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        yield to_tensor(part.images[chosen]), torch.from_numpy(part.labels[chosen])
