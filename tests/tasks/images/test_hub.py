"""Images through the `datasets` library: what it saved to the disk, and the hub's own way in."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pointsman._errors import RunError
from pointsman_lab.tasks.images.image_set import load_images

datasets = pytest.importorskip("datasets")


def rows(count: int, spoilt: bool = False) -> Any:
    draw, images = np.random.default_rng(count), []
    for _ in range(count):
        stream = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(stream, "png")
        images.append({"bytes": stream.getvalue()[: 40 if spoilt else None], "path": None})
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    labels = [row % 2 for row in range(count)]
    return datasets.Dataset.from_dict({"img": images, "label": labels}, features=features)


def test_a_saved_data_set_and_the_hub_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = datasets.DatasetDict({"train": rows(12), "validation": rows(4), "test": rows(6)})
    saved.save_to_disk(tmp_path / "pets")
    found = load_images(str(tmp_path / "pets"))
    assert (found.classes, found.side, found.splits) == (("cat", "dog"), 8, ("train", "valid", "test"))
    np.testing.assert_array_equal(found.split("test").images[3], np.array(saved["test"][3]["img"]))
    assert found.split("test").labels.tolist() == [0, 1, 0, 1, 0, 1]
    opened = datasets.load_from_disk(str(tmp_path / "pets"))
    monkeypatch.setattr(datasets, "load_dataset", {"someone/pets": opened}.__getitem__)
    hub = load_images("someone/pets")
    assert (hub.name, hub.fingerprint) == ("pets", found.fingerprint)
    with pytest.raises(RunError, match="someone/else: no data set that can be read here"):
        load_images("someone/else")


def test_mistakes_name_the_row_or_the_columns(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": rows(4), "test": rows(2, spoilt=True)}).save_to_disk(tmp_path / "broken")
    with pytest.raises(RunError, match="broken, test, row 0: not an image that Pillow can read"):
        load_images(str(tmp_path / "broken")).split("test").images[:]
    datasets.DatasetDict({"train": rows(4).remove_columns("label")}).save_to_disk(tmp_path / "bare")
    with pytest.raises(RunError, match="one column of images and one of class labels; it has: img"):
        load_images(str(tmp_path / "bare"))
