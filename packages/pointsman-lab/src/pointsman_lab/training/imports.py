"""Routers of other packages that a run names: a module or a file that its user gave.

Whoever opens the run would execute them, so they are imported again only if the same user has named the same module,
or the file with the same content, before (`runs.named`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pointsman.routers.frame.elsewhere import import_routers
from pointsman.routers.frame.registry import split_specs
from pointsman_lab.runs.named import is_remembered, remember


def import_named(name: str) -> str:
    """What `import_routers` does, of a module or file that the user has named: it may be imported again later."""
    found = import_routers(name)
    with contextlib.suppress(OSError, ValueError):  # without it the flag is needed each time
        remember(name)
    return found


def import_recorded(router: str, names: Sequence[str]) -> None:
    """Makes the router setting of a saved run known: imports what the run records, where this user has named it before.

    Raises:
        ValueError: the router is unknown, and the run's module was never named here, or its file is gone or changed.
    """
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
    refused = [name for name in names if not is_remembered(name)]
    for name in names:
        if name not in refused:
            import_routers(name)
    return refused
