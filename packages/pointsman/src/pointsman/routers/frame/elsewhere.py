"""Routers of other packages: entry points of the group `pointsman.routers`, and modules or files that a user names.

In either case the import of a module registers its routers (`register_router`, `register_mixer`).
"""

import hashlib
import os
import sys
import warnings
from importlib import import_module, metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from pointsman.routers.frame.entries import MIXERS, ROUTERS

GROUP = "pointsman.routers"
_FOUND: set[str] = set()  # what `import_routers` has found routers in


def load_installed() -> None:
    """Imports the modules that installed packages name as entry points; warns of one that fails."""
    for point in metadata.entry_points(group=GROUP):
        try:
            import_module(point.module)
        except Exception as error:  # somebody else's package must not take ours down
            package = point.dist.name if point.dist else "?"
            warnings.warn(
                f"routers of the package {package!r} are missing: {point.module} fails with {_told(error)}",
                stacklevel=2,
            )


def import_routers(name: str) -> str:
    """Imports a module, or a Python file, whose import registers routers.

    `name` is a module as `import` takes it, or the path of a file that ends in .py, whose folder is added to the end of
    the module search path. Returns what to record: the module's name, or the file's absolute path. ValueError: there is
    no such module or file, it fails, or it registers no router.
    """
    where = f"--import {name!r}"
    path = Path(name).absolute() if name.endswith(".py") else None
    if path is None and ("/" in name or os.sep in name or not all(part.isidentifier() for part in name.split("."))):
        raise ValueError(f"{where}: allowed are a module, as package.module, and a file that ends in .py")
    if path is not None and not path.is_file():
        raise ValueError(f"{where}: there is no such file")
    recorded = name if path is None else str(path)
    if recorded in _FOUND:
        return recorded
    before = len(ROUTERS | MIXERS)
    try:
        loaded = import_module(name) if path is None else import_file("pointsman_import", path)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            hint = f"; did you mean {name}.py?" if Path(f"{name}.py").is_file() else ""
            raise ValueError(f"{where}: there is no module {missing!r}{hint}") from None
        raise ValueError(f"{where}: it fails with {_told(error)}") from None
    packages = {(one.choose or one.build).__module__.partition(".")[0] for one in (ROUTERS | MIXERS).values()}
    own = loaded.__name__.partition(".")[0]
    if before == len(ROUTERS | MIXERS) and own not in packages:  # nor when it was imported before
        raise ValueError(f"{where}: it registers no router; it needs a function under @register_router(…)")
    _FOUND.add(recorded)
    return recorded


def import_file(prefix: str, path: Path) -> ModuleType:
    """Runs the file with this absolute path as a module whose name begins so; its folder joins the search path."""
    module = f"{prefix}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"
    spec = spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    sys.modules[module] = loaded  # before it runs, as `import` does: dataclasses and pickle look it up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
