"""What a process does to files, programs and the network, by Python's audit events and by inotify.

Code that is no Python (safetensors, tokenizers) raises no audit event: inotify tells of every opening in the folders
that `watched` names, whoever opens. What is written relative to an open folder is not known here by its place: compare
the folders' content before and after.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGED = {
    "os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.chmod": 1, "os.chown": 1, "os.utime": 1,
}  # fmt: skip
"""Event -> how many of its first arguments are paths."""
STARTED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect")
ANY_OPEN = 0x20 | 0x2  # IN_OPEN, IN_MODIFY


@dataclass
class Seen:
    """Files by their real path.

    Attributes:
        read, written: opened, or made, moved, removed.
        started: programs and connections.
        opened: what was opened below the watched folders, Python or not.
    """

    read: set[Path] = field(default_factory=set)
    written: set[Path] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    opened: set[Path] = field(default_factory=set)


_ACTIVE: list[Seen] = []
_INSTALLED: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _ACTIVE:
        return
    seen = _ACTIVE[-1]
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike) and _has_place(name := os.fsdecode(path)):
            (seen.written if flags & WRITING else seen.read).add(Path(os.path.realpath(name)))
    elif event in CHANGED:
        for path in arguments[: CHANGED[event]]:
            if isinstance(path, str | bytes | os.PathLike) and _has_place(name := os.fsdecode(path)):
                seen.written.add(Path(os.path.realpath(os.path.dirname(name)), os.path.basename(name)))
    elif event in STARTED:
        seen.started.append(f"{event} {arguments[1] if event == 'socket.connect' else arguments[0]}")


def _has_place(name: str) -> bool:
    """A bare name may be relative to an open folder."""
    return "/" in name


@contextmanager
def observed(*watched: Path) -> Iterator[Seen]:
    """What is done inside the `with`."""
    if not _INSTALLED:  # a hook stays for good
        sys.addaudithook(_hook)
        _INSTALLED.append(True)
    seen, folders = Seen(), [folder for root in watched for folder in (root, *filter(Path.is_dir, root.rglob("*")))]
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC) if folders else -1
    places = {libc.inotify_add_watch(queue, os.fsencode(folder), ANY_OPEN): folder for folder in folders}
    _ACTIVE.append(seen)
    try:
        yield seen
    finally:
        _ACTIVE.remove(seen)
        if folders:
            seen.opened |= set(_told(queue, places))
            os.close(queue)


def _told(queue: int, places: dict[int, Path]) -> Iterator[Path]:
    while True:
        try:
            events = os.read(queue, 1 << 16)
        except BlockingIOError:
            return
        while events:
            place, mask, _, length = struct.unpack_from("iIII", events)
            if not mask & 0x40000000:  # IN_ISDIR
                yield places[place] / events[16 : 16 + length].rstrip(b"\0").decode(errors="replace")
            events = events[16 + length :]
