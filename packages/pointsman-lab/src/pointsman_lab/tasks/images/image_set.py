"""A set of labelled images with training, validation and test parts, decoded as they are read."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import parse_json, places_of, read_ordinary
from pointsman_lab.data.catalog import SPLITS, parse_options
from pointsman_lab.data.reading import reading
from pointsman_lab.data.vocabulary import Symbols
from pointsman_lab.tasks.images.layouts import Layout, open_layout
from pointsman_lab.tasks.images.part import ImagePart

IMAGE_SETS = {"cifar10-10k": ("cifar10-10k", "cifar10"), "tiny-imagenet-50": ("tiny-imagenet-50",)}
"""Name -> folders: a fifth of CIFAR-10's training images and all of its test images; 50 classes of Tiny-ImageNet."""

MOST_SUMMED = 2**27
"""Bytes of files: larger sets are told apart by the files' names and sizes, without a checksum."""


@dataclass(frozen=True)
class ImageSet:
    """Labelled images in parts.

    Attributes:
        name: for tables.
        classes: names, in the order of the labels.
        side: height and width of every image.
        description: the protocol line: layout, sizes, and which part is what.
        fingerprint: 64 bits in hexadecimal over labels, size, and the files' names, sizes and content.
    """

    name: str
    classes: tuple[str, ...]
    side: int
    description: str
    fingerprint: str
    _parts: Mapping[str, ImagePart] = field(repr=False)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def split(self, name: str) -> ImagePart:
        """The part "train", "valid" or "test"."""
        if name not in SPLITS:
            raise RunError(f"there is no split {name!r}: {did_you_mean(name, SPLITS)}")
        if name not in self._parts:
            raise RunError(f"{self.name} has no {name} part; it has: {', '.join(self._parts)}")
        return self._parts[name]

    def relabelled(self, classes: Sequence[str]) -> ImageSet:
        """The same images with labels that are places in `classes`."""
        if tuple(classes) == self.classes:
            return self
        number = {name: label for label, name in enumerate(classes)}
        for name in self.classes:
            if name not in number:
                raise RunError(f"{self.name}: the class {name!r} is none of the {len(number)} that the model learned")
        label = np.array([number[name] for name in self.classes], dtype=np.int64)
        parts = {split: replace(part, labels=label[part.labels]) for split, part in self._parts.items()}
        return replace(self, classes=tuple(classes), _parts=parts)


def load_images(spec: str, *, data_dir: Path | None = None) -> ImageSet:
    """Opens `NAME|PATH[:size=N]`: a name under `data_dir`, or a folder, archive or .npy file.

    Without a validation part, one is taken from training: the last tenth of sheets and of CIFAR's binary form, else
    the 5 % of the images whose name has the lowest hash. A set with a validation part but no test part reports the
    validation part as its test, and a validation part is again taken from training.

    Args:
        spec: the set, by name or path. `size`: the shorter side is resized to it, then the centre is cropped.
            Without it all images must be square and of one size.
        data_dir: where names are looked up.
    """
    text, size = _parse(spec)
    path = _find(text, data_dir)
    layout = open_layout(path)
    name = text if text in IMAGE_SETS else Path(os.path.abspath(path)).name.split(".")[0]
    parts, note = _assign(layout)
    _check_parts(parts, layout, str(path), note)
    side = size or next(iter(parts.values())).load(0).shape[0]
    opened = {split: replace(part, side=side, resized=size is not None) for split, part in parts.items()}
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in opened.items())
    description = f"{name}: {layout.kind}, {len(layout.classes)} classes, {side} x {side}, {sizes}{note}"
    return ImageSet(name, layout.classes, side, description, _fingerprint(layout, parts, size), opened)


def _parse(spec: str) -> tuple[str, int | None]:
    if os.path.exists(spec):
        return spec, None
    name, *options = spec.rsplit(":", 1)
    size = parse_options(f"data {spec!r}", options, {"size": ()}).get("size")
    if size is None:
        return name, None
    if not size.isdecimal() or not 8 <= int(size) <= 1024:
        raise RunError(f"data {spec!r}: size={size!r}; allowed are whole numbers from 8 to 1024")
    return name, int(size)


def _find(name: str, data_dir: Path | None) -> Path:
    folders = [data_dir] if data_dir else []
    known = [folder / one for folder in folders for one in IMAGE_SETS.get(name, ())]
    for place in [*known, *places_of(name, folders)]:
        if place.exists():
            return place
    where = f" under {data_dir}" if data_dir else " (POINTSMAN_DATA is not set)"
    raise RunError(f"no images called {name!r}{where}: {did_you_mean(name, IMAGE_SETS)}, or a path")


def _check_parts(parts: Mapping[str, ImagePart], layout: Layout, where: str, note: str) -> None:
    """Every part has images, and every class has training images, where there is a training part."""
    for split, part in parts.items():
        if not len(part):
            raise RunError(f"{where}: the {split} part has no images{note}")
    if "train" not in parts:
        return
    known = set(parts["train"].labels)
    for part in parts.values():
        for name, label in zip(part.names, part.labels, strict=True):
            if label not in known:
                raise RunError(f"{name}: the class {layout.classes[label]!r} has no training images{note}")


def _assign(layout: Layout) -> tuple[dict[str, ImagePart], str]:
    """The parts as they are used, and what to say about it."""
    parts, notes = dict(layout.parts), list(layout.notes)
    if "train" in parts and "test" not in parts and "valid" in parts:
        parts["test"] = parts.pop("valid")
        notes.append("its validation part is the test")
    if "train" in parts and "valid" not in parts:
        train = parts["train"]
        rows = range(len(train))
        if layout.kind in ("sheets", "CIFAR's binary form"):
            held = set(rows[-max(1, len(train) // 10) :])
            notes.append("valid: the last tenth of training")
        else:
            order = sorted(rows, key=lambda row: hashlib.sha256(Path(train.names[row]).name.encode()).digest())
            held = set(order[: max(1, len(train) // 20)])
            notes.append("valid: 5 % of training by a hash of the name")
        parts["train"] = train.take([row for row in rows if row not in held])
        parts["valid"] = train.take(sorted(held))
    ordered = {split: parts[split] for split in SPLITS if split in parts}
    return ordered, "".join(f"; {note}" for note in notes)


def _fingerprint(layout: Layout, parts: Mapping[str, ImagePart], size: int | None) -> str:
    labels = {split: list(map(int, part.labels)) for split, part in parts.items()}
    digest = hashlib.sha256(json.dumps([layout.kind, layout.classes, size, labels]).encode())
    sizes = [file.stat().st_size for file in layout.files]
    summed = sum(sizes) <= MOST_SUMMED
    for file, length in zip(layout.files, sizes, strict=True):
        with reading(file):
            checksum = zlib.crc32(read_ordinary(file, MOST_SUMMED)) if summed else None
        digest.update(f"{file.name} {length} {checksum}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ClassNames(Symbols):
    """The classes that a run on images has learned."""

    names: tuple[str, ...]
    level = "class"

    @property
    def size(self) -> int:
        """C, the number of classes."""
        return len(self.names)

    def decode(self, labels: Iterable[int]) -> str:
        return ", ".join(self.names[label] for label in labels)

    def to_json(self) -> str:
        return json.dumps({"level": self.level, "names": list(self.names)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ClassNames:
        """What `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        values = parse_json(text)
        names = values.get("names") if isinstance(values, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("not a list of class names")
        return cls(tuple(names))
