"""Multilingual text: sentences in documents, a part for training and one for validation, language by language.

- `multilingual:PATH`: a folder with `LANG.txt[.gz]`, one sentence a line, an empty line after a document; or with
  `LANG/train.txt[.gz]` and `LANG/valid.txt[.gz]`.
- `xtreme-text`: the training parts of the tasks in the data folder. A sentence that equals a sentence of any reported
  part, or differs from one by case, punctuation or spaces only, is left out, so that no reported sentence and no
  whole reported passage is in the pre-training text; single sentences of a reported passage may be.

What was read, cut into pieces and packed into blocks is kept in the user's cache.
"""

import hashlib
import io
import json
import os
import re
import sys
import unicodedata
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pointsman._errors import RunError, did_you_mean
from pointsman_lab._files import stamp, user_cache_folder, user_path, write_whole
from pointsman_lab.data.catalog import data_folder, parse_languages, parse_options
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.pieces import MultilingualText, Pieces, learn_pieces
from pointsman_lab.data.reading import files_below, find_file, read_lines
from pointsman_lab.tasks.crosslingual.xtreme import XTREME, load_task, task_folder, texts
from pointsman_lab.tasks.masked_language_modelling.blocks import PackedText, pack_text

FORMAT = 7
_OPTION = re.compile(r":(?=\w+=)")


def read_text(spec: str, data_dir: Path | None = None) -> MultilingualText:
    """Reads `multilingual:PATH[:languages=en+de]` or `xtreme-text[:languages=en+de]`."""
    kind, folder, wanted = _parsed(spec, data_dir)
    text = _xtreme_text(folder) if kind == "xtreme-text" else _folder(folder)
    for language in wanted:
        if language not in text.train:
            raise RunError(f"data {spec!r}: no text in {language!r}: {did_you_mean(language, text.train)}")
    kept = wanted or tuple(text.train)
    return MultilingualText(
        f"{text.name}:languages={'+'.join(wanted)}" if wanted else text.name,
        {language: text.train[language] for language in sorted(kept)},
        {language: text.valid[language] for language in sorted(kept) if language in text.valid},
        text.note,
    )


def _parsed(spec: str, data_dir: Path | None) -> tuple[str, Path, tuple[str, ...]]:
    """(kind, folder of its files, languages); refuses a spec that names no multilingual text, without reading it."""
    body, *options = _OPTION.split(spec)
    kind, _, path = body.partition(":")
    chosen = parse_options(f"data {spec!r}", options, {"languages": ()})
    wanted = parse_languages(f"data {spec!r}", chosen.get("languages", ""))
    if body == "xtreme-text":
        if data_dir is None or not data_dir.is_dir():
            raise RunError("xtreme-text is made from the tasks in the data folder: set POINTSMAN_DATA")
        return kind, data_dir, wanted
    if kind != "multilingual" or not path:
        raise RunError(
            f"data {spec!r}: a masked language model reads multilingual:PATH or xtreme-text; "
            f"{did_you_mean(kind, ['multilingual', 'xtreme-text'])}"
        )
    if not user_path(path).is_dir():
        raise RunError(f"there is no folder {path}")
    return kind, user_path(path), wanted


def _folder(folder: Path) -> MultilingualText:
    train: dict[str, tuple[str, ...]] = {}
    valid: dict[str, tuple[str, ...]] = {}
    for entry in sorted(folder.iterdir()):
        language = entry.name
        if entry.is_dir() and (file := find_file(entry, "train.txt")):
            train[language] = _sentences(file)
            if own := find_file(entry, "valid.txt"):
                valid[language] = _sentences(own)
        elif entry.is_file() and (language := language.removesuffix(".gz")).endswith(".txt"):
            if (language := language.removesuffix(".txt")) in train:
                raise RunError(f"{folder}: {language!r} has two files, one is {entry.name}: leave one there")
            train[language] = _sentences(entry)
        elif not language.startswith((".", "README", "LICENSE")) and (entry.is_file() or any(entry.glob("train*"))):
            raise RunError(f"{entry} is none of LANG.txt, LANG.txt.gz and LANG/train.txt: rename it, or move it away")
    if not train:
        raise RunError(f"{folder} holds no text: LANG.txt, LANG.txt.gz or LANG/train.txt is expected")
    for part, of in (("text", train), ("text for validation", valid)):
        for language, sentences in of.items():
            if not any(sentences):
                raise RunError(f"{folder}: the language {language!r} has no {part}")
    return MultilingualText(os.path.basename(os.path.abspath(folder)), train, valid)


def _sentences(file: Path) -> tuple[str, ...]:
    return tuple(" ".join(line.split()) for _, line in read_lines(file))


def normal(sentence: str) -> str:
    """The form in which sentences are compared: NFKC, one space between words, case kept."""
    return " ".join(unicodedata.normalize("NFKC", sentence).split())


def near(sentence: str) -> str:
    """What two sentences share that differ by case, punctuation or spaces only; the sentence where nothing is left."""
    return normal(sentence).casefold().translate(_punctuation()) or normal(sentence)


@cache
def _punctuation() -> dict[int, None]:
    return {code: None for code in range(sys.maxunicode) if unicodedata.category(chr(code))[0] in "PZ"}


