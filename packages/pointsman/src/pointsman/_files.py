"""Files opened with care, as they may come from somebody else, and files written whole; JSON with bounds.

What the disk refuses is one line. A test refuses every other way to open a file (`tests/test_architecture.py`).
"""

import errno
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pointsman._errors import RunError

SCRATCH = ".tmp-"
_OWNER = re.compile(r"([0-9]+)-([^+]+)\+")
_DAY = 24 * 3600.0
_REFUSED = {
    errno.ENOSPC: "no space left on the disk", errno.EACCES: "no permission", errno.EROFS: "the disk is read-only",
    errno.EDQUOT: "disk quota exceeded",
}  # fmt: skip
MOST_VALUES = 2**22
"""Values in a JSON text: a list of nothing takes two bytes in a file and sixty in memory."""
MOST_DEPTH = 32
"""Lists and objects within each other: written with indentation, each value takes a line as wide as it is deep."""

_LONG = re.compile(r"[0-9]{19}")


def _whole(digits: str) -> float:
    return int(digits) if len(digits.lstrip("-")) < 19 else float(digits)


def parse_json(text: str) -> Any:
    """`json.loads`; a ValueError also for what is too deep or has too many values, and for half a surrogate pair.

    A whole number of 19 digits or more comes back as a float, and so is none.
    """
    if text.count(",") + text.count("[") + text.count("{") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    try:
        value = json.loads(text, parse_int=_whole if _LONG.search(text) else None)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair, which is no character") from None
    level: list[Any] = [[value]]
    for _ in range(MOST_DEPTH + 1):
        within = (one for held in level for one in (held.values() if isinstance(held, dict) else held))
        level = [one for one in within if isinstance(one, (dict, list))]
        if not level:
            return value
    raise ValueError("nested too deeply")


def open_ordinary(file: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of an ordinary file that the user named; links are followed, nothing is truncated or waited for.

    RunError for a folder, a device or a pipe; OSError where it is missing, or the system refuses it.
    """
    assert not flags & getattr(os, "O_TRUNC", 0)
    descriptor = os.open(file, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{file}: no ordinary file")
    return descriptor


def owner() -> str:
    """This process, as the names of what it writes aside begin: "PID-MACHINE+", the machine's name without a "+"."""
    return f"{os.getpid()}-{quote(platform.node(), safe='')}+"


def is_abandoned(name: str, age: float = 0.0) -> bool:
    """Whether the `owner` that a name begins with runs no more.

    A process of this machine is looked for. One of another machine, which a shared disk may show, has a day since the
    file was changed, `age` seconds ago; 0: it is kept.
    """
    found = _OWNER.match(name)
    if found is None:
        return False
    if os.name != "posix" or found[2] != quote(platform.node(), safe=""):
        return age > _DAY
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder that is removed at the end, for what `parent` shall hold, which is made if need be.

    Its name cannot be foreseen, and only this user enters it: it holds no link but those made here. What killed
    processes left is removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{SCRATCH}*"):
        with suppress(OSError):  # its process has just renamed it
            if is_abandoned(left.name.removeprefix(SCRATCH), time.time() - left.lstat().st_mtime):
                shutil.rmtree(left)
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{owner()}", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """An empty new file beside `file`, which takes its place at the end: readers see the old content or the new one.

    Both are named relative to the open folder: whatever takes its place meanwhile, nothing is written there. RunError
    for what the disk refuses, or a device or pipe there: the old content is then untouched.
    """
    if os.path.realpath(file.parent) == "/dev" or (file.exists() and not file.is_file() and not file.is_dir()):
        raise RunError(f"{file}: no ordinary file, so nothing takes its place")
    with disk_errors(file, f"{file.name} was not written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        for left in file.parent.glob(".*.writing-*"):
            if is_abandoned(left.name.rpartition(".writing-")[2]):
                left.unlink(missing_ok=True)
        aside = file.with_name(f".{file.name}.writing-{owner()}")
        with suppress(FileNotFoundError):
            aside.unlink()
        with open_folder(file.parent) as folder:
            new, old = (str(aside), str(file)) if folder is None else (aside.name, file.name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            os.close(os.open(new, flags, 0o666, dir_fd=folder))
            try:
                yield aside
                written = os.open(new, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), dir_fd=folder)
                try:
                    os.fsync(written)
                finally:
                    os.close(written)
                os.replace(new, old, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(new, dir_fd=folder)
                raise
            if folder is not None:
                os.fsync(folder)


@contextmanager
def open_folder(path: Path) -> Iterator[int | None]:
    """A descriptor of a folder; None where the system opens none (Windows)."""
    if os.open not in os.supports_dir_fd:
        yield None
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def disk_errors(place: Path, consequence: str) -> Iterator[None]:
    """Turns what the disk refuses into one line that says what did not happen and that nothing else is lost."""
    try:
        yield
    except OSError as error:
        why = _REFUSED.get(error.errno or 0, error.strerror or str(error))
        raise RunError(f"{place}: {why}; {consequence}; what was saved before is untouched") from error
