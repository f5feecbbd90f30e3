"""The library never imports the laboratory; within each, a room imports only rooms below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import pointsman

LIBRARY = (
    "_errors", "_shapes", "_files", "_values", "_grid", "ranks", "routing", "auxiliary", "ops", "experts", "routers",
    "layer", "control", "replay", "parallel", "diagnostics", "hf", "testing",
)  # fmt: skip
LABORATORY = (
    "progress", "models", "data", "runs", "evaluation", "training", "recipes", "finetuning", "robustness", "report",
    "benchmark", "planning", "diagnosis",
)  # fmt: skip
ROOF = ("cli", "__main__")
"""From the ground up."""

EXCEPTIONS = {
    ("control", "hf"): "set_top_k and materialize take Hugging Face models, too: imported when they are handed one",
}
PACKAGE = Path(pointsman.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def imports(file: Path) -> Iterator[tuple[str, ...]]:
    """The names below `pointsman` that a module imports, at its head or later, split at the dots."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("pointsman."):
                yield tuple(name.split(".")[1:])


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(room, file) of every module below `folder`."""
    for file in sorted(folder.rglob("*.py")):
        room = file.relative_to(folder).parts[0].removesuffix(".py")
        if room != "__init__":
            yield room, file


def test_the_library_never_imports_the_laboratory() -> None:
    above = [
        f"{file.relative_to(PACKAGE)} imports {'.'.join(name)}"
        for room, file in files(PACKAGE)
        if room in LIBRARY
        for name in imports(file)
        if name[0] in ("lab", *ROOF)
    ]
    assert above == []


@pytest.mark.parametrize(
    ("folder", "rooms"), [(PACKAGE, (*LIBRARY, "lab", *ROOF)), (PACKAGE / "lab", LABORATORY)], ids=["library", "lab"]
)
def test_imports_run_downward(folder: Path, rooms: Sequence[str]) -> None:
    wrong, used = [], set()
    inside = folder.relative_to(PACKAGE).parts
    for room, file in files(folder):
        assert room in rooms, f"{room}: a room that the list does not know"
        for name in imports(file):
            if name[: len(inside)] != inside or len(name) == len(inside):
                continue
            other = name[len(inside)]
            if other in (room, "__version__"):
                continue
            if (room, other) in EXCEPTIONS:
                used.add((room, other))
            elif other not in rooms[: rooms.index(room)]:
                wrong.append(f"{file.relative_to(PACKAGE)} imports {'.'.join(name)}")
    assert wrong == []
    assert folder != PACKAGE or used == set(EXCEPTIONS), "an exception that is no longer used"


def test_the_page_lists_every_room_in_this_order() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rooms = (*LIBRARY, "lab", *LABORATORY, *ROOF)
    places = [re.search(rf"^ +(.*, )?{room}(/|\.py)[ ,]", page, re.MULTILINE) for room in rooms]
    assert [room for room, place in zip(rooms, places, strict=True) if place is None] == []
    lines = [place.start() for place in places if place]
    assert lines == sorted(lines)


def test_the_page_lists_every_public_name_with_its_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in pointsman.__all__:
        home = getattr(pointsman, name).__module__.removeprefix("pointsman.").replace(".", "/") + ".py"
        assert re.search(rf"^\|.*`{name}`.*\| `{home}` \|$", page, re.MULTILINE), f"{name}: {home}"
