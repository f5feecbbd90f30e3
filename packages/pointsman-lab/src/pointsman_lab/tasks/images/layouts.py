"""Layouts of labelled images on the disk. Nothing is decoded before it is asked for.

1. sheets: `data_batch_*.png` and `test_batch.png`, one image of 32 x 32 a row (1,024 pixels, row-major), with labels in
   `train_labels_batch_*.json` and `test_labels.json`;
2. CIFAR's binary form: `data_batch_*.bin`, `test_batch.bin`: a label byte, then 3 x 32 x 32 bytes, channels first;
3. `train/CLASS/*`, `val|valid/CLASS/*`, `test/CLASS/*`: a folder or a tar archive of JPEG or PNG files;
4. `*.npy` [N, side, side, 3] uint8 with `labels.npy` [N] beside it (the form of CIFAR-10-C);
5. `CLASS/*` alone: one part, "test" (ImageNet-A, -R, -O).

Classes are the sorted folder names, or numbers where a layout has no names.
"""

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pointsman._errors import RunError, needing
from pointsman_lab._files import open_named, parse_json, read_ordinary
from pointsman_lab.data.reading import files_below, reading
from pointsman_lab.tasks.images.part import ImagePart, Pixels

SUFFIXES = (".jpeg", ".jpg", ".png")
NOT_READ = (".avif", ".bmp", ".gif", ".jfif", ".jpe", ".pgm", ".ppm", ".tif", ".tiff", ".webp")
PARTS = {"train": "train", "val": "valid", "valid": "valid", "validation": "valid", "test": "test"}
SIDE = 32
BLOCK = 512  # of a tar archive, whose end is a block of zeros
MOST_CLASSES = 2**16
MOST_PIXELS = 2**27
MOST_SHEET = 2**31  # bytes of a file with many images
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Layout:
    """Labelled images as they lie on the disk.

    Attributes:
        classes: names of the classes, in the order of their labels.
        parts: "train", "valid", "test": those that exist.
        files: every file, for the fingerprint.
        kind: which layout it is, for the protocol line.
        notes: what the protocol line says besides.
    """

    classes: tuple[str, ...]
    parts: Mapping[str, ImagePart]
    files: Sequence[Path]
    kind: str
    notes: tuple[str, ...] = ()


def open_layout(path: Path) -> Layout:
    """The labelled images in a folder, a tar archive or a .npy file."""
    if path.is_dir():
        if sorted(path.glob("data_batch_*.png")) or (path / "test_batch.png").is_file():
            return _sheets(path)
        if sorted(path.glob("*_batch*.bin")):
            return _cifar_binary(path)
        if (path / "data_batch_1").is_file() or (path / "test_batch").is_file():
            raise RunError(
                f"{path} holds CIFAR's Python pickles, which can run code when opened: "
                "take its binary version (data_batch_1.bin …)"
            )
        archives = sorted(path.glob("*.tar"))
        folders = [entry for entry in path.iterdir() if entry.is_dir()]
        if len(archives) == 1 and not folders:
            return _tar(archives[0])
        return _folders(path)
    if path.suffix == ".npy":
        return _npy(path)
    if path.suffix == ".tar":
        return _tar(path)
    raise RunError(f"{path}: not a folder, a .tar archive or a .npy file of images")


def _sheets(folder: Path) -> Layout:
    parts, files = {}, []
    for part, pattern in (("train", "data_batch_*.png"), ("test", "test_batch.png")):
        sheets = [file for file in sorted(folder.glob(pattern)) if file.is_file()]
        if not sheets:
            continue
        labels, names, rows = [], [], []
        for sheet in sheets:
            name = sheet.stem.replace("data_", "train_labels_").replace("test_batch", "test_labels")
            label_file = folder / f"{name}.json"
            own = _read_labels(label_file)
            labels += own
            rows.append(len(own))
            names += [f"{sheet}: row {row}" for row in range(len(own))]
            files += [sheet, label_file]
        load = _sheet_loader(sheets, rows)
        parts[part] = ImagePart(names, _bounded(labels, folder), load)
    return Layout(_numbered(parts.values()), parts, files, "sheets")


