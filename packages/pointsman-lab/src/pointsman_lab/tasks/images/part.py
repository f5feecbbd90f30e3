"""Labelled images that are decoded whenever they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImagePart:
    """A part of a set of images.

    Attributes:
        names: what an error calls each image: its file, or file and row.
        labels: [N] int64, the class of each image, as an index of the set's classes.
        load: index -> the image as it lies on the disk, [height, width, 3].
        side: height and width of what `pixels` gives.
        resized: whether `pixels` fits images to `side`; otherwise they have it, or are refused.
    """

    names: Sequence[str]
    labels: NDArray[np.int64]
    load: Callable[[int], Pixels]
    side: int = 0
    resized: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> ImagePart:
        """These images alone."""
        names = [self.names[row] for row in rows]
        return replace(self, names=names, labels=self.labels[rows], load=lambda index: self.load(int(rows[index])))

    def pixels(self, rows: Iterable[int] | None = None) -> Pixels:
        """[.., side, side, 3] of these images; None: of all."""
        chosen = range(len(self)) if rows is None else [int(row) for row in rows]
        found = np.empty((len(chosen), self.side, self.side, 3), dtype=np.uint8)
        for place, row in enumerate(chosen):
            pixels = self.load(row)
            if not self.resized and pixels.shape[:2] != (self.side, self.side):
                told = f"{pixels.shape[1]} x {pixels.shape[0]} where {self.side} x {self.side} is expected"
                raise RunError(f"{self.names[row]}: {told}: add :size={self.side} to the data")
            found[place] = fit(pixels, self.side) if self.resized else pixels
        return found


def chosen_rows(part: ImagePart, budget: int | None) -> list[int]:
    """Numbers of at most `budget` images, evenly spaced; None: of all."""
    if budget is None or budget >= len(part):
        return list(range(len(part)))
    return sorted(set(np.linspace(0, len(part) - 1, budget).astype(int).tolist()))


def fit(pixels: Pixels, size: int) -> Pixels:
    """[height, width, 3] -> [size, size, 3]: the shorter side resized (bicubic), then the centre."""
    from PIL import Image

    height, width = pixels.shape[:2]
    scale = size / min(height, width)
    wide, high = max(size, round(width * scale)), max(size, round(height * scale))
    image = Image.fromarray(pixels)
    if (wide, high) != (width, height):
        image = image.resize((wide, high), Image.Resampling.BICUBIC)
    left, top = (wide - size) // 2, (high - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))
