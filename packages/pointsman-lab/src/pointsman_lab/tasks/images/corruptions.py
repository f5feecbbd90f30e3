"""Common corruptions of images in the style of ImageNet-C (Hendrycks and Dietterich 2019): 15 kinds, five severities.

Parameters are those of the published scripts for 32, 64 and 224 pixels. Two things differ, so that results are
"C-style" and not the published sets: frost is a generated fractal layer (theirs: six photographs), and every image
draws from a generator of its own, seeded by (corruption, severity, number of the image). Files of the published sets
are read as they are (`sources`).

Shapes: an image is float64 [side, side, 3] in [0, 1]; what is stored is uint8.
"""

# mypy: disable-error-code="no-any-return"
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pictures
from scipy import ndimage

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.tasks.images.part import Pixels
from pointsman_lab.tasks.images.severities import PARAMETERS, SEVERITIES, check_side

Image = NDArray[np.float64]
Draw = np.random.Generator


def corrupt(images: Pixels, corruption: str, severity: int, first: int = 0) -> Pixels:
    """images uint8 [N, side, side, 3] -> the same, corrupted.

    Args:
        corruption: one of `CORRUPTIONS`.
        severity: from 1 to 5.
        first: the number of the first image in its set, which seeds its draws.
    """
    if corruption not in CORRUPTIONS:
        raise RunError(f"unknown corruption {corruption!r}: {did_you_mean(corruption, CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise RunError(f"severity {severity}: allowed are 1 to 5")
    side = images.shape[1]
    check_side(side)
    parameters = PARAMETERS[corruption][side][severity - 1]
    number = list(CORRUPTIONS).index(corruption)
    corrupted = np.empty_like(images)
    for row, image in enumerate(images):
        draw = np.random.Generator(np.random.Philox(key=[10 * number + severity, first + row]))
        result = CORRUPTIONS[corruption](image / 255.0, parameters, draw)
        corrupted[row] = (np.clip(result, 0, 1) * 255).astype(np.uint8)
    return corrupted


def gaussian_noise(image: Image, scale: float, draw: Draw) -> Image:
    return image + draw.normal(scale=scale, size=image.shape)


def shot_noise(image: Image, rate: float, draw: Draw) -> Image:
    return draw.poisson(image * rate) / rate


def impulse_noise(image: Image, share: float, draw: Draw) -> Image:
    """Salt and pepper, half each, on this share of all values."""
    hit = draw.random(image.shape) < share
    return np.where(hit, draw.random(image.shape) < 0.5, image)


def defocus_blur(image: Image, parameters: tuple[float, float], draw: Draw) -> Image:
    return ndimage.correlate(image, _disk(*parameters)[..., None], mode="mirror")


def _disk(radius: float, sigma: float) -> Image:
    reach = 8 if radius <= 8 else int(radius)
    grid = np.arange(-reach, reach + 1)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(np.float64)
    disk /= disk.sum()  # before smoothing, as published: at the largest radius the sum is then not 1
    half = 1 if radius <= 8 else 2  # a window of 3 or of 5 smooths the edge
    weights = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    for axis in (0, 1):
        disk = ndimage.correlate1d(disk, weights, axis=axis, mode="mirror")
    return disk


def glass_blur(image: Image, parameters: tuple[float, int, int], draw: Draw) -> Image:
    """Blur, give each pixel the value of one at most `reach` away, blur.

    The paper says that pixels are swapped; the published code swaps numpy views, which copies one way.
    """
    sigma, reach, rounds = parameters
    pixels = (_blurred(image, sigma) * 255).astype(np.uint8)
    side = len(pixels)
    for _ in range(rounds):
        shifts = draw.integers(-reach, reach, size=(side, side, 2))
        for row in range(side - reach, reach, -1):
            for column in range(side - reach, reach, -1):
                down, right = shifts[row, column]
                pixels[row, column] = pixels[row + down, column + right]
    return _blurred(pixels / 255.0, sigma)


def motion_blur(image: Image, parameters: tuple[int, float], draw: Draw) -> Image:
    return _streaked(image, *parameters, draw.uniform(-45, 45))


def zoom_blur(image: Image, parameters: tuple[float, float], draw: Draw) -> Image:
    end, step = parameters
    zooms = np.arange(1, end, step)
    return (image + sum(_zoomed(image, zoom) for zoom in zooms)) / (len(zooms) + 1)


def snow(image: Image, parameters: tuple[float, ...], draw: Draw) -> Image:
    mean, std, zoom, threshold, radius, sigma, mix = parameters
    flakes = _zoomed(draw.normal(mean, std, (*image.shape[:2], 1)), zoom)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
    flakes = _streaked(flakes, int(radius), sigma, draw.uniform(-135, -45))
    grey = image @ np.array([0.299, 0.587, 0.114])
    whitened = mix * image + (1 - mix) * np.maximum(image, grey[..., None] * 1.5 + 0.5)
    return whitened + flakes + np.rot90(flakes, 2)


def frost(image: Image, parameters: tuple[float, float], draw: Draw) -> Image:
    keep, strength = parameters
    layer = _plasma(image.shape[0], 1.7, draw)
    crystals = np.clip((layer - 0.45) * 3, 0, 1)
    tint = np.array([0.85, 0.93, 1.0])  # photographs of frost are bluish
    return keep * image + strength * crystals[..., None] * tint


def fog(image: Image, parameters: tuple[float, float], draw: Draw) -> Image:
    strength, decay = parameters
    most = image.max()
    layer = _plasma(image.shape[0], decay, draw)
    return (image + strength * layer[..., None]) * most / (most + strength)


def brightness(image: Image, change: float, draw: Draw) -> Image:
    """Raises the value of HSV: all channels by the same factor, up to the value 1."""
    value = image.max(axis=2, keepdims=True)
    raised = np.clip(value + change, 0, 1)
    return np.where(value > 0, image * raised / np.maximum(value, 1e-12), raised)


def contrast(image: Image, factor: float, draw: Draw) -> Image:
    mean = image.mean(axis=(0, 1), keepdims=True)
    return (image - mean) * factor + mean


def elastic_transform(image: Image, parameters: tuple[float, float, float], draw: Draw) -> Image:
    """A random affine map of three points, then a smooth random displacement."""
    side = image.shape[0]
    unit = 244 if side == 224 else side
    alpha, sigma, shift = (unit * value for value in parameters)
    centre, square = side // 2, side // 3
    corners = np.array(
        [[centre + square, centre + square], [centre + square, centre - square], [centre - square, centre - square]],
        dtype=np.float64,
    )
    moved = corners + draw.uniform(-shift, shift, corners.shape)
    # the map from moved to fixed points: where each pixel of the result comes from
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners)
    columns, rows = np.meshgrid(np.arange(side), np.arange(side))
    source = np.stack([columns, rows, np.ones_like(rows)], axis=-1) @ back
    places = [source[..., 1], source[..., 0]]
    warped = _sampled(image, places, "mirror")
    down, right = (
        alpha * ndimage.gaussian_filter(draw.uniform(-1, 1, (side, side)), sigma, mode="reflect", truncate=3)
        for _ in range(2)
    )
    return _sampled(warped, [rows + down, columns + right], "reflect")


