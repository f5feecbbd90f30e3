"""Where shifted images come from: published files, or our own corruptions, computed once and cached.

Shapes: N images of side S.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from pointsman._errors import RunError
from pointsman_lab._files import open_new, replacing, user_cache_folder
from pointsman_lab.tasks.images.image_set import ImageSet
from pointsman_lab.tasks.images.part import ImagePart, Pixels
from pointsman_lab.tasks.images.severities import SEVERITIES
from pointsman_lab.tasks.images.task import open_images

VERSION = 2  # of the corruptions: a change of a picture needs a new one


class Corrupted:
    """Images of a part under a corruption: files of the published sets where given, else our own.

    Published: `PATH/CORRUPTION.npy` with `labels.npy`, severities one after another (CIFAR-10-C), or
    `PATH/CORRUPTION/SEVERITY/CLASS/*` (ImageNet-C).
    """

    def __init__(self, images: ImageSet, split: str, rows: list[int], path: Path | None) -> None:
        self.images, self.split, self.rows, self.path = images, split, rows, path
        self.clean = images.split(split).take(rows)
        self.description = f"files of {path.name}" if path else "C-style: this library's own corruptions"
        if path is not None and not path.is_dir():
            raise RunError(f"{path}: no folder of corrupted images (CORRUPTION.npy, or CORRUPTION/SEVERITY/CLASS/*)")

    def __call__(self, corruption: str, severity: int) -> ImagePart:
        """The images of `rows` under this corruption."""
        if self.path is None:
            return replace(self.clean, load=self._own(corruption, severity).__getitem__, resized=False)
        whole = self._published(self.path, corruption, severity)
        if len(whole) != len(self.images.split(self.split)):
            told = f"{len(whole):,} images where {self.split} has {len(self.images.split(self.split)):,}"
            raise RunError(f"{self.path}: {corruption} at severity {severity}: {told}")
        return whole.take(self.rows)

    def _published(self, path: Path, corruption: str, severity: int) -> ImagePart:
        arrays = path / f"{corruption}.npy"
        if arrays.is_file():
            found = self._opened(arrays)
            count = len(found) // len(SEVERITIES)
            return found.take(range((severity - 1) * count, severity * count))
        folder = path / corruption / str(severity)
        if not folder.is_dir():
            raise RunError(f"{path}: it has neither {corruption}.npy nor {corruption}/{severity}")
        return self._opened(folder)

    def _opened(self, path: Path) -> ImagePart:
        images = open_images(f"{path}:size={self.images.side}")
        return images.relabelled(self.images.classes).split("test")

    def _own(self, corruption: str, severity: int) -> Pixels:
        key = [VERSION, self.images.fingerprint, self.split, corruption, severity, self.rows]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        file = user_cache_folder() / "corrupted" / f"{name}.npy"
        try:
            kept: Pixels = np.load(file, mmap_mode="r", allow_pickle=False)
            if kept.shape == (len(self.rows), self.clean.side, self.clean.side, 3) and kept.dtype == np.uint8:
                return kept
        except (OSError, ValueError, EOFError):
            pass  # missing or damaged: computed anew
        from pointsman_lab.tasks.images.corruptions import corrupt  # scipy, which published files need not

        made = np.concatenate(
            [corrupt(self.clean.pixels([at]), corruption, severity, row) for at, row in enumerate(self.rows)]
        )
        with replacing(file) as aside, open_new(aside) as opened:
            np.save(opened, made)
        return made
