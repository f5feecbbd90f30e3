"""The token cache: arrays on disk, written atomically, verified when opened, and memory-mapped.

A cache folder `tokens/KEY/` holds one raw array per split (`train.bin`, …) and `meta.json`. The first line of that file
is the SHA-256 of the second; the second has the lengths and CRC-32 of the arrays, and the vocabulary. If two processes
build the same cache at the same time, both use the one that was renamed first.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pointsman._errors import RunError
from pointsman_lab._files import parse_json, read_text, scratch_folder, sync_folder, write_synced
from pointsman_lab.data.download import NO_SPACE
from pointsman_lab.data.subwords import read_vocabulary
from pointsman_lab.data.vocabulary import IdArray, Vocabulary

FORMAT = 3


@dataclass(frozen=True)
class Tokens:
    """A tokenized corpus: split -> ids [tokens], their CRC-32, and the number of unknown tokens."""

    vocabulary: Vocabulary
    arrays: Mapping[str, IdArray]
    crc32: Mapping[str, int]
    unknown: Mapping[str, int]

    @classmethod
    def of(cls, vocabulary: Vocabulary, blocks: Mapping[str, Sequence[IdArray]], unknown: Mapping[str, int]) -> Tokens:
        """The tokens of every split's blocks; `unknown` has every split that exists."""
        empty = np.zeros(0, dtype=vocabulary.dtype)
        arrays: dict[str, IdArray] = {split: np.concatenate([empty, *blocks.get(split, [])]) for split in unknown}
        for array in arrays.values():
            array.setflags(write=False)
        return cls(vocabulary, arrays, {split: _crc32(ids) for split, ids in arrays.items()}, unknown)


def cached(key: str, cache: Path, build: Callable[[], Tokens]) -> Tokens:
    """The tokens for this key: from the cache if it has valid ones, otherwise built and added to the cache.

    If the cache cannot be written, a warning is issued and the tokens stay in memory.
    """
    root = cache / "tokens"
    final = root / key
    if tokens := _open(final):
        return tokens
    made: Tokens | None = None
    try:
        with scratch_folder(root) as scratch:
            made = build()
            _write(scratch, made)
            _move_into_place(scratch, final)
        return _open(final) or made
    except OSError as error:
        if error.errno in NO_SPACE:
            raise RunError(f"no space left for the token cache in {root}: free some, or set XDG_CACHE_HOME") from None
        reason = error.strerror or str(error)
        warnings.warn(f"the token cache {root} cannot be used ({reason}): tokens stay in memory", stacklevel=2)
    return made or build()


def _write(folder: Path, tokens: Tokens) -> None:
    parts = {}
    for split, ids in tokens.arrays.items():
        write_synced(folder / f"{split}.bin", ids.tobytes())
        parts[split] = {"tokens": len(ids), "crc32": tokens.crc32[split], "unknown": tokens.unknown[split]}
    payload = json.dumps({"format": FORMAT, "parts": parts, "vocabulary": tokens.vocabulary.to_json()})
    write_synced(folder / "meta.json", f"{hashlib.sha256(payload.encode()).hexdigest()}\n{payload}\n".encode())
    sync_folder(folder)


def _open(folder: Path) -> Tokens | None:
    """The tokens in a cache folder; None if there are none or if a checksum differs."""
    try:
        digest, payload = read_text(folder / "meta.json").splitlines()
        if hashlib.sha256(payload.encode()).hexdigest() != digest:
            return None
        meta = parse_json(payload)
        vocabulary = read_vocabulary(meta["vocabulary"])
        parts: dict[str, dict[str, int]] = meta["parts"]
        arrays = {split: _map(folder / f"{split}.bin", of["tokens"], vocabulary.dtype) for split, of in parts.items()}
    except (OSError, ValueError):
        return None
    crc32 = {split: _crc32(ids) for split, ids in arrays.items()}
    if any(crc32[split] != of["crc32"] for split, of in parts.items()):
        return None
    return Tokens(vocabulary, arrays, crc32, {split: of["unknown"] for split, of in parts.items()})


def _map(path: Path, tokens: int, dtype: np.dtype[Any]) -> IdArray:
    if tokens == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path} has the wrong length")
    return np.memmap(path, dtype=dtype, mode="r")


def _crc32(ids: IdArray) -> int:
    return zlib.crc32(np.ascontiguousarray(ids).view(np.uint8).data)


def _move_into_place(scratch: Path, final: Path) -> None:
    """Renames a folder, unless another process was first."""
    if final.exists() and not _open(final):  # damaged, or of another format
        with scratch_folder(final.parent) as aside:
            final.replace(aside)
    try:
        scratch.rename(final)
    except OSError:
        if not final.exists():
            raise
        return  # another process was first
    sync_folder(final.parent)
