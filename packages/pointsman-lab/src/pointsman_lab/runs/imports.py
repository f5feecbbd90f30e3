"""Routers of other packages that a run names: modules and Python files that its user gave, and which code they were.

Whoever opens the run would execute them, so only what the same user has named before, a file with the same content, is
imported again or handed on. What was named is kept in the user's cache folder, a file with its content's checksum.
Content is that of the file and of the modules beside it that it imports.
"""

import ast
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from pointsman._errors import RunError
from pointsman_lab._files import read_ordinary, read_text, user_cache_folder, write_whole
from pointsman_lab.runs.paths import slug
from pointsman_lab.runs.record import label

SOURCE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}\.py")
CODE = ", SHA-256 "  # between a package's version and the sum of its router's code
_IMPORTED: dict[str, str] = {}  # the content of each file that this process has imported -> its path
_NAMED: dict[Path, str] = {}  # what `remember` was told in this process, which may have no cache folder to write to


def import_named(name: str) -> str:
    """What `import_routers` does, of a module or file that the user has named: it may be imported again later.

    A copy of a file that was imported is that file. ValueError: a module beside the file has the name of another one.
    """
    from pointsman.routers.frame.elsewhere import import_routers

    with contextlib.suppress(OSError, ValueError):  # `import_routers` says what is wrong
        if (same := _IMPORTED.get(_digest(name))) is not None:
            remember(name)
            return same
    found = import_routers(name)
    if name.endswith(".py"):
        for file in local_files(Path(found)):
            parts = file.relative_to(Path(found).parent).with_suffix("").parts
            other = getattr(sys.modules.get(".".join(parts).removesuffix(".__init__")), "__file__", None) or str(file)
            if other != str(file) and any(Path(other).is_relative_to(Path(one).parent) for one in _IMPORTED.values()):
                raise ValueError(f"--import {name!r}: it got {other} in place of {file}: rename one of the two")
        _IMPORTED[_digest(found)] = found
        for module in [one for one in [*sys.modules.values()] if getattr(one, "__file__", None) == found]:
            _origin(module)  # as it is now: the file may change before a run asks
    with contextlib.suppress(OSError, ValueError):  # without it the flag is needed each time
        remember(found)
    return found


