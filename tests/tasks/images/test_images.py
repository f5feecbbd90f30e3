"""Layouts of images on the disk, the cache, and the parts."""

from __future__ import annotations

import io
import json
import platform
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.tasks.images import image_set
from pointsman_lab.tasks.images.augment import Augmentation, ImageStream, inception_crop, to_tensor, uniforms
from pointsman_lab.tasks.images.image_set import ImageSet, fit, load_images

Image = pytest.importorskip("PIL.Image")
CLASSES = ("n01", "n02", "n03")


def picture(seed: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_classes(root: Path, count: int = 20, side: int = 8) -> None:
    for part in ("train", "val"):
        for number, name in enumerate(CLASSES):
            for index in range(count):
                file = root / part / name / f"{name}_{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(png(picture(1000 * number + index, side)))


def write_sheets(root: Path, train: int = 20, test: int = 10) -> None:
    root.mkdir(exist_ok=True)
    for name, labels, count in (
        ("data_batch_1.png", "train_labels_batch_1.json", train),
        ("test_batch.png", "test_labels.json", test),
    ):
        rows = np.stack([picture(index, 32).reshape(-1, 3) for index in range(count)])
        (root / name).write_bytes(png(rows))
        (root / labels).write_text(json.dumps([index % 10 for index in range(count)]))


def load(path: Path, tmp_path: Path, option: str = "") -> ImageSet:
    return load_images(f"{path}{option}", cache_dir=tmp_path / "cache")


def test_folders_of_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "set")
    images = load(tmp_path / "set", tmp_path)
    assert images.classes == CLASSES
    assert {split: len(images.split(split)) for split in images.splits} == {"train": 57, "valid": 3, "test": 60}
    test = images.split("test")
    assert test.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert (test.images[20] == picture(1000)).all()


@pytest.mark.parametrize("how", ["not cached", "too large"])
def test_images_that_are_not_cached_are_decoded_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write_classes(tmp_path / "set", side=12)
    kept = load(tmp_path / "set", tmp_path, ":size=8")
    if how == "too large":
        monkeypatch.setattr("pointsman_lab.tasks.images.image_set.MOST_CACHED", 120 * 8 * 8 * 3 - 1)
    folder = tmp_path / "other"
    read = load_images(f"{tmp_path / 'set'}:size=8", cache_dir=folder, cached=how == "too large")
    assert ("0.0 GB of pixels, decoded as they are read" in read.description) == (how == "too large")
    for split in kept.splits:
        one, two = kept.split(split), read.split(split)
        assert (one.labels == two.labels).all()
        assert (two.images.shape, len(two.images)) == (one.images.shape, len(one.images))
        for rows in ([2, 0], np.array([1]), slice(0, 2), slice(None)):
            assert (one.images[rows] == two.images[rows]).all()
    (tmp_path / "set" / "val" / CLASSES[0] / f"{CLASSES[0]}_0.png").write_bytes(b"")
    test = read.split("test")
    assert (test.images[[20]] == kept.split("test").images[[20]]).all(), "other rows are not decoded"
    with pytest.raises(RunError, match=r"_0\.png"):
        test.images[[0]]
    assert not folder.exists()


def test_a_cache_that_does_not_fit_the_disk_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_classes(tmp_path / "set")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=23_000))
    with pytest.raises(RunError, match=r"0.0 GB are free; the decoded images take 0.0 GB"):
        load(tmp_path / "set", tmp_path)


def test_crops_are_taken_from_the_image_as_it_lies_on_the_disk(tmp_path: Path) -> None:
    write_classes(tmp_path / "set", side=40)
    train = load(tmp_path / "set", tmp_path, ":size=16").split("train")
    stream = ImageStream(train, 4, 3, Augmentation.parse("inception"), seed=1)
    pixels, _ = stream.batch(0)
    draws = uniforms(1, "inception", 0, 4, 4)
    assert train.original is not None
    for row, index in enumerate(stream.indices(0)):
        original = train.original(index)
        assert original.shape == (40, 40, 3)
        assert torch.equal(pixels[row], to_tensor(inception_crop(original, draws[row], 16)[None])[0])


