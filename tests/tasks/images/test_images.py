"""Layouts of images on the disk, and the parts."""

import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from pointsman._errors import RunError
from pointsman_lab.tasks.images import image_set
from pointsman_lab.tasks.images.augment import Augmentation, ImageStream, inception_crop, to_tensor, uniforms
from pointsman_lab.tasks.images.image_set import load_images
from pointsman_lab.tasks.images.part import fit

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


def test_folders_of_classes(tmp_path: Path) -> None:
    write_classes(tmp_path / "set")
    images = load_images(str(tmp_path / "set"))
    assert images.classes == CLASSES
    assert {split: len(images.split(split)) for split in images.splits} == {"train": 57, "valid": 3, "test": 60}
    test = images.split("test")
    assert test.labels.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    assert (test.pixels([20])[0] == picture(1000)).all()


def test_images_are_decoded_as_they_are_read(tmp_path: Path) -> None:
    write_classes(tmp_path / "set", side=12)
    test = load_images(f"{tmp_path / 'set'}:size=8").split("test")
    every = test.pixels()
    assert every.shape == (60, 8, 8, 3)
    for rows in ([2, 0], np.array([1])):
        assert (test.pixels(rows) == every[rows]).all()
        assert (test.take(rows).pixels() == every[rows]).all()
    (tmp_path / "set" / "val" / CLASSES[0] / f"{CLASSES[0]}_0.png").write_bytes(b"")
    assert (test.pixels([20]) == every[[20]]).all(), "other rows are not decoded"
    with pytest.raises(RunError, match=r"_0\.png"):
        test.pixels([0])


@pytest.mark.parametrize("most", [0, 2**20])
def test_the_fingerprint_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(image_set, "MOST_SUMMED", most)
    for folder in ("one", "other"):
        write_sheets(tmp_path / folder)
    first, moved = (load_images(str(tmp_path / folder)).fingerprint for folder in ("one", "other"))
    assert first == moved
    sheet = tmp_path / "one" / "test_batch.png"
    content = bytearray(sheet.read_bytes())
    content[-20] ^= 1
    sheet.write_bytes(content)
    assert (load_images(str(tmp_path / "one")).fingerprint == first) == (most == 0), "large sets have no checksum"
    sheet.write_bytes(content + b"0")
    assert load_images(str(tmp_path / "one")).fingerprint != first


def test_crops_are_taken_from_the_image_as_it_lies_on_the_disk(tmp_path: Path) -> None:
    write_classes(tmp_path / "set", side=40)
    train = load_images(f"{tmp_path / 'set'}:size=16").split("train")
    stream = ImageStream(train, 4, 3, Augmentation.parse("inception"), seed=1)
    pixels, _ = stream.batch(0)
    draws = uniforms(1, "inception", 0, 4, 4)
    for row, index in enumerate(stream.indices(0)):
        original = train.load(index)
        assert original.shape == (40, 40, 3)
        assert torch.equal(pixels[row], to_tensor(inception_crop(original, draws[row], 16)[None])[0])


def test_a_tar_archive_gives_the_same_as_its_folder(tmp_path: Path) -> None:
    write_classes(tmp_path / "set")
    with tarfile.open(tmp_path / "packed.tar", "w") as archive:
        archive.add(tmp_path / "set", "set")
    folder, packed = (load_images(str(path)) for path in (tmp_path / "set", tmp_path / "packed.tar"))
    for split in folder.splits:
        one, two = folder.split(split), packed.split(split)
        assert (one.pixels() == two.pixels()).all()
        assert (one.labels == two.labels).all()


def test_sheets_hold_one_image_a_row(tmp_path: Path) -> None:
    write_sheets(tmp_path / "set")
    images = load_images(str(tmp_path / "set"))
    assert images.classes[3] == "cat"
    assert [len(images.split(split)) for split in ("train", "valid", "test")] == [18, 2, 10]
    assert (images.split("valid").pixels([1])[0] == picture(19, 32)).all()