def reported_sentences(data_dir: Path) -> set[str]:
    """Every sentence of every part that some task or translation reports, in its `normal` form."""
    found: set[str] = set()
    for name, task in XTREME.items():
        if task.test.files(data_dir):
            for items in load_task(name, data_dir, "test", labelled=False).rows.values():
                found.update(normal(text) for item in items for text in texts(item))
    for file in sorted((data_dir / "multi30k").glob("*")):
        if not file.name.startswith("train."):
            found.update(normal(line) for _, line in read_lines(file))
    for file in _treebanks(data_dir):
        if "-train." not in file.name:  # the raw text, too: `texts` has its words with a space between
            found.update(normal(text) for text in _treebank(file))
    return found


def _treebanks(data_dir: Path) -> list[Path]:
    folder = task_folder("ud", data_dir)
    return [] if folder is None else [file for file in files_below(folder) if ".conllu" in file.name]


def _treebank(file: Path) -> Iterable[str]:
    return (line.removeprefix("# text = ") for _, line in read_lines(file) if line.startswith("# text = "))


def _xtreme_text(data_dir: Path) -> MultilingualText:
    reported = reported_sentences(data_dir)
    alike = {near(sentence) for sentence in reported}
    found: dict[str, list[str]] = {}
    dropped: dict[str, list[int]] = {}

    def add(language: str, sentences: Iterable[str], *, documents: bool = False) -> None:
        own, left = found.setdefault(language, []), dropped.setdefault(language, [0, 0])
        for sentence in sentences:
            text = normal(sentence)
            if near(text) in alike:
                left[text not in reported] += 1
            elif text:
                own.append(text)
                if documents:
                    own.append("")
        own.append("")

    treebanks = [file for file in _treebanks(data_dir) if "-train." in file.name]
    seen: set[Path] = set()  # a file's text once
    for name, task in XTREME.items():
        files = {file for own in task.train.files(data_dir).values() for file in own}
        if files and not files <= seen and (name != "udpos" or not treebanks):
            for language, items in load_task(name, data_dir, "train", labelled=False).rows.items():
                once = dict.fromkeys(text for item in items for text in texts(item))
                add(language, once, documents=task.kind == "questions")
        seen |= files
    for file in treebanks:
        add(file.name.partition("_")[0], _treebank(file))
    for file in sorted((data_dir / "multi30k").glob("train.*")):
        add(file.name.split(".")[1], (line for _, line in read_lines(file)))
    if not found:
        raise RunError(f"{data_dir} holds none of the tasks that xtreme-text is made from: {', '.join(XTREME)}")
    counts = ", ".join(f"{language} {same:,} and {other:,}" for language, (same, other) in sorted(dropped.items()))
    note = (
        "training parts of the tasks, without sentences that equal one that some task reports, and those that differ "
        f"from one by case, punctuation or spaces only: {counts}"
    )
    return MultilingualText("xtreme-text", {language: tuple(found[language]) for language in sorted(found)}, {}, note)


def open_blocks(
    spec: str,
    *,
    length: int,
    size: int = 8192,
    exponent: float = 0.7,
    pieces: Pieces | None = None,
    progress: DataProgress | None = None,
) -> PackedText:
    """`--data xtreme-text` or `multilingual:PATH` in blocks of `length` pieces."""
    data_dir = data_folder()
    kind, folder, _ = _parsed(spec, data_dir)
    how = [FORMAT, spec, length, pieces.digest if pieces else [size, exponent], list(_files(kind, folder))]
    key = hashlib.sha256(json.dumps(how).encode()).hexdigest()[:24]
    file = user_cache_folder() / "blocks" / f"{key}.npz"
    if (found := _read(file)) is not None:
        return found
    report = progress or (lambda what, done, total: None)
    report(f"reading {kind}", 0, 3)
    text = read_text(spec, data_dir)
    report(f"learning pieces of {kind}", 1, 3)
    pieces = pieces or learn_pieces(text, size, exponent=exponent)
    report(f"packing {kind}", 2, 3)
    packed = pack_text(text, pieces, length)
    report(f"packing {kind}", 3, 3)
    try:
        write_whole(file, _written(packed))
    except RunError as error:
        warnings.warn(f"{error}: the blocks are made anew each time", stacklevel=2)
    return packed


def _files(kind: str, folder: Path) -> Iterator[tuple[str, int, int, int]]:
    """The path and `stamp` of every file that the text comes from."""
    if kind == "xtreme-text":
        folders = {source.folder for task in XTREME.values() for source in (task.train, task.test)} | {"multi30k"}
        places = (task_folder(name, folder) for name in sorted(folders))
        files = [file for place in places if place for file in files_below(place)]
    else:  # no deeper: a run may lie beside the texts
        files = sorted({*folder.glob("*"), *folder.glob("*/train*"), *folder.glob("*/valid*")})
    for file in filter(Path.is_file, files):
        yield str(file.resolve()), *stamp(file)


def _written(packed: PackedText) -> bytes:
    about = {"name": packed.name, "note": packed.note, "cut": packed.cut, "unknown": packed.unknown}
    arrays: dict[str, Any] = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        "pieces": np.frombuffer(packed.pieces.model, dtype=np.uint8),
    }
    for part, blocks in (("train", packed.train), ("valid", packed.valid)):
        arrays |= {f"{part}.{language}": each for language, each in blocks.items()}
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def _read(file: Path) -> PackedText | None:
    """What `_written` wrote; None where there is none, or where it is damaged (the archive has checksums)."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            parts: dict[str, dict[str, Any]] = {"train": {}, "valid": {}}
            for name in arrays.files:
                part, dot, language = name.partition(".")
                if dot:
                    parts[part][language] = arrays[name]
            pieces = Pieces(arrays["pieces"].tobytes())
            return PackedText(pieces, parts["train"], parts["valid"], **about)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, RunError):
        return None