def test_a_tar_archive_gives_the_same_as_its_folder(tmp_path: Path) -> None:
    write_classes(tmp_path / "set")
    with tarfile.open(tmp_path / "packed.tar", "w") as archive:
        archive.add(tmp_path / "set", "set")
    folder, packed = (load(path, tmp_path) for path in (tmp_path / "set", tmp_path / "packed.tar"))
    assert folder.fingerprint == packed.fingerprint


def test_sheets_hold_one_image_a_row(tmp_path: Path) -> None:
    write_sheets(tmp_path / "set")
    images = load(tmp_path / "set", tmp_path)
    assert images.classes[3] == "cat"
    assert [len(images.split(split)) for split in ("train", "valid", "test")] == [18, 2, 10]
    assert (images.split("valid").images[1] == picture(19, 32)).all()


def test_cifar_binary(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = [bytes([index % 10]) + picture(index, 32).transpose(2, 0, 1).tobytes() for index in range(20)]
        (root / name).write_bytes(b"".join(records))
    images = load(root, tmp_path)
    assert (images.split("test").images[7] == picture(7, 32)).all()
    assert images.split("test").labels[13] == 3


def test_npy(tmp_path: Path) -> None:
    pixels = np.stack([picture(index, 32) for index in range(6)])
    np.save(tmp_path / "fog.npy", pixels)
    np.save(tmp_path / "labels.npy", np.arange(6) % 3)
    images = load(tmp_path / "fog.npy", tmp_path)
    assert images.splits == ("test",)
    assert (images.split("test").images == pixels).all()


def test_an_empty_array_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.zeros((0, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(0, dtype=np.int64))
    with pytest.raises(RunError, match=r"fog\.npy: the test part has no images"):
        load(tmp_path / "fog.npy", tmp_path)


@pytest.mark.parametrize("spoilt", ["fog.npy", "labels.npy"])
@pytest.mark.parametrize("content", ["", "cut", "archive", "pickle"])
def test_a_spoilt_array_is_named(spoilt: str, content: str, tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.stack([picture(index) for index in range(6)]))
    np.save(tmp_path / "labels.npy", np.arange(6) % 3)
    file = tmp_path / spoilt
    if content == "archive":
        with file.open("wb") as opened:
            np.savez(opened, images=np.zeros(3))
    elif content == "pickle":
        np.save(file, np.array([{}, {}], dtype=object), allow_pickle=True)
    else:
        file.write_bytes(file.read_bytes()[: -20 if content else 0])
    with pytest.raises(RunError, match=f"{spoilt}: not a plain .npy array") as told:
        load(tmp_path / "fog.npy", tmp_path)
    assert "\n" not in str(told.value)


def test_a_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    write_sheets(tmp_path / "set")
    before = load(tmp_path / "set", tmp_path)
    (file,) = (tmp_path / "cache").glob("*/train.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = load(tmp_path / "set", tmp_path)
    assert again.fingerprint == before.fingerprint
    assert not list((tmp_path / "cache").glob(".tmp-*"))


def test_the_first_of_two_processes_keeps_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sheets(tmp_path / "set")
    decoded, first = image_set._decoded, []

    def slow(*given: Any) -> Any:
        if image_set._decoded is slow:  # another process decodes the same meanwhile
            monkeypatch.setattr(image_set, "_decoded", decoded)
            first.append(load(tmp_path / "set", tmp_path).fingerprint)
            first.extend(folder.stat().st_ino for folder in (tmp_path / "cache").glob("[!.]*"))
        return decoded(*given)

    monkeypatch.setattr(image_set, "_decoded", slow)
    images = load(tmp_path / "set", tmp_path)
    assert [images.fingerprint, *(folder.stat().st_ino for folder in (tmp_path / "cache").iterdir())] == first


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    write_sheets(tmp_path / "set")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"cache/.tmp-{ended.pid}-{platform.node()}+x").mkdir(parents=True)
    load(tmp_path / "set", tmp_path)
    [folder] = (tmp_path / "cache").iterdir()
    assert (folder / "meta.json").is_file()


def test_size_resizes_the_shorter_side_and_crops_the_centre(tmp_path: Path) -> None:
    write_classes(tmp_path / "set", side=12)
    assert load(tmp_path / "set", tmp_path, ":size=8").side == 8
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = 255
    assert (fit(wide, 10) == 255).all()


def damaged(root: Path) -> None:
    write_classes(root)
    (root / "train" / "n01" / "n01_3.png").write_bytes(b"no image")


def truncated(root: Path) -> None:
    write_classes(root)
    file = root / "train" / "n01" / "n01_3.png"
    file.write_bytes(file.read_bytes()[:60])


def several_sizes(root: Path) -> None:
    write_classes(root)
    (root / "train" / "n02" / "n02_1.png").write_bytes(png(picture(1, 9)))


def unknown_class(root: Path) -> None:
    write_classes(root)
    (root / "val" / "n09").mkdir()
    (root / "val" / "n09" / "x.png").write_bytes(png(picture(1)))


def pickles(root: Path) -> None:
    root.mkdir()
    (root / "data_batch_1").write_bytes(b"\x80\x02.")


def few_labels(root: Path) -> None:
    write_sheets(root)
    (root / "test_labels.json").write_text("[1, 2]")


def one_image_a_class(root: Path) -> None:
    write_classes(root, 1)


def one_training_image(root: Path) -> None:
    write_sheets(root, train=1, test=1)


def nested_labels(root: Path) -> None:
    write_sheets(root)
    (root / "test_labels.json").write_text("[" * 100_000)


def cut_archive(root: Path) -> None:
    """Cut off between two files, where `tarfile` sees the end."""
    write_classes(root.with_name("whole"))
    root.mkdir()
    with tarfile.open(root / "set.tar", "w") as archive:
        archive.add(root.with_name("whole"), ".")
    with tarfile.open(root / "set.tar") as archive:
        half = archive.getmembers()[-3].offset
    (root / "set.tar").write_bytes((root / "set.tar").read_bytes()[:half])


def empty(root: Path) -> None:
    root.mkdir()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (damaged, "n01_3.png: not an image that Pillow can read"),
        (truncated, "n01_3.png: not a whole image"),
        (several_sizes, "n02_1.png: 9 x 9 where 8 x 8 is expected: add :size=8"),
        (unknown_class, "x.png: the class 'n09' has no training images"),
        (one_image_a_class, "has no training images; its validation part is the test; valid: 5 % of training"),
        (one_training_image, "set: the train part has no images; valid: the last tenth of training"),
        (pickles, "binary version"),
        (few_labels, "10 images in 1 sheets, and 2 labels"),
        (nested_labels, "test_labels.json: not readable as JSON (nested too deeply)"),
        (cut_archive, "set.tar is damaged: it is cut off after"),
        (empty, "no images found"),
    ],
)
def test_mistakes_name_the_file(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    make(tmp_path / "set")
    with pytest.raises(RunError, match=re.escape(words)):
        load(tmp_path / "set", tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [("cifar10-1k", "cifar10-10k"), ("cifar10-10k:size=3", "from 8 to 1024"), ("cifar10-10k:sise=32", "size")],
)
def test_unknown_sets_and_options_name_the_nearest(tmp_path: Path, spec: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        load_images(spec, data_dir=tmp_path, cache_dir=tmp_path)


def test_the_published_first_pixel(data_dir: Path, tmp_path: Path) -> None:
    images = load_images("cifar10-10k", data_dir=data_dir, cache_dir=tmp_path)
    assert images.split("train").images[0, 0, 0].tolist() == [59, 62, 63]
    assert [len(images.split(split)) for split in images.splits] == [9000, 1000, 10000]
