"""Corruptions of images: determinism, severity, and simple cases with a known answer."""

import numpy as np
import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("scipy")

from pointsman._errors import RunError
from pointsman_lab.tasks.images.corruptions import CORRUPTIONS, _blurred, _disk, _streaked, corrupt, glass_blur
from pointsman_lab.tasks.images.severities import PARAMETERS, SIDES


def pictures(count: int = 2, side: int = 32) -> np.ndarray:
    """Smooth pictures with an edge, as photographs have them."""
    ramp = np.linspace(40, 200, side)
    base = np.stack(
        [np.add.outer(ramp, ramp) / 2, np.add.outer(ramp, -ramp) / 2 + 120, np.full((side, side), 90.0)], -1
    )
    base[side // 3 : side // 2, side // 4 : side // 2] = (230, 40, 60)
    return np.stack([np.clip(base + 5 * index, 0, 255) for index in range(count)]).astype(np.uint8)


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_image_has_draws_of_its_own(corruption: str) -> None:
    images = pictures(3)
    whole = corrupt(images, corruption, 3)
    assert whole.dtype == np.uint8
    assert (whole[1:] == corrupt(images[1:], corruption, 3, first=1)).all()
    assert (whole == corrupt(images, corruption, 3)).all()
    assert not (whole == images).all()


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_severity_5_is_further_from_the_picture_than_1(corruption: str) -> None:
    images = pictures(2, 64)
    first, last = (np.abs(corrupt(images, corruption, severity).astype(float) - images).mean() for severity in (1, 5))
    if corruption == "elastic_transform":  # its severities trade the affine map for small displacements
        assert first > 0
        assert last > 0
    else:
        assert last > first


def test_every_corruption_has_five_severities_for_every_side() -> None:
    assert list(PARAMETERS) == list(CORRUPTIONS)
    assert all(set(sizes) == set(SIDES) for sizes in PARAMETERS.values())
    assert all(len(rows) == 5 for sizes in PARAMETERS.values() for rows in sizes.values())


def test_strength_0_is_the_identity() -> None:
    image = pictures(1)[0] / 255.0
    draw = np.random.default_rng(0)
    for name, nothing in (("gaussian_noise", 0.0), ("impulse_noise", 0.0), ("contrast", 1.0), ("brightness", 0.0),
                          ("fog", (0.0, 2.0)), ("elastic_transform", (0.0, 0.0, 0.0))):  # fmt: skip
        assert np.allclose(CORRUPTIONS[name](image, nothing, draw), image), name


def test_contrast_and_brightness_by_hand() -> None:
    image = np.array([[[0.2, 0.4, 0.1]] * 2, [[0.6, 0.4, 0.1]] * 2])
    draw = np.random.default_rng(0)
    assert np.allclose(CORRUPTIONS["contrast"](image, 0.5, draw)[0, 0], [0.3, 0.4, 0.1])
    assert np.allclose(CORRUPTIONS["brightness"](image, 0.1, draw)[0, 0], np.array([0.2, 0.4, 0.1]) * 0.5 / 0.4)


def test_blurs_keep_a_uniform_picture() -> None:
    grey = np.full((1, 32, 32, 3), 100, dtype=np.uint8)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "pixelate", "elastic_transform"):
        assert np.abs(corrupt(grey, name, 5).astype(int) - 100).max() <= 1, name


def test_motion_is_a_streak_to_one_side() -> None:
    image = np.zeros((9, 9, 1))
    image[4, 6] = 1
    weights = np.exp(-(np.arange(5) ** 2) / 8)
    expected = np.zeros((9, 9))
    expected[4, 6:1:-1] = weights / weights.sum()
    assert np.allclose(_streaked(image, 2, 2.0, 0.0)[..., 0], expected)
    assert np.allclose(_streaked(image.swapaxes(0, 1), 2, 2.0, 90.0)[..., 0], expected.T)


@pytest.mark.parametrize(("radius", "sigma", "reach", "half"), [(3, 0.1, 8, 1), (10, 0.5, 10, 2)])
def test_the_kernel_of_defocus_blur(radius: int, sigma: float, reach: int, half: int) -> None:
    """A disk of sum 1, smoothed with reflected borders, and not normalised again."""
    rows = range(-reach, reach + 1)
    disk = np.array([[float(i * i + j * j <= radius * radius) for i in rows] for j in rows])
    wide = np.pad(disk / disk.sum(), half, mode="reflect")
    window = np.array([[np.exp(-(i * i + j * j) / (2 * sigma**2)) for i in range(-half, half + 1)]
                       for j in range(-half, half + 1)])  # fmt: skip
    size = len(disk)
    expected = sum(
        weight * wide[i : i + size, j : j + size] for (i, j), weight in np.ndenumerate(window / window.sum())
    )
    assert np.allclose(_disk(radius, sigma), expected)


@pytest.mark.parametrize(
    ("corruption", "severity", "side", "words"),
    [("gaussian_nose", 1, 32, "gaussian_noise"), ("fog", 6, 32, "1 to 5"), ("fog", 1, 48, "32, 64, 224 pixels")],
)
def test_mistakes_name_what_is_allowed(corruption: str, severity: int, side: int, words: str) -> None:
    with pytest.raises(RunError, match=words):
        corrupt(np.zeros((1, side, side, 3), dtype=np.uint8), corruption, severity)


def test_glass_blur_copies_as_the_published_code_does() -> None:
    image, parameters = np.random.default_rng(0).random((16, 16, 3)), (0.05, 2, 2)
    pixels = (_blurred(image, 0.05) * 255).astype(np.uint8)
    draw = np.random.default_rng(1)
    for _ in range(2):
        shifts = draw.integers(-2, 2, size=(16, 16, 2))
        for h in range(14, 2, -1):
            for w in range(14, 2, -1):
                dx, dy = shifts[h, w]
                pixels[h, w], pixels[h + dx, w + dy] = pixels[h + dx, w + dy], pixels[h, w]  # views: no swap
    found = glass_blur(image, parameters, np.random.default_rng(1))
    np.testing.assert_array_equal(found, _blurred(pixels / 255.0, 0.05))


@pytest.mark.parametrize(
    "name",
    ["gaussian_noise", "shot_noise", "defocus_blur", "motion_blur", "zoom_blur", "fog", "brightness", "contrast",
     "pixelate", "jpeg_compression"],
)  # fmt: skip
def test_the_published_code_with_the_same_random_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/corruptions.md says why the other five are not here."""
    published = pytest.importorskip("imagecorruptions", reason="pip install imagecorruptions-imaug")
    [image] = pictures(1, 224)
    for severity in range(1, 6):
        draw = np.random.default_rng(severity)
        for function in ("normal", "uniform", "poisson"):
            monkeypatch.setattr(np.random, function, getattr(draw, function))
        theirs = published.corrupt(image, severity, name).astype(np.uint8).astype(int)
        parameters = PARAMETERS[name][224][severity - 1]
        ours = CORRUPTIONS[name](image / 255.0, parameters, np.random.default_rng(severity))
        assert np.abs((np.clip(ours, 0, 1) * 255).astype(np.uint8) - theirs).max() <= 1, severity