def import_recorded(router: str, names: Sequence[str]) -> None:
    """Makes the router setting of a saved run known: imports what the run records, where this user has named it before.

    ValueError where it stays unknown: the run's module was never named here, or its file is gone or changed.
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
                f"router {router!r}: the run takes it from {refused[0]!r}, which is missing, has changed or was never "
                f"imported here; if you trust it, repeat the command with --import {refused[0]} or a copy of it"
            ) from None
        raise error from None


def named_before(names: Sequence[str]) -> list[str]:
    """Of what a run records, the modules and files that this user has named: a worker, too, imports no others."""
    return [name for name in map(present, names) if is_remembered(name)]


def import_remembered(names: Sequence[str]) -> list[str]:
    """Imports the modules and files that this user has named before; returns the others."""
    named = named_before(names)
    for name in named:
        import_named(name)
    return [name for name in map(present, names) if name not in named]


def check_imported(specs: Iterable[str], dim: int, num_experts: int) -> None:
    """Proves of routers of other packages, in small forwards, that routings have their shapes and sums, that
    `state_dict` holds all weights, that flags are true and hidden states stay as they are; RunError with the line of
    the contract where one does not hold.
    """
    from pointsman.routers.frame.registry import BASELINES, entry, parse_spec, split_specs
    from pointsman.testing import Case, flags, routing
    from pointsman.testing.case import BrokenPromiseError
    from pointsman.testing.contract import hold

    for spec in dict.fromkeys(one for cycled in specs for one in split_specs(cycled)):
        parsed = parse_spec(spec)
        names = [name for name in (parsed.router, parsed.choice, parsed.mixer) if name and name not in BASELINES]
        builds = [build for name in names for build in (entry(name).build, entry(name).choose) if build]
        if all(build.__module__.startswith("pointsman.") for build in builds):
            continue
        case = Case(spec, dim, num_experts, must_show=False)
        try:
            proofs = (routing.shapes_and_sums, flags.stochastic_flag, flags.causal_flag, flags.batch_invariant_flag)
            hold(case, (*proofs, routing.state_dict))
        except Exception as broken:
            # another error is of these sizes, or training meets it
            if isinstance(broken.__cause__, BrokenPromiseError):
                raise RunError(str(broken)) from None


def present(name: str) -> str:
    """The file that this process has imported in place of a recorded one: of the same content, where the user has named
    both, else of the same name. The recorded name where there is none.
    """
    try:
        return _IMPORTED.get(read_text(_mark(name)), name)
    except (OSError, ValueError):
        return next((one for one in _IMPORTED.values() if Path(one).name == Path(name).name), name)


def remember(name: str) -> None:
    """Keeps that the user has named a module, or a file with its present content."""
    _NAMED[_mark(name)] = _digest(name)
    write_whole(_mark(name), _digest(name))


def is_remembered(name: str) -> bool:
    """Whether the user has named it before. A file that was never named is not even read."""
    try:
        return (_NAMED.get(_mark(name)) or read_text(_mark(name))) == _digest(name)
    except (OSError, ValueError):
        return False


def source_of(name: str) -> dict[str, str]:
    """The text of a Python file that the user has named, and of the modules beside it that it imports, by their names
    in its folder; its own comes first.
    """
    file = Path(present(name))
    if is_remembered(str(file)):
        try:
            return {one: content.decode() for one, content in _contents(file).items()}
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"the routers' file {name} cannot be read: {error}") from None
    told = f"if it is meant to go along, repeat the command with --import {name} or a copy of it"
    raise RunError(f"the routers' file {name} is missing, has changed or was never imported here; {told}")


def imports_of(settings: Mapping[str, Any]) -> list[str]:
    """What a run or comparison with these settings was given with --import."""
    found = settings.get("imports")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def sources_of(imports: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> text of each Python file among what a plan imports and of modules beside it; and path -> such a name."""
    sources: dict[str, str] = {}
    names: dict[str, str] = {}
    for path in (one for one in imports if one.endswith(".py")):
        (own, text), *others = source_of(path).items()
        name = slug(own)
        if sources.get(name, text) != text or not SOURCE.fullmatch(name):
            name = f"{len(sources)}-{name}"
        names[path], sources[name] = name, text
        sources |= {one: of for one, of in others if one not in sources and SOURCE.fullmatch(one)}
    return sources, names


def left_out(where: object, origin: Mapping[str, str], sources: Mapping[str, str]) -> list[str]:
    """What a router comes from and is not among the sources; RunError where these have another file of its name."""
    sums = {_sum(text.encode()) for text in sources.values()}
    left = {name: value for name, value in origin.items() if value not in sums}
    if changed := next((name for name in left if slug(name) in sources), None):
        told = "has changed since its router was trained; only what it was then may go along"
        raise RunError(f"{where}: {changed} {told}")
    return [name if name.endswith(".py") else value.partition(CODE)[0] for name, value in left.items()]


def names_in(router: str) -> list[str]:
    """The routers and mixers that a router setting names."""
    return [name for name in dict.fromkeys(re.split(r"[+@|]|:[^+@|]*", router)) if name]


def origin_of(router: Any) -> dict[str, str]:
    """Where a router setting's parts come from that are not pointsman's: file -> SHA-256; package -> "name version" and
    the SHA-256 of the router's module and of what that imports of the package, as `pip install -e` keeps the version.
    """
    from pointsman.routers.frame.registry import MIXERS, ROUTERS

    entries = [(ROUTERS | MIXERS).get(name) for name in names_in(label(router))]
    modules = [sys.modules.get((one.choose or one.build).__module__) for one in entries if one is not None]
    return {
        name: value
        for module in modules
        if module is not None and module.__name__.partition(".")[0] != "pointsman"
        for name, value in _origin(module).items()
    }


