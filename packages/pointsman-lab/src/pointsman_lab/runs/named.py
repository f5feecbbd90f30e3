"""Modules and Python files that this user has named: only their code is run, or handed on, where a folder names them.

What was named is kept in the user's cache folder, a file with its content's checksum.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab._files import read_ordinary, read_text, user_cache_folder, write_whole


def remember(name: str) -> None:
    """Keeps that the user has named a module, or a file with its present content."""
    write_whole(_mark(name), _digest(name))


def is_remembered(name: str) -> bool:
    """Whether the user has named it before. A file that was never named is not even read."""
    try:
        return read_text(_mark(name)) == _digest(name)
    except (OSError, ValueError):
        return False


def source_of(name: str) -> str:
    """The text of a Python file that the user has named."""
    if is_remembered(name):
        try:
            return read_ordinary(Path(name)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"the routers' file {name} cannot be read: {error}") from None
    raise RunError(
        f"the routers' file {name} is missing, has changed or was never imported here; if it is meant to go along, "
        f"repeat the command with --import {name}"
    )


def _mark(name: str) -> Path:
    """The file that stands for a module or a Python file; it holds what `_digest` was when the user named it."""
    absolute = str(Path(name).absolute()) if name.endswith(".py") else name
    return user_cache_folder() / "imports" / hashlib.sha256(os.fsencode(absolute)).hexdigest()


def _digest(name: str) -> str:
    return hashlib.sha256(read_ordinary(Path(name))).hexdigest() if name.endswith(".py") else "module"
