"""Locates the text of a corpus, and splits it into training, validation and test bytes."""

import os
import platform
import stat
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab._files import open_named, places_of
from pointsman_lab.data.catalog import CORPORA, SPLITS, DataSpec, Level, hashed, unknown_data
from pointsman_lab.data.reading import Span, align, reading

_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst", ".7z", ".tar", ".tgz", ".parquet")
PART_STEMS = {
    **dict.fromkeys(("train", "training", "wiki.train"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev", "wiki.valid"), "valid"),
    **dict.fromkeys(("test", "wiki.test"), "test"),
}
_PROBE = 8192

# Tests, third-party packages, demonstrations, generated tables, and files that differ between machines.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data", "ensurepip"}
    | {"site-packages", "dist-packages", "lib-dynload", "__pycache__"}
)
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Source:
    """A corpus before tokenization.

    Attributes:
        name: the label in tables: the corpus's name, or the last part of the path.
        level: the unit of tokens.
        parts: split -> byte ranges of files; only the splits that exist.
        note: how the splits were made, for the protocol line.
        checksum: (file, bytes, md5) to verify before use; None if unknown.
        missing: split -> the name of its missing file.
    """

    name: str
    level: Level
    parts: Mapping[str, tuple[Span, ...]]
    note: str
    checksum: tuple[Path, int, str] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of text in all splits."""
        return sum(span.size for spans in self.parts.values() for span in spans)

    def no_part(self, split: str) -> RunError:
        names = {"train": "training", "valid": "validation", "test": "test"}
        where = f" ({self.missing[split]} is missing)" if split in self.missing else ""
        there = " and ".join(names[part] for part in self.parts)
        purpose = "it can be evaluated, not trained on" if split == "train" else f"it has: {there}"
        return RunError(f"{self.name} has no {names[split]} split{where}: {purpose}")


def local_source(spec: DataSpec, folders: Sequence[Path], vocabulary_level: Level | None = None) -> Source | None:
    """The corpus with this name in the first folder that contains it, or at this path.

    None for a named corpus that must be downloaded first.
    """
    forced = spec.level or vocabulary_level
    if spec.name == "stdlib":
        return _stdlib(forced or CORPORA["stdlib"].level)
    if spec.name in CORPORA:
        places = [place for folder in folders for place in (folder / spec.name, folder)]
        found = (_whole(spec.name, place, forced) or _in_parts(spec.name, place, forced) for place in places)
        return next((source for source in found if source), None)
    for path in places_of(spec.name, folders):
        with reading(path):
            if path.exists():
                return _folder(path, forced) if path.is_dir() else _file(path, forced)
    if os.sep in spec.name or spec.name.startswith("~"):
        raise RunError(f"there is no file or folder {spec.name}")
    raise unknown_data(spec.name)


def _whole(name: str, place: Path, level: Level | None) -> Source | None:
    """The named corpus, if `place` is its file or a folder with its file."""
    corpus = CORPORA[name]
    candidates = [place / file for file in corpus.files] if place.is_dir() else [place] * (place.name in corpus.files)
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        return None
    bounds = [0, *accumulate(corpus.sizes)]
    pairs = zip(SPLITS, pairwise(bounds), strict=True)
    spans = {split: (Span(path, start, stop, whole_end=split == "test"),) for split, (start, stop) in pairs}
    note = "split by position " + " / ".join(f"{size:,}" for size in corpus.sizes) + " bytes, md5 checked"
    return Source(name, level or corpus.level, spans, note, checksum=(path, bounds[-1], corpus.md5))


def _in_parts(name: str, folder: Path, level: Level | None) -> Source | None:
    """The named corpus, if this is its folder and contains at least one of its splits."""
    corpus = CORPORA[name]
    files = {split: folder / file for split, file in corpus.parts.items()}
    if folder.name != name or not any(path.is_file() for path in files.values()):
        return None
    spans = {split: (_whole_span(path),) for split, path in files.items() if path.is_file()}
    missing = {split: path.name for split, path in files.items() if split not in spans}
    return Source(name, level or corpus.level, spans, "its own parts", missing=missing)


def _stdlib(level: Level) -> Source:
    """The standard library: about 5 % of the files each for validation and test."""
    root = Path(sysconfig.get_path("stdlib"))
    version = platform.python_version()
    parts: dict[str, list[Span]] = {split: [] for split in SPLITS}
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")):
        *folders, stem = name.split("/")
        skipped = any(folder in _STDLIB_SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders)
        if not skipped and not stem.startswith(_STDLIB_SKIPPED_PREFIXES):
            draw = hashed(name) % 100
            split = "test" if draw < 5 else "valid" if draw < 10 else "train"
            parts[split].append(_whole_span(path, may_be_empty=True))
    count = sum(len(spans) for spans in parts.values())
    if not all(sum(span.size for span in spans) for spans in parts.values()):
        raise RunError(f"this Python {version} comes without the source of its standard library: give --data a file")
    note = f"Python {version}, {count} files, split by file"
    return Source("stdlib", level, {split: tuple(spans) for split, spans in parts.items()}, note)


def _file(path: Path, level: Level | None) -> Source:
    for name in CORPORA:
        if known := _whole(name, path, level):
            return known
    if path.suffix.lower() in _PACKED:
        raise RunError(f"{path} is {_unpacked_how(path)}")
    if not path.is_file():
        raise RunError(f"{path} is not an ordinary file")
    level = level or "byte"
    return Source(path.name, level, _by_position([_whole_span(path)], level), "split by position 90 / 5 / 5 %")


def _folder(folder: Path, forced: Level | None) -> Source:
    for name in CORPORA:
        if known := _whole(name, folder, forced) or _in_parts(name, folder.resolve(), forced):
            return known
    walked = list(_walk(folder))
    ordinary = [path for path in walked if path.is_file()]
    files = [path for path in ordinary if path.suffix.lower() not in _PACKED and _is_text(path)]
    name = folder.resolve().name
    parts: dict[str, Path] = {}
    for path in files:
        split = PART_STEMS.get(path.stem.lower()) if path.parent == folder else None
        if split in parts:
            raise RunError(f"the folder {folder} has two {split} files: {parts[split].name} and {path.name}")
        if split:
            parts[split] = path
    for path in ordinary:
        packed = path.suffix.lower() in _PACKED
        split = PART_STEMS.get(path.with_suffix("" if packed else path.suffix).stem.lower())
        if path.parent == folder and split and split not in parts:
            told = _unpacked_how(path) if packed else "empty or not text: remove or rename it"
            raise RunError(f"{path}, the {split} part by its name, is {told}")
    if not files:
        raise RunError(f"the folder {folder} holds no text file")
    level = forced or ("word" if files[0].suffix == ".tokens" else "byte")
    if "train" in parts or {"valid", "test"} <= parts.keys():
        spans = {split: (_whole_span(parts[split]),) for split in SPLITS if split in parts}
        return Source(name, level, spans, "its own parts: " + ", ".join(parts[split].name for split in spans))
    note = f"{len(files)} files in the order of their names, split by position 90 / 5 / 5 %"
    taken = set(files)
    if left := [str(path.relative_to(folder)) for path in walked if path not in taken]:
        names = f"{left[0]}, …" if len(left) > 1 else left[0]
        note += f" (left out as empty, compressed, no text or a linked folder: {len(left):,}: {names})"
    return Source(name, level, _by_position([_whole_span(path) for path in files], level), note)


def _unpacked_how(path: Path) -> str:
    table = path.suffix.lower() == ".parquet"
    return "a Parquet table: write its text into a text file" if table else "compressed: decompress it first"


def _walk(folder: Path) -> Iterator[Path]:
    """What is below a folder, by name, but for hidden files; linked folders are not entered."""
    with reading(folder):
        entries = sorted(folder.iterdir())
    for path in entries:
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _is_text(path: Path) -> bool:
    """Whether a file is not empty and has no zero byte near its start."""
    with reading(path), open_named(path) as file:
        start = file.read(_PROBE)
    return bool(start) and b"\0" not in start


def _whole_span(path: Path, *, may_be_empty: bool = False) -> Span:
    with reading(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise RunError(f"{path} is not an ordinary file")
    if status.st_size == 0 and not may_be_empty:
        raise RunError(f"{path} is empty")
    return Span(path, 0, status.st_size)


def _by_position(files: Sequence[Span], level: Level) -> dict[str, tuple[Span, ...]]:
    """The first 90 % of the bytes for training, 5 % for validation, 5 % for test; no word is split."""
    total = sum(span.size for span in files)
    cuts = (0, total * 90 // 100, total * 95 // 100, total)
    parts: dict[str, list[Span]] = {split: [] for split in SPLITS}
    begin = 0
    for span in files:
        inner = [min(max(cut - begin, 0), span.size) for cut in cuts]
        places = [align(span.path, place, span.size, level) for place in inner]
        for split, (start, stop) in zip(SPLITS, pairwise(places), strict=True):
            if stop > start:
                parts[split].append(Span(span.path, start, stop, whole_end=stop == span.size))
        begin += span.size
    return {split: tuple(spans) for split, spans in parts.items()}
