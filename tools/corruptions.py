"""Our corruptions beside the published code's: `python -m tools.corruptions [--originals FOLDER] [--write PAGE]`.

It needs `pip install imagecorruptions-imaug`, ImageNet-C's functions at 224 pixels without ImageMagick. Its elastic
transform is not the published one, which is read from the authors' repository (see `tools.conformance`).
"""

from __future__ import annotations

import argparse
import datetime
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pointsman_lab._files import write_whole
from pointsman_lab._grid import NONE, Grid, wrapped
from pointsman_lab.tasks.images.corruptions import CORRUPTIONS
from pointsman_lab.tasks.images.severities import PARAMETERS
from tools.conformance.originals import File

SIDE = 224
ELASTIC = File(
    "hendrycks/robustness", "8190fe329f5f072a06e3a2aea02bb5dda69aed9f", "ImageNet-C/create_c/make_imagenet_c.py"
)
SEEDS = 3
WHY = {
    "impulse_noise": "their library draws from a generator of its own",
    "snow": "theirs crops a zoomed layer of 225 pixels after its blur",
    "frost": "a generated layer; theirs are photographs",
}
"""Corruption -> why the same random numbers do not give the same picture."""

Picture = NDArray[np.uint8]


class Row(NamedTuple):
    """Over pictures, severities and seeds: grey levels between the two, and how far ours moves for one of theirs."""

    largest: int
    mean: float
    ratio: float


@contextmanager
def drawing_from(draw: np.random.Generator) -> Iterator[None]:
    """Inside it `numpy.random`'s own functions draw from this generator."""
    names: dict[str, Callable[..., Any]] = {
        "normal": draw.normal, "uniform": draw.uniform, "poisson": draw.poisson, "randint": draw.integers,
        "seed": lambda seed: None,
    }  # fmt: skip
    kept = {name: getattr(np.random, name) for name in names}
    try:
        for name, function in names.items():
            setattr(np.random, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(np.random, name, function)


def pictures() -> list[Picture]:
    """Two photographs of scikit-image, [224, 224, 3]."""
    from PIL import Image
    from skimage import data

    found = []
    for picture in (data.astronaut(), data.chelsea()):
        side = min(picture.shape[:2])
        found.append(np.asarray(Image.fromarray(picture[:side, :side]).resize((SIDE, SIDE))))
    return found


def glass(image: Picture, severity: int, draw: np.random.Generator) -> NDArray[Any]:
    """Their glass blur, interpreted, with our draws: we draw a round at once, they pixel by pixel from the end."""
    from imagecorruptions import corruptions

    _, reach, rounds = PARAMETERS["glass_blur"][SIDE][severity - 1]
    shifts = (
        draw.integers(-reach, reach, size=(SIDE, SIDE, 2))[SIDE - reach : reach : -1, SIDE - reach : reach : -1]
        for _ in range(rounds)
    )
    one_by_one = (pair[::-1] for of_round in shifts for pair in of_round.reshape(-1, 2))
    kept, compiled = np.random.randint, corruptions._shuffle_pixels_njit_glass_blur
    np.random.randint = lambda *_, **__: next(one_by_one)  # type: ignore[assignment]
    corruptions._shuffle_pixels_njit_glass_blur = compiled.py_func
    try:
        return np.asarray(corruptions.glass_blur(image, severity, seed=0))
    finally:
        np.random.randint = kept
        corruptions._shuffle_pixels_njit_glass_blur = compiled


def elastic(originals: Path | None) -> Callable[[Picture, int], NDArray[Any]]:
    """The published function."""
    import cv2
    from scipy.ndimage import map_coordinates
    from skimage.filters import gaussian

    given = {"np": np, "cv2": cv2, "map_coordinates": map_coordinates, "gaussian": gaussian}
    found: Callable[[Picture, int], NDArray[Any]] = ELASTIC.load(originals, ["elastic_transform"], **given)[
        "elastic_transform"
    ]
    return found


def right_before_down(draw: np.random.Generator) -> Callable[..., Any]:
    """The draws of the elastic transform: we draw displacements downwards first, they to the right."""
    calls = iter((0, 2, 1))
    drawn: list[Any] = []

    def uniform(low: float, high: float, size: tuple[int, ...]) -> Any:
        place = next(calls)
        while len(drawn) <= place:
            drawn.append(draw.uniform(low, high, size))
        return drawn[place]

    return uniform


def compare(name: str, images: list[Picture], originals: Path | None) -> Row:
    from imagecorruptions import corrupt

    def published(image: Picture, severity: int, draw: np.random.Generator) -> NDArray[Any]:
        if name == "glass_blur":
            return glass(image, severity, draw)
        with drawing_from(draw):
            if name == "elastic_transform":
                np.random.uniform = right_before_down(draw)
                return elastic(originals)(image, severity)
            return np.asarray(corrupt(image, corruption_name=name, severity=severity))

    largest, means, moved = 0, [], [0.0, 0.0]
    for image in images:
        for severity in range(1, 6):
            for seed in range(SEEDS):
                parameters = PARAMETERS[name][SIDE][severity - 1]
                ours = CORRUPTIONS[name](image / 255.0, parameters, np.random.default_rng(seed))
                mine = (np.clip(ours, 0, 1) * 255).astype(np.uint8).astype(int)
                theirs = published(image, severity, np.random.default_rng(seed)).astype(np.uint8).astype(int)
                apart = np.abs(mine - theirs)
                largest = max(largest, int(apart.max()))
                means.append(float(apart.mean()))
                for place, one in enumerate((mine, theirs)):
                    moved[place] += float(np.abs(one - image).mean())
    return Row(largest, float(np.mean(means)), moved[0] / moved[1])


def page(rows: dict[str, Row]) -> str:
    table = Grid(
        ["corruption", "largest", "mean", "moved, ours / theirs", "why"],
        [[name, str(row.largest), f"{row.mean:.2f}", f"{row.ratio:.3f}", WHY.get(name, NONE)]
         for name, row in rows.items()],
    )  # fmt: skip
    version = metadata.version("imagecorruptions-imaug")
    date = datetime.datetime.now(datetime.UTC).date()
    elastic = f"`{ELASTIC.repository}` at {ELASTIC.commit[:7]}"
    return f"""# Our corruptions beside the published code

The 15 corruptions of `--robust c` beside `imagecorruptions-imaug` {version} (ImageNet-C's functions; its elastic
transform is another one, so that is from {elastic}), two photographs of {SIDE} pixels, five severities, {SEEDS} seeds,
both drawing the same random numbers. Largest and mean: grey levels (of 255) between the two pictures. Moved: mean
distance from the clean picture, ours over theirs. Of {date}, by

```sh
pip install imagecorruptions-imaug
python -m tools.corruptions --write docs/corruptions.md
```

{table.markdown()}
"""


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m tools.corruptions", description=__doc__)
    flags.add_argument("--originals", type=Path, metavar="FOLDER")
    flags.add_argument("--write", type=Path, metavar="PAGE")
    flags.add_argument("--only", metavar="NAME", choices=list(CORRUPTIONS))
    values = flags.parse_args()
    warnings.simplefilter("ignore")
    images = pictures()
    rows = {}
    for name in [values.only] if values.only else CORRUPTIONS:
        rows[name] = compare(name, images, values.originals)
        print(f"{name:18} largest {rows[name].largest:3}  mean {rows[name].mean:6.2f}  moved {rows[name].ratio:.3f}")
    if values.write:
        print(write_whole(values.write, wrapped(page(rows))))


if __name__ == "__main__":
    main()
