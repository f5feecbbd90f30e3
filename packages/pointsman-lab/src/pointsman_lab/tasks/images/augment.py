"""Augmentations of image batches: pure functions of (seed, step, row).

All routers of a comparison therefore see the same pictures, and a resumed run goes on with the same ones. Row r of a
step draws the same numbers whatever the batch size is: the draws lie row by row in one stream.

Shapes: images uint8 [B, S, S, 3]; what the model gets is float32 [B, 3, S, S] in [-1, 1]; labels are probabilities
[B, C] float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.data.streams import drawing
from pointsman_lab.tasks.images.part import ImagePart, Pixels, chosen_rows

_STREAM = {"crop": 0, "flip": 1, "mixup": 3, "randaugment": 4, "inception": 6}
_RAND_AUGMENT_LEVELS = 10.0


def uniforms(seed: int, stream: str, step: int, rows: int, width: int) -> NDArray[np.float64]:
    """[rows, width] numbers in [0, 1) that depend on (seed, stream, step, row, column) alone."""
    return drawing(seed, (_STREAM[stream] << 48) + step).random((rows, width))


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images, in this order: inception, randaugment, crop, flip, mixup.

    Attributes:
        crop: pixels of reflected margin of which a window of the old size is cut; 0: none.
        flip: whether half of the images are mirrored.
        mixup: alpha of the Dirichlet distribution; 0: none. One share a step: lambda x_i + (1 - lambda) x_(i+1), the
            larger share first (Zhang et al. 2018, as V-MoE's code draws it).
        inception: whether a random window of each image as it lies on the disk, of 5 to 100 % of its area and with
            sides 3 : 4 to 4 : 3, is resized to the images' size (Szegedy et al. 2015).
        randaugment: (operations an image, magnitude from 0 to 10) (Cubuk et al. 2020); None: none.
    """

    crop: int = 0
    flip: bool = False
    mixup: float = 0.0
    randaugment: tuple[int, float] | None = None
    inception: bool = False

    @classmethod
    def parse(cls, text: str) -> Augmentation:
        """Reads `crop=4+flip+mixup=0.2+randaugment=2,10`; an empty text is no augmentation."""
        values: dict[str, object] = {}
        for word in filter(None, text.split("+")):
            name, _, value = word.partition("=")
            if name not in _STREAM:
                raise RunError(f"augment {text!r}: unknown {name!r}: {did_you_mean(name, _STREAM)}")
            if name in values:
                raise RunError(f"augment {text!r}: {name} is given twice")
            values[name] = _number(text, name, value)
        return cls(**values)  # type: ignore[arg-type]  # `_number` gives each name its own type

    def __call__(
        self, images: Pixels | Sequence[Pixels], labels: Tensor, *, seed: int, step: int, side: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """images [B, S, S, 3] and labels [B, C] of a step -> float32 [B, 3, S, S] in [-1, 1], and labels.

        With `inception` images may be of any size; `side` is S then.
        """
        rows = len(images)
        if self.inception:
            draws = uniforms(seed, "inception", step, rows, 4)
            pairs = zip(images, draws, strict=True)
            images = np.stack([inception_crop(image, row, side or len(image)) for image, row in pairs])
        images = np.asarray(images)
        if self.randaugment is not None:
            number, magnitude = self.randaugment
            draws = uniforms(seed, "randaugment", step, rows, 3 * number)
            images = np.stack([rand_augment(image, row, magnitude) for image, row in zip(images, draws, strict=True)])
        if self.crop:
            images = crop(images, self.crop, uniforms(seed, "crop", step, rows, 2))
        if self.flip:
            mirrored = uniforms(seed, "flip", step, rows, 1)[:, 0] < 0.5
            images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        pixels = to_tensor(images)
        if self.mixup:
            share = float(drawing(seed, (_STREAM["mixup"] << 48) + step).beta(self.mixup, self.mixup))
            share = max(share, 1 - share)
            pixels = share * pixels + (1 - share) * pixels.roll(-1, 0)
            labels = share * labels + (1 - share) * labels.roll(-1, 0)
        return pixels, labels


def _number(text: str, name: str, value: str) -> object:
    if name in ("flip", "inception"):
        if value:
            raise RunError(f"augment {text!r}: {name} takes no number")
        return True
    if name == "randaugment":
        found = re.fullmatch(r"(\d{1,2}),(\d{1,2}(?:\.\d+)?)", value)
        if not found or not 1 <= int(found[1]) <= 10 or float(found[2]) > _RAND_AUGMENT_LEVELS:
            raise RunError(f"augment {text!r}: randaugment=N,M with N from 1 to 10 and M from 0 to 10, not {value!r}")
        return int(found[1]), float(found[2])
    if name == "mixup":
        if not re.fullmatch(r"\d*\.?\d+", value) or not 0 < float(value) <= 10:
            raise RunError(f"augment {text!r}: mixup={value!r}; allowed are numbers above 0, up to 10")
        return float(value)
    if not value.isdecimal() or not 1 <= int(value) <= 512:
        raise RunError(f"augment {text!r}: {name}={value!r}; allowed are whole numbers of pixels from 1 to 512")
    return int(value)


def to_tensor(images: Pixels) -> Tensor:
    """uint8 [B, S, S, 3] -> float32 [B, 3, S, S] in [-1, 1]."""
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return pixels.to(torch.float32).mul_(2 / 255).sub_(1)


def crop(images: Pixels, margin: int, draws: NDArray[np.float64]) -> Pixels:
    """A window of the old size out of each image with a reflected margin; `draws` [B, 2] place it."""
    side = images.shape[1]
    if margin >= side:
        raise RunError(f"augment: crop={margin} is no smaller than the images, {side} x {side}")
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)), mode="reflect")
    offset = (draws * (2 * margin + 1)).astype(np.int64)
    window = np.arange(side)
    rows = np.arange(len(images))[:, None, None]
    cut: Pixels = padded[rows, (offset[:, :1] + window)[:, :, None], (offset[:, 1:] + window)[:, None, :]]
    return cut


