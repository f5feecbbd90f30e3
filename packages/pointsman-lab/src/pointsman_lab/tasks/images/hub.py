"""Labelled images of the Hugging Face hub, and folders that `datasets` saved: through the `datasets` library."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pointsman._errors import RunError, needing
from pointsman._files import read_ordinary
from pointsman_lab.tasks.images.layouts import LabelledImages, Layout, Pixels, image_pixels

PARTS = {"train": "train", "validation": "valid", "valid": "valid", "val": "valid", "test": "test"}


def is_saved(path: Path) -> bool:
    """Whether `DatasetDict.save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file()


def open_saved(path: Path) -> Layout:
    """A folder that `DatasetDict.save_to_disk` wrote.

    Raises:
        RunError: it cannot be read, or holds no labelled images.
    """
    return _layout(str(path), partial(_library(str(path)).load_from_disk, str(path)))


def open_hub(name: str) -> Layout:
    """The data set `owner/name` of the hub.

    Raises:
        RunError: it cannot be had, or holds no labelled images.
    """
    return _layout(name, partial(_library(name).load_dataset, name))


def _library(name: str) -> Any:
    with needing(f"{name} needs datasets", "hf"):
        import datasets
    return datasets


def _layout(name: str, load: Any) -> Layout:
    try:
        found: Mapping[str, Any] = load()
    except Exception as error:  # the library raises types of many others
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise RunError(f"{name}: no data set that can be read here: {reason}") from None
    known = {PARTS[split]: part for split, part in found.items() if split in PARTS}
    if not known:
        raise RunError(f"{name} has the parts {', '.join(found)}; read are: {', '.join(PARTS)}")
    features = next(iter(known.values())).features
    kinds = {kind: [key for key, value in features.items() if type(value).__name__ == kind]
             for kind in ("Image", "ClassLabel")}  # fmt: skip
    if len(kinds["Image"]) != 1 or len(kinds["ClassLabel"]) != 1:
        raise RunError(f"{name} needs one column of images and one of class labels; it has: {', '.join(features)}")
    image, label = kinds["Image"][0], kinds["ClassLabel"][0]
    parts, files = {}, []
    for split, part in known.items():
        raw = part.cast_column(image, _library(name).Image(decode=False))
        names = [f"{name}, {split}, row {row}" for row in range(len(part))]
        parts[split] = LabelledImages(names, list(part[label]), partial(_pixels, raw, image, names))
        files += [Path(one["filename"]) for one in part.cache_files]
    return Layout(tuple(features[label].names), parts, files, "Hugging Face data set")


def _pixels(rows: Any, column: str, names: list[str], row: int) -> Pixels:
    value = rows[row][column]
    content = value["bytes"] if value["bytes"] is not None else read_ordinary(Path(value["path"]))
    return image_pixels(content, names[row])
