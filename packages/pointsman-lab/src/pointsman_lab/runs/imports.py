"""Routers of other packages that a run names: modules and Python files that its user gave.

Whoever opens the run would execute them, so only what the same user has named before, a file with the same content, is
imported again or handed on. What was named is kept in the user's cache folder, a file with its content's checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pointsman._errors import RunError
from pointsman_lab._files import read_ordinary, read_text, user_cache_folder, write_whole


def import_named(name: str) -> str:
    """What `import_routers` does, of a module or file that the user has named: it may be imported again later."""
    from pointsman.routers.frame.elsewhere import import_routers

    found = import_routers(name)
    with contextlib.suppress(OSError, ValueError):  # without it the flag is needed each time
        remember(name)
    return found


def import_recorded(router: str, names: Sequence[str]) -> None:
    """Makes the router setting of a saved run known: imports what the run records, where this user has named it before.

    Raises:
        ValueError: the router is unknown, and the run's module was never named here, or its file is gone or changed.
    """
    from pointsman.routers.frame.registry import split_specs

    try:
        split_specs(router)
        return
    except ValueError:
        if not names:
            raise
    refused = import_remembered(names)
    try:
        split_specs(router)
    except ValueError as error:
        if refused:
            raise ValueError(
                f"router {router!r}: the run takes it from {refused[0]!r}, which is missing, has changed or was "
                f"never imported here; if you trust it, repeat the command with --import {refused[0]}"
            ) from None
        raise error from None


def import_remembered(names: Sequence[str]) -> list[str]:
    """Imports the modules and files that this user has named before; returns the others."""
    from pointsman.routers.frame.elsewhere import import_routers

    refused = [name for name in names if not is_remembered(name)]
    for name in names:
        if name not in refused:
            import_routers(name)
    return refused


def check_imported(specs: Iterable[str], dim: int, num_experts: int) -> None:
    """Proves that routers of other packages are as causal and batch invariant as they declare, in small forwards.

    Raises:
        RunError: one is not, with the line of the contract.
    """
    from pointsman.routers.frame.registry import BASELINES, entry, parse_spec, split_specs
    from pointsman.testing import Case, flags
    from pointsman.testing.contract import hold

    for spec in dict.fromkeys(one for cycled in specs for one in split_specs(cycled)):
        parsed = parse_spec(spec)
        names = [name for name in (parsed.router, parsed.choice, parsed.mixer) if name and name not in BASELINES]
        builds = [build for name in names for build in (entry(name).build, entry(name).choose) if build]
        if all(build.__module__.startswith("pointsman.") for build in builds):
            continue
        case = Case(spec, dim, num_experts, must_show=False)
        try:
            hold(case, (flags.causal_flag, flags.batch_invariant_flag))
        except (AssertionError, ValueError) as broken:
            if isinstance(broken.__cause__, AssertionError):  # another error is of these sizes, or training meets it
                raise RunError(str(broken)) from None


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
