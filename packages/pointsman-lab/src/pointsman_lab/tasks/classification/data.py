"""Classification tasks: named ones in their published formats, or any file or folder of labelled texts."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import places_of
from pointsman_lab.data.catalog import hashed, parse_options
from pointsman_lab.data.sources import PART_STEMS
from pointsman_lab.tasks.classification.files import Columns, LabelledText, format_of, read_labelled

_OPTION = re.compile(r":(?=(?:text|label)=)")


@dataclass(frozen=True)
class KnownTask:
    """A task with a name.

    Attributes:
        files: split -> file in the data folder. A task without "test" reports "dev".
        columns: of text and label in the files.
        classes: names of the labels, in order; () = those of the training split.
    """

    files: Mapping[str, str]
    columns: Columns = field(default_factory=Columns)
    classes: tuple[str, ...] = ()


TASKS: Mapping[str, KnownTask] = {
    "sst2": KnownTask(
        {"train": "sst2/sentence/train.tsv", "valid": "sst2/sentence/dev.tsv", "test": "sst2/sentence/test.tsv"},
        Columns(header=False),
        ("0", "1"),
    ),
    "sst2-glue": KnownTask(
        {"train": "sst2/train.tsv", "dev": "sst2/dev.tsv"}, Columns("sentence", "label"), ("0", "1")
    ),
    "sst5": KnownTask(
        {"train": "sst5/sst_train.txt", "valid": "sst5/sst_dev.txt", "test": "sst5/sst_test.txt"},
        classes=("1", "2", "3", "4", "5"),
    ),
    "imdb": KnownTask({"train": "imdb/train.jsonl.gz", "test": "imdb/test.jsonl.gz"}, classes=("0", "1")),
    "banking77": KnownTask({"train": "banking77/train.csv", "test": "banking77/test.csv"}, Columns("text", "category")),
}


@dataclass(frozen=True)
class Examples:
    """Texts and their class indices."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class LabelledTexts:
    """The data of a classification task.

    Attributes:
        name: a known task's name, or the last part of the path.
        classes: the labels' names, by index.
        splits: "train" and some of "valid", "test", "dev". A "dev" split is reported in the place of a missing test
            split and never used to choose a checkpoint.
        reported: "test" or "dev".
        description: the protocol line.
        fingerprint: a 64-bit hash (hexadecimal) of all texts and labels.
    """

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Examples]
    description: str
    fingerprint: str

    @property
    def reported(self) -> str:
        return "test" if "test" in self.splits else "dev"

    @property
    def watched(self) -> str | None:
        """The split that is evaluated during training; never the test split."""
        return next((split for split in ("valid", "dev") if split in self.splits), None)


def parse_task(text: str) -> tuple[str, Columns]:
    """The name or path, and the columns, of `NAME|PATH[:text=COLUMN][:label=COLUMN]`."""
    name, *options = _OPTION.split(text)
    if not name.strip():
        allowed = f"{did_you_mean('', TASKS)}, or a CSV, TSV or JSONL file"
        raise RunError(f"task {text!r} names no task and no file; {allowed}")
    values = parse_options(f"task {text!r}", options, {"text": (), "label": ()})
    return name, Columns(values.get("text"), values.get("label"))


def load_task(spec: str, *, data_dir: Path | None = None) -> LabelledTexts:
    """Loads the task `NAME|PATH[:text=COLUMN][:label=COLUMN]`.

    A name is looked up in `data_dir`; anything else is a file or folder, relative to
    `data_dir` or by its path. A folder contains train.*, and test.* or dev.* (valid.*, val.*). A single file is split
    80 / 10 / 10 % by a hash of each text: equal texts are in the same split, and the result is equal on every machine.
    """
    name, columns = parse_task(spec)
    path = find_task(spec, data_dir=data_dir)
    if path is None:
        return _named(name, TASKS[name], data_dir)
    if path.is_dir():
        return _from_folder(path, columns)
    parts = _divided(read_labelled(path, columns), path)
    return _task(path.name, parts, (), f"{path.name}, divided by a hash of the text 80 / 10 / 10 %")


