"""Files written whole or not at all, one process at a time, and JSON read back; what the disk refuses is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pointsman._errors import RunError

LOCK = ".lock"


def write_synced(file: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def write_whole(file: Path, text: str) -> Path:
    """Replaces a file's content at once: readers see the old text or the new one, also after a power cut."""
    with disk_errors(file, f"{file.name} was not written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{file.name}.writing-{os.getpid()}")
        try:
            write_synced(aside, text.encode())
            aside.replace(file)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(file.parent)
    return file


def sync_folder(folder: Path) -> None:
    """Waits until the disk has a folder's entries, where the system can (not on Windows)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def disk_errors(place: Path, consequence: str) -> Iterator[None]:
    """Turns what the disk refuses into one line that says what did not happen and that nothing else is lost."""
    try:
        yield
    except OSError as error:
        reason = {
            28: "no space left on the disk",
            13: "no permission",
            30: "the disk is read-only",
            122: "disk quota exceeded",
        }
        why = reason.get(error.errno or 0, error.strerror or str(error))
        raise RunError(f"{place}: {why}; {consequence}; what was saved before is untouched") from error


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file.

    Raises:
        RunError: it cannot be read, or holds no JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise RunError(f"{file}: a JSON object is expected, found {type(value).__name__}")
    return value


def read_whole_json(file: Path) -> dict[str, Any] | None:
    """The same for what can be made again: None also where the file is damaged."""
    try:
        return read_json(file)
    except RunError:
        return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds a folder, which is made if need be, against a second process (not on Windows, nor on a disk without locks).

    Raises:
        RunError: another process holds it.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with disk_errors(folder, "nothing was begun"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: another process is working in this directory") from None
        except OSError:
            pass  # some network disks know no locks
        yield
