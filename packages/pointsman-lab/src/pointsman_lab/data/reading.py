"""Reads byte ranges of text files, plain or compressed, in blocks that end between tokens."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from pointsman._errors import RunError
from pointsman_lab._files import open_named, open_ordinary
from pointsman_lab._shapes import MOST_LINE
from pointsman_lab.data.catalog import Level

BLOCK = 1 << 22


@dataclass(frozen=True)
class Span:
    """Bytes start … stop - 1 of a file's uncompressed text. `whole_end`: the file ends at stop."""

    path: Path
    start: int
    stop: int
    whole_end: bool = True

    @property
    def size(self) -> int:
        return self.stop - self.start


class Reader:
    """Reads spans. Keeps the last file open: consecutive spans of a compressed file decompress it once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: IO[bytes] = io.BytesIO()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def raw(self, span: Span) -> Iterator[bytes]:
        """The bytes of a span in blocks."""
        with reading(span.path):
            if self._path != span.path:
                self._file.close()
                self._file = open_unpacked(span.path)
                self._path = span.path
            if self._file.tell() != span.start:
                self._file.seek(span.start)
            left = span.size
            while left:
                block = self._file.read(min(left, BLOCK))
                if not block:
                    raise RunError(f"{span.path} ends {left:,} bytes too early: it was changed or truncated")
                left -= len(block)
                yield block

    def blocks(self, span: Span, level: Level) -> Iterator[bytes | str]:
        """The text of a span in blocks that end between tokens: bytes at byte level, else characters.

        At word level a file's last line gets a newline if it has none.
        """
        if level == "byte":
            yield from self.raw(span)
            return
        rest = b""
        offset = span.start
        last = b"\n"
        for block in self.raw(span):
            last = block[-1:]
            block = rest + block
            cut = _last_boundary(block, level)
            rest = block[cut:]
            yield decode(block[:cut], span.path, offset, level)
            offset += cut
        yield decode(rest, span.path, offset, level)
        if level == "word" and span.whole_end and last != b"\n":
            yield "\n"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of a file into a RunError that names the file."""
    try:
        yield
    except PermissionError as error:
        raise RunError(f"no permission to read {error.filename or path}") from None
    except FileNotFoundError as error:
        raise RunError(f"there is no file {error.filename or path}") from None
    except (EOFError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile) as error:
        raise RunError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def open_unpacked(path: Path) -> IO[bytes]:
    """The text of a plain, .gz or .zip file; of a .zip, the one file in it."""
    os.close(open_ordinary(path))
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:  # an open member keeps the file until it is closed itself
            members = [one for one in archive.infolist() if not one.is_dir()]
            if len(members) != 1:
                raise RunError(f"{path} must hold one file, and holds {len(members)}")
            if members[0].flag_bits & 1 or members[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                told = "encrypted, or packed in another way than is usual for .zip"
                raise RunError(f"{path}: {told}: decompress it first")
            return archive.open(members[0])
    return open_named(path)


def find_file(folder: Path, stem: str) -> Path | None:
    """`folder/stem` or `folder/stem.gz`, whichever is there."""
    return next((file for file in (folder / stem, folder / f"{stem}.gz") if file.is_file()), None)


def files_below(folder: Path) -> list[Path]:
    """Every file in a folder and those below, linked ones too, in order; links that end nowhere are refused."""
    found = []
    with reading(folder):
        for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
            folders[:] = [name for name in folders if not _is_around(Path(root, name))]
            for file in (Path(root, name) for name in names):
                if file.is_file():
                    found.append(file)
                elif file.is_symlink() and not file.exists():
                    raise RunError(f"{file} links to {os.readlink(file)}, which is not there")
    return sorted(found)


def _is_around(folder: Path) -> bool:
    """Whether a folder is a link to one that it lies in: to follow it would have no end."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _raise(error: OSError) -> None:
    raise error


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its newline) of a UTF-8 text file, with a byte order mark or without."""
    with reading(file), open_unpacked(file) as opened:
        for number, line in enumerate(iter(lambda: opened.readline(MOST_LINE + 1), b""), 1):
            if len(line) > MOST_LINE:
                raise RunError(f"{file}: line {number} has more than {MOST_LINE:,} bytes")
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise RunError(f"{file}: line {number} is not UTF-8") from None
            if "\r" in text:
                raise RunError(f"{file}: line {number} has a carriage return inside: lines must end in \\n or \\r\\n")
            yield number, text


def check_md5(path: Path, size: int, md5: str) -> Iterator[int]:
    """Checks size and MD5 of a file's uncompressed text; yields the bytes read so far, for a progress display."""
    digest = hashlib.md5(usedforsecurity=False)
    done = 0
    with reading(path), open_unpacked(path) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            done += len(block)
            if done > size:  # a little that becomes much is not unpacked to its end
                raise RunError(f"{path} has more than the {size:,} bytes of text that are expected: another file")
            yield done
    if done != size:
        raise RunError(f"{path} has {done:,} bytes of text, expected {size:,}: truncated, or another file")
    if digest.hexdigest() != md5:
        raise RunError(f"{path} has the md5 {digest.hexdigest()}, expected {md5}: damaged, or another file")


def decode(raw: bytes, path: Path, offset: int, level: Level) -> str:
    """UTF-8 to characters, without a file's byte order mark; `offset` is the position of `raw` in the file."""
    mark = len(codecs.BOM_UTF8) if not offset and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        start = mark + error.start
        raise RunError(
            f"{path}: byte {offset + start:,} (0x{raw[start]:02x}) is not UTF-8, which "
            f"level={level} needs; level=byte reads any file"
        ) from None


def align(path: Path, position: int, size: int, level: Level) -> int:
    """The first position at or after `position` that is between two bytes or words."""
    if level == "byte" or position in (0, size):
        return position
    with reading(path), open_named(path) as file:
        file.seek(position - 1)
        while block := file.read(1 << 16):
            if space := re.search(rb"\s", block):
                return file.tell() - len(block) + space.end()
    return size


def _last_boundary(block: bytes, level: Level) -> int:
    if level == "word":
        return max(block.rfind(b" "), block.rfind(b"\n")) + 1
    if level == "subword" and b"\n" in block:
        return block.rfind(b"\n") + 1
    return codecs.utf_8_decode(block, "ignore", False)[1]  # up to the last whole character