def find_task(spec: str, *, data_dir: Path | None = None) -> Path | None:
    """The file or folder of a task, without reading it; None for a known name."""
    name, columns = parse_task(spec)
    if name in TASKS:
        if columns != Columns():
            raise RunError(f"task {spec!r}: text= and label= name the columns of files; {name} has its own")
        return None
    for path in places_of(name, [data_dir] if data_dir else []):
        if path.exists():
            return path
    if "/" in name or "." in name:
        raise RunError(f"task {spec!r}: there is no file or folder {name}")
    raise RunError(f"unknown task {name!r}: {did_you_mean(name, TASKS)}, or a CSV, TSV or JSONL file or folder")


def _named(name: str, known: KnownTask, data_dir: Path | None) -> LabelledTexts:
    if data_dir is None:
        raise RunError(f"the task {name} needs the data folder: set POINTSMAN_DATA")
    files = {split: data_dir / file for split, file in known.files.items()}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise RunError(f"the task {name} needs {missing[0]}: POINTSMAN_DATA names the data folder")
    parts = {split: read_labelled(file, known.columns) for split, file in files.items()}
    return _task(name, parts, known.classes, "the published files")


def _from_folder(folder: Path, columns: Columns) -> LabelledTexts:
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        split = PART_STEMS.get(path.name.split(".")[0].lower())
        if split and format_of(path) and path.is_file():
            if split in files:
                raise RunError(f"the folder {folder} has two {split} files: {files[split].name} and {path.name}")
            files[split] = path
    if "train" not in files or len(files) < 2:
        there = ", ".join(path.name for path in files.values()) or "none of them"
        needed = "train.* and test.* (or dev.*), as .csv, .tsv, .jsonl or fastText .txt"
        raise RunError(f"the folder {folder} needs {needed}; found {there}")
    parts = {split: read_labelled(path, columns) for split, path in files.items()}
    if "test" not in parts:
        parts["dev"] = parts.pop("valid")
    note = "its own parts: " + ", ".join(path.name for path in files.values())
    return _task(folder.resolve().name, parts, (), note)


def _divided(rows: Sequence[LabelledText], path: Path) -> dict[str, list[LabelledText]]:
    parts: dict[str, list[LabelledText]] = {"train": [], "valid": [], "test": []}
    for row in rows:
        draw = hashed(row.text) % 100
        parts["test" if draw < 10 else "valid" if draw < 20 else "train"].append(row)
    for split, found in parts.items():
        if not found:
            few = f"{len(rows)} examples: too few to divide (no {split} split)"
            raise RunError(f"{path} holds {few}; give a folder of splits")
    return parts


def _task(name: str, parts: Mapping[str, Sequence[LabelledText]], declared: Sequence[str], note: str) -> LabelledTexts:
    counts = Counter(row.label for row in parts["train"])
    classes = tuple(declared) or tuple(sorted(counts, key=_label_order))
    for label in classes:
        if not counts[label]:
            raise RunError(f"task {name}: class {label!r} has no examples in the training split")
    if len(classes) < 2:
        raise RunError(f"task {name}: the training split has one class, {classes[0]!r}; at least two are needed")
    index = {label: place for place, label in enumerate(classes)}
    splits: dict[str, Examples] = {}
    for split, rows in parts.items():
        for row in rows:
            if row.label not in index:
                shown = did_you_mean(row.label, classes) if len(classes) <= 12 else f"it has {len(classes)} classes"
                raise RunError(f"{row.where}: label {row.label!r} does not occur in the training split: {shown}")
        splits[split] = Examples(tuple(row.text for row in rows), tuple(index[row.label] for row in rows))
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in splits.items())
    content = json.dumps([classes, {split: [part.texts, part.labels] for split, part in splits.items()}])
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
    description = f"{name}: {note}; {len(classes)} classes; examples: {sizes}"
    return LabelledTexts(name, classes, splits, description, fingerprint)


def _label_order(label: str) -> tuple[bool, int, str]:
    """Whole numbers by value, then the rest by name."""
    numeric = len(label) < 20 and label.removeprefix("-").isdecimal()
    return (not numeric, int(label) if numeric else 0, label)
