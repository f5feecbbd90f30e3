"""Imports run downward: every room imports only rooms below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pointsman

ROOMS = (
    "_errors", "_files", "_values", "routing", "ops", "auxiliary", "experts", "routers", "layer", "control", "models",
    "data", "diagnostics", "evaluation", "training", "recipes", "finetuning", "robustness", "report", "benchmark", "hf",
    "diagnosis", "cli", "__main__",
)  # fmt: skip
"""From the ground up."""

EXCEPTIONS = {
    ("control", "hf"): "set_top_k and materialize take Hugging Face models, too: imported when they are handed one",
}
PACKAGE = Path(pointsman.__file__).parent


def imports(file: Path) -> Iterator[str]:
    """The rooms that a module imports, at its head or later; "pointsman" is the package itself."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "pointsman":
                yield name.split(".")[1] if "." in name else "pointsman"


def test_imports_run_downward() -> None:
    wrong, used = [], set()
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue  # the public names
        assert room in ROOMS, f"{room}: a room that the list does not know"
        for other in imports(file):
            if other == room or other == "__version__":
                continue
            if (room, other) in EXCEPTIONS:
                used.add((room, other))
            elif other not in ROOMS[: ROOMS.index(room)]:
                wrong.append(f"{file.relative_to(PACKAGE)} imports {other}")
    assert wrong == []
    assert used == set(EXCEPTIONS), "an exception that is none any more"


def test_every_room_stands_on_the_page_in_this_order() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    places = [re.search(rf"^  (.*, )?{room}(/|\.py)[ ,]", page, re.MULTILINE) for room in ROOMS]
    assert [room for room, place in zip(ROOMS, places, strict=True) if place is None] == []
    lines = [place.start() for place in places if place]
    assert lines == sorted(lines)


def test_every_public_name_stands_on_the_page_with_its_file() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in pointsman.__all__:
        home = getattr(pointsman, name).__module__.removeprefix("pointsman.").replace(".", "/") + ".py"
        assert re.search(rf"^\|.*`{name}`.*\| `{home}` \|$", page, re.MULTILINE), f"{name}: {home}"
