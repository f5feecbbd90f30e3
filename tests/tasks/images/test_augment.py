"""Augmentations: what they do, and that they depend on (seed, step, row) alone."""

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.tasks.images.augment import (
    Augmentation,
    ImageStream,
    crop,
    evaluation_batches,
    inception_crop,
    rand_augment,
    to_tensor,
    uniforms,
)
from pointsman_lab.tasks.images.part import ImagePart

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
LABELS = torch.eye(6)
EVERYTHING = "crop=4+flip+mixup=0.2"


@pytest.mark.parametrize("text", [EVERYTHING, "randaugment=2,10", "inception"])
def test_a_step_always_gives_the_same_pictures(text: str) -> None:
    pytest.importorskip("PIL")
    augment = Augmentation.parse(text)
    first, again, other = (augment(IMAGES, LABELS, seed=1, step=step)[0] for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_row_does_not_depend_on_the_size_of_the_batch() -> None:
    augment = Augmentation.parse("crop=4+flip")
    whole = augment(IMAGES, LABELS, seed=1, step=3)[0]
    part = augment(IMAGES[:2], LABELS[:2], seed=1, step=3)[0]
    assert torch.equal(whole[:2], part)


def test_streams_of_draws_differ() -> None:
    crops, flips = (uniforms(0, stream, 5, 4, 2) for stream in ("crop", "flip"))
    assert not np.array_equal(crops, flips)


def test_crop_moves_the_picture() -> None:
    draws = np.tile([[0.5, 0.5]], (6, 1))
    assert (crop(IMAGES, 4, draws) == IMAGES).all()
    moved = crop(IMAGES, 4, np.zeros((6, 2)))
    assert (moved[:, 4:, 4:] == IMAGES[:, :12, :12]).all()


def test_mixup_keeps_the_larger_share_first() -> None:
    pixels, labels = Augmentation.parse("mixup=0.2")(IMAGES, LABELS, seed=0, step=1)
    share = float(labels[0, 0])
    assert share >= 0.5
    assert torch.allclose(labels.sum(1), torch.ones(6))
    plain = to_tensor(IMAGES)
    assert torch.allclose(pixels[0], share * plain[0] + (1 - share) * plain[1], atol=1e-6)


def test_rand_augment_at_magnitude_0_keeps_geometry() -> None:
    pytest.importorskip("PIL")
    draws = np.array([[1.5 / 14, 0.0, 0.0]])  # shear
    assert (rand_augment(IMAGES[0], draws, 0.0) == IMAGES[0]).all()
    assert not (rand_augment(IMAGES[0], draws, 10.0) == IMAGES[0]).all()


def test_an_inception_crop_is_a_window_of_the_picture() -> None:
    pytest.importorskip("PIL")
    whole, corner = np.array([1.0, 0.5, 0.0, 0.0]), np.array([0.0, 0.5, 0.0, 0.0])
    assert (inception_crop(IMAGES[0], whole, len(IMAGES[0])) == IMAGES[0]).all()
    steps = np.repeat(np.repeat(np.array([[10, 200], [200, 200]], dtype=np.uint8), 8, 0), 8, 1)
    found = inception_crop(np.stack([steps] * 3, -1), corner, 16)  # 5 % of the area, in the upper left quarter
    assert found.shape == (16, 16, 3)
    assert (found == 10).all()
    wide = np.repeat(np.concatenate([steps, steps], 1)[..., None], 3, -1)  # 5 % of 16 x 32 pixels
    assert (inception_crop(wide, corner, 4) == 10).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [("crip=4", "crop"), ("crop", "whole numbers"), ("mixup=0", "above 0"), ("flip=2", "no number"),
     ("randaugment=2", "N,M"), ("crop=1+crop=2", "twice")],
)  # fmt: skip
def test_mistakes_name_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        Augmentation.parse(text)


def test_an_epoch_visits_every_image_once() -> None:
    part = ImagePart("abcdef", np.arange(6), IMAGES.__getitem__, side=IMAGES.shape[1])
    stream = ImageStream(part, 4, 6, Augmentation(), seed=0)
    rows = [row for step in range(3) for row in stream.indices(step)]
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert rows[:6] != rows[6:]
    assert stream.indices(1) == rows[4:8], "a batch depends on its step alone"


def test_evaluation_visits_evenly_spaced_images() -> None:
    part = ImagePart("abcdef", np.arange(6), IMAGES.__getitem__, side=IMAGES.shape[1])
    assert torch.cat([labels for _, labels in evaluation_batches(part, 4)]).tolist() == list(range(6))
    assert torch.cat([labels for _, labels in evaluation_batches(part, 4, budget=3)]).tolist() == [0, 2, 5]
