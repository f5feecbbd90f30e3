"""The one way to files of a run directory and to what a user names: none leads out, waits, or is larger than it may be.

A folder of a run is entered through `within` and `find`, its files are opened by the functions here: none follows a
link that leads out, waits for a pipe, truncates anything, or reads more than a file of its name may hold (`_shapes`).
"""

import atexit
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pointsman._errors import RunError
from pointsman._files import SCRATCH as SCRATCH
from pointsman._files import disk_errors as disk_errors
from pointsman._files import open_folder
from pointsman._files import open_ordinary as open_ordinary
from pointsman._files import owner as owner
from pointsman._files import parse_json as parse_json
from pointsman._files import replacing as replacing
from pointsman._files import scratch_folder as scratch_folder
from pointsman_lab._shapes import MOST_BYTES, MOST_LINE, MOST_OTHERS, MOST_PAIRS, PRODUCTS, check_shape, shape_of

LOCK = ".lock"


def user_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/pointsman`, or `~/.cache/pointsman`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pointsman"
    except RuntimeError:
        raise RunError("this user has no home folder: set XDG_CACHE_HOME to a folder for caches") from None


def user_path(name: str) -> Path:
    """A path as the user wrote it: `~` is a home folder if there is one of that name, else it stays."""
    return Path(os.path.expanduser(name))


def places_of(name: str, folders: Iterable[Path]) -> list[Path]:
    """Where what the user names may lie: below these folders or here; ".", ".." and what starts with them is here."""
    below = () if name.split(os.sep)[0] in (".", "..") else (folder / name for folder in folders)
    return [*below, user_path(name)]


def within(root: Path, *names: str) -> Path:
    """`root/names`; links on the way to `root` are the user's own, those below must stay in it.

    Raises:
        RunError: a link below `root` leads out of it.
    """
    place = root.joinpath(*names)
    if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(root)):
        raise RunError(f"{place}: a link leads out of {root}: nothing is read or written through it")
    return place


def find(root: Path, pattern: str) -> list[Path]:
    """What `root.glob(pattern)` finds, in order.

    Raises:
        RunError: a link leads out of `root`.
    """
    return [within(root, str(place.relative_to(root))) for place in sorted(root.glob(pattern))]


def stamp(file: Path) -> tuple[int, int, int]:
    """What changes with a file's content: its size, its time, and the time that the system sets, which no copy keeps.

    The first two may stay: archives and copies with their times (`cp -p`, `rsync -t`) bring other content of one size.
    """
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_named(file: Path) -> IO[bytes]:
    """A file that the user named, open for reading; raises as `open_ordinary` does."""
    return open(open_ordinary(file), "rb")


def open_own(file: Path, flags: int = os.O_RDONLY) -> int:
    """The same of a file that must not be a link either."""
    if file.is_symlink():  # said before O_NOFOLLOW refuses it, and where there is no O_NOFOLLOW (Windows)
        raise RunError(f"{file}: a link; files of a run directory are not opened through links")
    return open_ordinary(file, flags | getattr(os, "O_NOFOLLOW", 0))


def open_new(file: Path, flags: int = os.O_CREAT) -> IO[bytes]:
    """A new file, or one that `replacing` made, open for writing; raises as `open_own` does."""
    return open(open_own(file, os.O_WRONLY | flags), "wb")


def write_synced(file: Path, content: bytes) -> None:
    """Writes what `open_new` opens, and waits until the disk has it."""
    with open_new(file) as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def write_whole(file: Path, content: str | bytes) -> Path:
    """Replaces a file's content at once, also at a power cut; raises as `replacing` does."""
    with replacing(file) as aside:
        write_synced(aside, content.encode() if isinstance(content, str) else content)
    return file


def read_ordinary(file: Path, most: int = MOST_OTHERS) -> bytes:
    """The content of a file that the user named, of at most `most` bytes; raises as `open_ordinary` does."""
    return _content(open_ordinary(file), file, most)


def read_bytes(file: Path) -> bytes:
    """The content of a file of a run directory; raises as `open_own` does, and where it is too large for its name."""
    return _content(open_own(file), file, MOST_BYTES.get(file.name, MOST_OTHERS))


def _content(descriptor: int, file: Path, most: int) -> bytes:
    with open(descriptor, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > most:
            raise RunError(f"{file}: {size:,} bytes; at most {most:,} are read")
        return opened.read(size)


def read_lines(file: Path) -> Iterator[bytes]:
    """The lines of a file of a run directory; raises as `open_own` does, and at a line longer than `MOST_LINE`."""
    with open(open_own(file), "rb") as opened:
        number = 0
        while line := opened.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise RunError(f"{file}, line {number}: more than {MOST_LINE:,} bytes")
            yield line


def read_text(file: Path, errors: str = "strict") -> str:
    """The same as UTF-8 text; RunError where it is none."""
    try:
        return read_bytes(file).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise RunError(f"{file}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start:,})") from None


def checksum(file: Path, *, sync: bool = False) -> dict[str, Any]:
    """{"bytes", "sha256"} of a file of a run directory; raises as `open_own` does.

    Args:
        sync: waits until the disk has it.
    """
    with open(open_own(file), "rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"bytes": opened.tell(), "sha256": digest}


_TEMPORARY = ExitStack()
atexit.register(_TEMPORARY.close)


def temporary_folder() -> Path:
    """A new folder of this process, removed when it ends: for what is made of files that are only read.

    What killed processes left is removed.
    """
    parent = Path(tempfile.gettempdir())
    with disk_errors(parent, "there is no room for temporary files"):
        return _TEMPORARY.enter_context(scratch_folder(parent))


def check_writable(folder: Path, *, keep: bool = False) -> None:
    """Writes into a folder before hours of work for it, and leaves nothing; with `keep` the folder, if it is new.

    Raises:
        RunError: it is no folder or cannot be made, or nothing can be written into it.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise RunError(f"{folder}: this is no folder, and one is needed; nothing was begun")
    new = [one for one in (folder, *folder.parents) if not (keep or os.path.exists(one))]
    try:
        with disk_errors(folder, "nothing was begun"), scratch_folder(folder):
            pass
    finally:
        for one in new:
            with suppress(OSError):
                one.rmdir()


def may_fill(folder: Path, files: Mapping[str, str], last: str) -> bool:
    """Whether files, of these texts by name, may be written into a folder: it is new or empty, or holds some of them.

    So a killed command goes on. Not where `last` is there, which it makes at the end, nor where one has another text.
    """
    if os.path.lexists(folder) and (not folder.is_dir() or os.path.lexists(folder / last)):
        return False
    if all(one.is_dir() or one.name.startswith(".") for one in folder.rglob("*")):
        return True
    there = [name for name in files if os.path.lexists(folder / name)]
    return bool(there) and all(read_bytes(folder / name) == files[name].encode() for name in there)


def sync_folder(folder: Path) -> None:
    """Waits until the disk has a folder's entries, where the system can (not on Windows)."""
    with open_folder(folder) as opened:
        if opened is not None:
            os.fsync(opened)


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file.

    Raises:
        RunError: it cannot be read, or holds no JSON object, or one of another shape or size than the file has.
    """
    try:
        value = parse_json(read_text(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RunError:
        raise
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise RunError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise RunError(f"{file}: a JSON object is expected, found {type(value).__name__}")
    check_shape(value, shape_of(file.name) or {}, str(file))
    one, other = PRODUCTS.get(file.name, ("", ""))
    if (pairs := len(value.get(one, ())) * len(value.get(other, ()))) > MOST_PAIRS:
        raise RunError(f"{file}: {one} times {other} is {pairs:,}; at most {MOST_PAIRS:,} are read")
    return value


def keys_of(text: str) -> list[str]:
    """The keys of a JSON object that `parse_json` has read, a key that is there twice included."""
    return [key for key, _ in json.loads(text, object_pairs_hook=list)]


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
        RunError: another process holds it, or its lock file is not its own.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with disk_errors(folder, "nothing was begun"):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(folder / LOCK, os.O_RDWR | os.O_CREAT)
    with open(descriptor, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{folder}: another process is working in this directory") from None
        except OSError:
            pass  # some network disks know no locks
        _HELD.add(lock)
        try:
            yield
        finally:
            _HELD.discard(lock)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # at once, also where a forked child has the descriptor still


_HELD: set[IO[bytes]] = set()
"""Lock files that this process holds. A fork closes its copies: a child that lives on holds no folder."""


def is_taken(folder: Path) -> bool:
    """Whether a folder that this process holds has another process's lock file: another one is in its place."""
    try:
        there = os.stat(folder / LOCK)
    except OSError:
        return False
    return bool(_HELD) and not any(os.path.samestat(there, os.fstat(lock.fileno())) for lock in _HELD)


def place_of(folder: Path) -> tuple[int, int] | None:
    """Which folder is there, for processes that hold it not themselves; None where there is none.

    Told by its lock file, whose number no other one gets while `alone` has it open.
    """
    for file in (folder / LOCK, folder):
        with suppress(OSError):
            status = os.stat(file)
            return status.st_dev, status.st_ino
    return None


def _let_go() -> None:
    for lock in _HELD:
        with suppress(OSError):
            os.close(lock.fileno())
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