def check_origin(where: object, before: Mapping[str, str] | None, router: Any) -> None:
    """RunError where a router is not the one of the run, row or exam at `where`, whose `origin_of` was `before`."""
    if name := unlike_origin(before or {}, origin_of(router)):
        told = f"is not what it was when router {label(router)!r} was trained"
        raise RunError(f"{where}: {name} {told}: bring it back as it was, or train in another --out")


def unlike_origin(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The name of what differs between two of `origin_of`; "" if nothing does, or one is empty.

    Runs of earlier versions have no sum of a package's code; with one of these the package's version alone counts.
    """
    whole = all(name.endswith(".py") or CODE in value for of in (one, other) for name, value in of.items())
    first, second = (
        {value if whole else value.partition(CODE)[0]: name for name, value in of.items()} for of in (one, other)
    )
    differing = (name for value, name in (first | second).items() if (value in first) != (value in second))
    return next(differing, "") if one and other else ""


@cache
def _origin(module: ModuleType) -> dict[str, str]:
    """Of a module of this process: what it was when this was first asked."""
    from pointsman.routers.frame.elsewhere import GROUP

    top = module.__name__.partition(".")[0]
    points = [point for point in metadata.entry_points(group=GROUP) if point.module.partition(".")[0] == top]
    packages = [point.dist.name for point in points if point.dist is not None]
    if not packages and not top.startswith("pointsman_import_"):
        packages = metadata.packages_distributions().get(top, [])
    file = Path(getattr(module, "__file__", None) or "")  # a notebook and an interactive session have none
    if packages:
        first = Path(getattr(sys.modules.get(top), "__file__", None) or "")
        inside = first.parent if first.name == "__init__.py" else file
        code = CODE + _sum("".join(map(_sum, _contents(file, inside).values())).encode()) if file.is_file() else ""
        return {packages[0]: f"{packages[0]} {metadata.version(packages[0])}{code}"}
    if top in ("__main__", "__mp_main__"):  # a script is more than its router
        return {}
    return {name: _sum(content) for name, content in _contents(file).items()} if file.is_file() else {}


def local_files(file: Path, package: Path | None = None) -> list[Path]:
    """A Python file and, without running any, the modules beside it that it imports, and those that these import.

    Args:
        package: the folder of the package that the file is of; then the modules are those in this folder.
    """
    folder, inside = (package.parent, package) if package else (file.parent, file.parent)
    found: list[Path] = []
    todo = [file]
    while todo:
        one = todo.pop(0)
        if one in found:
            continue
        found.append(one)
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            for place in _imported_places(ast.parse(read_ordinary(one)), one.parent, folder):
                near = (place.with_name(f"{place.name}.py"), place / "__init__.py")
                todo += [each for each in near if each.is_relative_to(inside) and each.is_file()]
    return found


def _imported_places(tree: ast.AST, package: Path, folder: Path) -> Iterator[Path]:
    """Where in `folder` the modules would lie that a file in `package` imports, without the ending."""
    for node in ast.walk(tree):
        base, names = folder, [one.name for one in getattr(node, "names", ()) if isinstance(one, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            base = [folder, package, *package.parents][min(node.level, len(package.parents))]
            names = [f"{node.module}.{name}" if node.module else name for name in names]
        for name in names:
            parts = name.split(".")
            if parts[0] not in ("pointsman", "pointsman_lab"):
                yield from (base.joinpath(*parts[:end]) for end in range(1, len(parts) + 1))


def _contents(file: Path, package: Path | None = None) -> dict[str, bytes]:
    folder = package or file.parent
    return {one.relative_to(folder).as_posix(): read_ordinary(one) for one in local_files(file, package)}


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _mark(name: str) -> Path:
    """The file that stands for a module or a Python file; it holds what `_digest` was when the user named it."""
    absolute = str(Path(name).absolute()) if name.endswith(".py") else name
    return user_cache_folder() / "imports" / hashlib.sha256(os.fsencode(absolute)).hexdigest()


def _digest(name: str) -> str:
    if not name.endswith(".py"):
        return "module"
    own, *others = map(_sum, _contents(Path(name)).values())
    return _sum("".join([own, *others]).encode()) if others else own