def inception_crop(image: Pixels, draws: NDArray[np.float64], side: int) -> Pixels:
    """A window of the image, resized to `side` (bilinear); `draws` [4] give its area, sides and place."""
    from PIL import Image

    height, width = image.shape[:2]
    area, ratio = (0.05 + 0.95 * draws[0]) * height * width, np.exp((2 * draws[1] - 1) * np.log(4 / 3))
    wide, high = min(width, float(np.sqrt(area * ratio))), min(height, float(np.sqrt(area / ratio)))
    left, top = draws[2] * (width - wide), draws[3] * (height - high)
    box = (left, top, left + wide, top + high)
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR, box=box))


def rand_augment(image: Pixels, draws: NDArray[np.float64], magnitude: float) -> Pixels:
    """Operations of RandAugment (Cubuk et al. 2020) at this magnitude, through Pillow.

    Args:
        image: [S, S, 3].
        draws: three numbers an operation: which one, its sign, and (unused ones stay unused) where.
        magnitude: from 0, the weakest, to 10.
    """
    from PIL import Image

    picture = Image.fromarray(image)
    operations = _operations()
    level = magnitude / _RAND_AUGMENT_LEVELS
    for which, sign, _ in draws.reshape(-1, 3):
        operation = operations[int(which * len(operations))]
        picture = operation(picture, level if sign < 0.5 else -level)
    return np.asarray(picture)


def _operations() -> tuple[Callable[..., Any], ...]:
    """Functions (image, level from -1 to 1) -> image. Levels are AutoAugment's: shear 0.3, rotation 30 degrees, …"""
    from PIL import Image, ImageEnhance, ImageOps

    grey = (128, 128, 128)

    def affine(matrix: Callable[[float, int], tuple[float, ...]]) -> Callable[..., Any]:
        def apply(image: Image.Image, level: float) -> Image.Image:
            data = matrix(level, image.width)
            return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.NEAREST, fillcolor=grey)

        return apply

    def enhance(kind: type) -> Callable[..., Any]:
        return lambda image, level: kind(image).enhance(1 + 0.9 * level)

    return (
        lambda image, level: image,
        affine(lambda level, side: (1, 0.3 * level, 0, 0, 1, 0)),
        affine(lambda level, side: (1, 0, 0, 0.3 * level, 1, 0)),
        affine(lambda level, side: (1, 0, level * side / 3, 0, 1, 0)),
        affine(lambda level, side: (1, 0, 0, 0, 1, level * side / 3)),
        lambda image, level: image.rotate(30 * level, fillcolor=grey),
        enhance(ImageEnhance.Brightness),
        enhance(ImageEnhance.Color),
        enhance(ImageEnhance.Contrast),
        enhance(ImageEnhance.Sharpness),
        lambda image, level: ImageOps.posterize(image, 8 - int(4 * abs(level))),
        lambda image, level: ImageOps.solarize(image, 256 - int(256 * abs(level))),
        lambda image, level: ImageOps.autocontrast(image),
        lambda image, level: ImageOps.equalize(image),
    )


class ImageStream:
    """Training batches: each epoch visits every image once, in an order drawn from (seed, epoch).

    Batches go on over the end of an epoch, so that every batch has B images.
    """

    def __init__(
        self, part: ImagePart, batch_size: int, num_classes: int, augmentation: Augmentation, seed: int,
        tokens: int = 1, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.batch_size, self.num_classes, self.seed = batch_size, num_classes, seed
        self.tokens_per_step = float(batch_size * tokens)
        self._part, self._augmentation, self._device = part, augmentation, device
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def indices(self, step: int) -> list[int]:
        """Which images the step, counted from 0, takes: [B]."""
        size = len(self._part)
        rows = []
        for place in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, row = divmod(place, size)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, drawing(self.seed, (1 << 60) + epoch).permutation(size)
            rows.append(int(self._order[row]))
        return rows

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """images [B, 3, S, S] in [-1, 1], and labels [B, C] as probabilities."""
        rows = self.indices(step)
        labels = F.one_hot(torch.from_numpy(self._part.labels[rows]), self.num_classes).float()
        part = self._part
        whole = part.resized and self._augmentation.inception
        images = [part.load(row) for row in rows] if whole else part.pixels(rows)
        pixels, labels = self._augmentation(images, labels, seed=self.seed, step=step, side=part.side)
        return pixels.to(self._device), labels.to(self._device)

    def is_epoch_start(self, step: int) -> bool:
        """No memory goes from image to image."""
        return False


def evaluation_batches(part: ImagePart, batch_size: int, budget: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """images [b, 3, S, S] and labels [b] int64, in file order; at most `budget` images, evenly spaced."""
    rows = chosen_rows(part, budget)
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        yield to_tensor(part.pixels(chosen)), torch.from_numpy(part.labels[chosen])