def test_cifar_binary(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = [bytes([index % 10]) + picture(index, 32).transpose(2, 0, 1).tobytes() for index in range(20)]
        (root / name).write_bytes(b"".join(records))
    images = load_images(str(root))
    assert (images.split("test").pixels([7])[0] == picture(7, 32)).all()
    assert images.split("test").labels[13] == 3


def test_npy(tmp_path: Path) -> None:
    pixels = np.stack([picture(index, 32) for index in range(6)])
    np.save(tmp_path / "fog.npy", pixels)
    np.save(tmp_path / "labels.npy", np.arange(6) % 3)
    images = load_images(str(tmp_path / "fog.npy"))
    assert images.splits == ("test",)
    assert (images.split("test").pixels() == pixels).all()


@pytest.mark.parametrize(("side", "last"), [(32, "truck"), (8, "9")])
def test_ten_classes_without_names_are_cifars_at_its_side(side: int, last: str, tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.stack([picture(index, side) for index in range(10)]))
    np.save(tmp_path / "labels.npy", np.arange(10))
    assert load_images(str(tmp_path / "fog.npy")).classes[-1] == last


def test_images_that_are_in_no_part_are_counted(tmp_path: Path) -> None:
    write_classes(tmp_path)
    assert "left out" not in load_images(str(tmp_path)).description
    for place in ("extra/x.png", "train/n01/more/y.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(png(picture(0)))
    assert "; 2 images at other depths are left out" in load_images(str(tmp_path)).description


@pytest.mark.parametrize("packed", [False, True])
def test_pictures_of_other_kinds_are_counted(packed: bool, tmp_path: Path) -> None:
    write_classes(tmp_path / "set")
    for name in ("x.WEBP", "y.webp", "z.bmp", "notes.txt"):
        (tmp_path / "set" / "train" / "n01" / name).write_bytes(b"")
    if packed:
        with tarfile.open(tmp_path / "set.tar", "w") as archive:
            archive.add(tmp_path / "set", ".")
    told = "; 1 pictures that end in .bmp are left out; 2 pictures that end in .webp are left out"
    assert told in load_images(str(tmp_path / ("set.tar" if packed else "set"))).description


def test_linked_folders_are_read(tmp_path: Path) -> None:
    write_classes(tmp_path / "store")
    write_classes(tmp_path / "set")
    (tmp_path / "store" / "val" / "back").symlink_to(tmp_path / "store")  # not followed without end
    for part in ("train", "val"):
        (tmp_path / "set" / part / "n04").symlink_to(tmp_path / "store" / part / "n01")
    linked, images = tmp_path / "linked", load_images(str(tmp_path / "set"))
    linked.mkdir()
    for part in ("train", "val"):
        (linked / part).symlink_to(tmp_path / "store" / part)
    assert images.classes == (*CLASSES, "n04")
    assert (images.split("test").labels == 3).sum() == 20
    assert len(load_images(str(linked)).split("test")) == 60


def test_files_of_less_than_the_summed_size_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", np.arange(22_000) % 3)
    shape = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (22_000, 32, 32, 3)).shape  # 64.5 MiB
    assert len(load_images(str(tmp_path / "x.npy")).split("test")) == shape[0]


def test_an_empty_array_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "fog.npy", np.zeros((0, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(0, dtype=np.int64))
    with pytest.raises(RunError, match=r"fog\.npy: the test part has no images"):
        load_images(str(tmp_path / "fog.npy"))


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
        load_images(str(tmp_path / "fog.npy"))
    assert "\n" not in str(told.value)


def test_size_resizes_the_shorter_side_and_crops_the_centre(tmp_path: Path) -> None:
    write_classes(tmp_path / "set", side=12)
    assert load_images(f"{tmp_path / 'set'}:size=8").side == 8
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


def deep(root: Path) -> None:
    """Grey values of 16 bits, of which Pillow would make white ones."""
    write_classes(root)
    grey = Image.fromarray((np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8))
    for place in root.rglob("n01_3.png"):
        grey.save(place)


def pickles(root: Path) -> None:
    root.mkdir()
    (root / "data_batch_1").write_bytes(b"\x80\x02.")


def few_labels(root: Path) -> None:
    write_sheets(root)
    (root / "test_labels.json").write_text("[1, 2]")


def labels_of_the_next_sheet(root: Path) -> None:
    """As many labels as images, but not sheet by sheet."""
    write_sheets(root, train=6, test=2)
    write_sheets(root.with_name("next"), train=4)
    (root / "data_batch_2.png").write_bytes((root.with_name("next") / "data_batch_1.png").read_bytes())
    for number in (1, 2):
        (root / f"train_labels_batch_{number}.json").write_text("[0, 1, 0, 1, 0]")


def broken_link(root: Path) -> None:
    write_classes(root)
    (root / "train" / "n04").symlink_to("elsewhere")


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
        (deep, "n01_3.png: not a whole image (mode I;16; images of 8 bits a channel are read)"),
        (several_sizes, "n02_1.png: 9 x 9 where 8 x 8 is expected: add :size=8"),
        (unknown_class, "x.png: the class 'n09' has no training images"),
        (one_image_a_class, "has no training images; its validation part is the test; valid: 5 % of training"),
        (one_training_image, "set: the train part has no images; valid: the last tenth of training"),
        (pickles, "binary version"),
        (few_labels, "test_batch.png: 10 images, and 2 labels"),
        (labels_of_the_next_sheet, "data_batch_1.png: 6 images, and 5 labels"),
        (nested_labels, "test_labels.json: not readable as JSON (nested too deeply)"),
        (broken_link, "train/n04 links to elsewhere, which is not there"),
        (cut_archive, "set.tar is damaged: it is cut off after"),
        (empty, "no images found"),
    ],
)
def test_mistakes_name_the_file(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    make(tmp_path / "set")

    def read() -> None:
        images = load_images(str(tmp_path / "set"))
        for split in images.splits:
            images.split(split).pixels()

    with pytest.raises(RunError, match=re.escape(words)):
        read()


@pytest.mark.parametrize(
    ("spec", "words"),
    [("cifar10-1k", "cifar10-10k"), ("cifar10-10k:size=3", "from 8 to 1024"), ("cifar10-10k:sise=32", "size")],
)
def test_unknown_sets_and_options_name_the_nearest(tmp_path: Path, spec: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        load_images(spec, data_dir=tmp_path)


def test_the_published_first_pixel(data_dir: Path, tmp_path: Path) -> None:
    images = load_images("cifar10-10k", data_dir=data_dir)
    assert images.split("train").pixels([0])[0, 0, 0].tolist() == [59, 62, 63]
    assert [len(images.split(split)) for split in images.splits] == [9000, 1000, 10000]