def _sampled(image: Image, places: list[Any], mode: str) -> Image:
    """The image at these rows and columns, each [side, side], between pixels linearly."""
    channels = np.moveaxis(image, -1, 0)
    return np.stack([ndimage.map_coordinates(channel, places, order=1, mode=mode) for channel in channels], axis=-1)


def pixelate(image: Image, share: float, draw: Draw) -> Image:
    picture = Pictures.fromarray((image * 255).astype(np.uint8))
    small = max(1, int(picture.width * share))
    box = Pictures.Resampling.BOX
    return np.asarray(picture.resize((small, small), box).resize(picture.size, box)) / 255.0


def jpeg_compression(image: Image, quality: int, draw: Draw) -> Image:
    buffer = io.BytesIO()
    Pictures.fromarray((image * 255).astype(np.uint8)).save(buffer, "JPEG", quality=quality)
    with Pictures.open(buffer) as picture:
        return np.asarray(picture) / 255.0


def _blurred(image: Image, sigma: float) -> Image:
    return ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest")


def _streaked(image: Image, radius: int, sigma: float, angle: float) -> Image:
    """Each pixel is a mean over 2 radius + 1 pixels along the angle (degrees), with the weights of half a Gaussian.

    This is ImageMagick's motion blur. Beyond the border the outermost pixels go on.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    down, right = (np.ceil(steps * part(np.deg2rad(angle)) - 0.5).astype(int) for part in (np.sin, np.cos))
    margin, (height, width) = 2 * radius + 1, image.shape[:2]
    wide = np.pad(image, ((margin, margin), (margin, margin), (0, 0)), mode="edge")
    tops, lefts = margin + down, margin + right
    moved = (wide[top : top + height, left : left + width] for top, left in zip(tops, lefts, strict=True))
    return sum(weight * one for weight, one in zip(weights / weights.sum(), moved, strict=True))


def _zoomed(image: Image, zoom: float) -> Image:
    """The middle of the image, enlarged to its old size."""
    side = image.shape[0]
    inner = int(np.ceil(side / zoom))
    start = (side - inner) // 2
    large = ndimage.zoom(image[start : start + inner, start : start + inner], (zoom, zoom, 1), order=1)
    extra = (large.shape[0] - side) // 2
    return large[extra : extra + side, extra : extra + side]


def _plasma(side: int, decay: float, draw: Draw) -> Image:
    """A plasma fractal by the diamond-square algorithm: [side, side] of one in [0, 1] whose side is a power of two."""
    whole = 1 << (side - 1).bit_length()
    heights = np.zeros((whole, whole))
    step, wobble = whole, 100.0

    def displaced(sums: Image) -> Image:
        return sums / 4 + wobble * draw.uniform(-wobble, wobble, sums.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        sums = corners + np.roll(corners, -1, axis=0)
        heights[half::step, half::step] = displaced(sums + np.roll(sums, -1, axis=1))
        middles = heights[half::step, half::step]
        above = middles + np.roll(middles, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        heights[::step, half::step] = displaced(above)
        beside = middles + np.roll(middles, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        heights[half::step, ::step] = displaced(beside)
        step, wobble = half, wobble / decay
    heights -= heights.min()
    return (heights / heights.max())[:side, :side]


CORRUPTIONS: Mapping[str, Callable[[Image, Any, Draw], Image]] = {
    function.__name__: function
    for function in (
        gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur, snow, frost,
        fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression,
    )
}  # fmt: skip
"""The 15 corruptions in the order of ImageNet-C's tables."""
