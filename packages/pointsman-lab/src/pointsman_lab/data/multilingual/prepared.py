"""Multilingual text, ready to train on: read, cut into pieces, packed into blocks, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pointsman._errors import RunError
from pointsman._files import user_cache_folder, write_whole
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.data.download import DataProgress
from pointsman_lab.data.multilingual.blocks import PackedText, learn_pieces, pack_text
from pointsman_lab.data.multilingual.pieces import Pieces
from pointsman_lab.data.multilingual.sentences import check_spec, read_text
from pointsman_lab.data.multilingual.xtreme import XTREME

FORMAT = 3


def open_blocks(
    spec: str,
    *,
    length: int,
    size: int = 8192,
    exponent: float = 0.7,
    pieces: Pieces | None = None,
    progress: DataProgress | None = None,
) -> PackedText:
    """`--data xtreme-text` or `multilingual:PATH` in blocks of `length` pieces; POINTSMAN_DATA names the data folder.

    Args:
        spec: as `read_text` takes it.
        size: number of pieces to learn.
        exponent: of the languages' shares in the text that the pieces are learned from.
        pieces: those of a trained run; None: learned from the text.
        progress: called as progress(what, done, total).

    Raises:
        RunError: as `read_text`, `learn_pieces` and `pack_text`.
    """
    data_dir = data_folder()
    check_spec(spec, data_dir)
    how = [FORMAT, spec, length, pieces.digest if pieces else [size, exponent], list(_files(spec, data_dir))]
    key = hashlib.sha256(json.dumps(how).encode()).hexdigest()[:24]
    file = user_cache_folder() / "blocks" / f"{key}.npz"
    if (found := _read(file)) is not None:
        return found

    def report(what: str, done: int) -> None:
        if progress:
            progress(f"{what} {spec.partition(':')[0]}", done, 3)

    report("reading", 0)
    text = read_text(spec, data_dir)
    report("learning pieces of", 1)
    pieces = pieces or learn_pieces(text, size, exponent=exponent)
    report("packing", 2)
    packed = pack_text(text, pieces, length)
    report("packing", 3)
    try:
        write_whole(file, _written(packed))
    except RunError as error:
        warnings.warn(f"{error}: the blocks are made anew each time", stacklevel=2)
    return packed


def _files(spec: str, data_dir: Path | None) -> Iterator[tuple[str, int, int]]:
    """(path, size, time) of every file that the text comes from."""
    body = spec.partition(":languages=")[0]
    if body == "xtreme-text":
        assert data_dir is not None, "check_spec"
        folders = sorted({task.folder for task in XTREME.values()} | {"multi30k"})
        files = [file for name in folders for file in sorted((data_dir / name).glob("*"))]
    else:
        files = sorted(Path(body.partition(":")[2]).expanduser().rglob("*.txt*"))
    for file in files:
        status = file.stat()
        yield str(file.resolve()), status.st_size, status.st_mtime_ns


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