def _sheet_loader(sheets: Sequence[Path], rows: Sequence[int]) -> Callable[[int], Pixels]:
    """Decodes sheets of so many images each at the first call: opening a set decodes nothing."""

    @cache
    def images() -> Pixels:
        decoded = []
        for sheet, count in zip(sheets, rows, strict=True):
            with reading(sheet):
                pixels = image_pixels(read_ordinary(sheet, MOST_SHEET), str(sheet))
            if pixels.shape[1] != SIDE * SIDE:
                raise RunError(f"{sheet}: {pixels.shape[1]} pixels a row; a sheet has {SIDE * SIDE}")
            if len(pixels) != count:
                raise RunError(f"{sheet}: {len(pixels)} images, and {count} labels")
            decoded.append(pixels.reshape(-1, SIDE, SIDE, 3))
        return np.concatenate(decoded)

    return lambda index: images()[index]


def _read_labels(file: Path) -> list[int]:
    with reading(file):
        try:
            labels = parse_json(read_ordinary(file).decode())
        except ValueError as error:
            raise RunError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(labels, list) or not all(type(label) is int and label >= 0 for label in labels):
        raise RunError(f"{file}: a list of class numbers is expected")
    return labels


def _cifar_binary(folder: Path) -> Layout:
    record = 1 + 3 * SIDE * SIDE
    parts, files = {}, []
    for part, pattern in (("train", "data_batch_*.bin"), ("test", "test_batch.bin")):
        found = sorted(folder.glob(pattern))
        if not found:
            continue
        names, rows = [], []
        for file in found:
            with reading(file):
                raw = np.frombuffer(read_ordinary(file, MOST_SHEET), dtype=np.uint8)
            if len(raw) == 0 or len(raw) % record:
                raise RunError(f"{file}: {len(raw):,} bytes are no whole number of images of {record:,} bytes")
            rows.append(raw.reshape(-1, record))
            names += [f"{file}: image {row}" for row in range(len(rows[-1]))]
        every = np.concatenate(rows)
        images = every[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        parts[part] = ImagePart(names, every[:, 0].astype(np.int64), images.__getitem__)
        files += found
    return Layout(_numbered(parts.values()), parts, files, "CIFAR's binary form")


def _npy(file: Path) -> Layout:
    label_file = file.with_name("labels.npy")
    images, labels = _array(file), _array(label_file)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise RunError(f"{file}: {images.dtype} {list(images.shape)}; uint8 [N, side, side, 3] is expected")
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or labels.min(initial=0) < 0:
        raise RunError(f"{label_file}: {list(labels.shape)} labels for {len(images)} images of {file.name}")
    names = [f"{file}: image {row}" for row in range(len(images))]
    part = ImagePart(names, _bounded(labels, file), images.__getitem__)
    return Layout(_numbered([part], images.shape[1]), {"test": part}, [file, label_file], "npy")


def _array(file: Path) -> NDArray[Any]:
    """A .npy file, memory-mapped; never a pickle, nor the archive that `np.load` would take."""
    with reading(file):
        try:
            with open_named(file) as opened:
                version = np.lib.format.read_magic(opened)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(opened)
                if dtype.hasobject:
                    raise ValueError("objects of Python")
                return np.memmap(opened, dtype, "r", opened.tell(), shape, "F" if fortran else "C")
        except ValueError as error:
            raise RunError(f"{file}: not a plain .npy array ({error})") from None


def _folders(folder: Path) -> Layout:
    every = files_below(folder)

    def read(index: int) -> bytes:
        with reading(every[index]):
            return read_ordinary(every[index])

    files = [file for file in every if file.suffix.lower() in SUFFIXES]
    return _of_paths(folder, [file.relative_to(folder) for file in every], read, files, "folders of classes")


def _tar(archive: Path) -> Layout:
    with reading(archive):
        try:
            with open_named(archive) as whole, tarfile.open(fileobj=whole, mode="r:") as opened:
                members = sorted(filter(tarfile.TarInfo.isfile, opened.getmembers()), key=lambda member: member.name)
                end = opened.offset
        except tarfile.TarError as error:
            raise RunError(f"{archive} is damaged, or packed: {error}") from None
        with open_named(archive) as file:
            file.seek(end)
            if file.read(BLOCK) != bytes(BLOCK):  # which `tarfile` takes as whole if the cut is between two files
                images = sum(member.name.lower().endswith(SUFFIXES) for member in members)
                raise RunError(f"{archive} is damaged: it is cut off after {images:,} images")

    def read(index: int) -> bytes:
        with reading(archive), open_named(archive) as file:
            file.seek(members[index].offset_data)
            return file.read(members[index].size)

    return _of_paths(archive, [Path(member.name) for member in members], read, [archive], "tar of classes")


def _of_paths(
    root: Path, paths: Sequence[Path], read: Callable[[int], bytes], files: Sequence[Path], kind: str
) -> Layout:
    """A layout from the paths [PART/]CLASS/FILE of all files; folders above the part are passed over.

    Args:
        read: the place of a file among `paths` -> its content.
    """
    chosen: dict[str, list[int]] = {}
    images = [index for index, path in enumerate(paths) if path.suffix.lower() in SUFFIXES]
    for index in images:
        *_, part, group, _ = ("", "", *paths[index].parts)
        if part.lower() in PARTS:
            chosen.setdefault(PARTS[part.lower()], []).append(index)
        elif group and not part:
            chosen.setdefault("", []).append(index)
    if len(chosen) > 1:
        chosen.pop("", None)
    if not chosen:
        raise RunError(
            f"{root}: no images found; expected are train/CLASS/FILE, val/CLASS/FILE (JPEG or PNG), sheets, "
            "CIFAR's binary files or .npy"
        )
    used = [index for indices in chosen.values() for index in indices]
    known = sorted({paths[index].parent.name for index in used})
    number = {name: label for label, name in enumerate(known)}
    labels = np.zeros(len(paths), dtype=np.int64)
    labels[used] = [number[paths[index].parent.name] for index in used]
    names = [str(root / path) if root.is_dir() else f"{root}: {path}" for path in paths]
    every = ImagePart(names, labels, lambda index: image_pixels(read(index), names[index]))
    split = {part or "test": every.take(of) for part, of in chosen.items()}
    strays = len(images) - len(used)
    notes = [f"{strays:,} images at other depths are left out"] if strays else []
    for suffix, count in sorted(Counter(path.suffix.lower() for path in paths).items()):
        if suffix in NOT_READ:
            notes.append(f"{count:,} pictures that end in {suffix} are left out")
    return Layout(tuple(known), split, files, kind, tuple(notes))


def image_pixels(content: bytes, name: str) -> Pixels:
    """The pixels of an image file; an error names it."""
    with needing("images need Pillow", "vision"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width:,} x {image.height:,} pixels; at most {MOST_PIXELS:,} are read")
            if image.mode == "F" or image.mode.startswith("I"):  # Pillow would make nearly all of it white
                raise ValueError(f"mode {image.mode}; images of 8 bits a channel are read")
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:  # its text names an object in memory
        raise RunError(f"{name}: not an image that Pillow can read") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        told = str(error).splitlines()[0] if str(error) else "damaged"
        raise RunError(f"{name}: not a whole image ({told})") from None


def _bounded(labels: Any, where: Path) -> NDArray[np.int64]:
    """Labels of a file, none so large that its classes fill the memory."""
    if (most := max(labels, default=0)) >= MOST_CLASSES:
        raise RunError(f"{where}: the label {most:,}; allowed are labels below {MOST_CLASSES:,}")
    return np.asarray(labels, dtype=np.int64)


def _numbered(parts: Iterable[ImagePart], side: int = SIDE) -> tuple[str, ...]:
    """Names of classes without names: CIFAR-10's of ten at its side, else their numbers."""
    count = max((int(part.labels.max(initial=-1)) for part in parts), default=-1) + 1
    return CIFAR_CLASSES if (count, side) == (len(CIFAR_CLASSES), SIDE) else tuple(map(str, range(count)))
