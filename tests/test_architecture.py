"""The library never imports the laboratory; within each, rooms and files import downward only, in no circle."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pointsman

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = {
    "pointsman": ROOT / "packages" / "pointsman" / "src" / "pointsman",
    "pointsman_lab": ROOT / "packages" / "pointsman-lab" / "src" / "pointsman_lab",
}
ROOMS = {
    "pointsman": (
        "_alive", "_errors", "_files", "_values", "ranks", "routing", "auxiliary", "ops",
        "kernels", "experts", "routers", "delivery", "layer", "conversion", "traces", "control", "recording",
        "replay", "parallel", "diagnostics", "hf", "engines", "testing",
    ),
    "pointsman_lab": (
        "_shapes", "_files", "_values", "_grid", "intervals", "processes", "progress", "registry",
        "models", "data", "runs", "evaluation", "training", "recipes", "finetuning", "traces", "report", "checkpoints",
        "exam", "planning", "diagnosis", "testing", "checks", "cli", "tasks", "__main__",
    ),
}  # fmt: skip
"""From the ground up."""

EXCEPTIONS = {
    ("delivery", "hf"): "add_losses takes Hugging Face models, too: imported when it is handed one",
    ("control", "hf"): "its functions take Hugging Face models, too: imported when they are handed one",
    ("recording", "hf"): "record_routing does, too",
    ("replay", "hf"): "replay_routing does, too",
}


def imports(file: Path) -> Iterator[str]:
    """The dotted names that a module imports, at its head or later."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def modules(package: str) -> Mapping[str, Path]:
    """Dotted name -> file of every module of a package."""
    found = {}
    for file in sorted(FOLDERS[package].rglob("*.py")):
        parts = [package, *file.relative_to(FOLDERS[package]).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def edges(package: str) -> Mapping[str, frozenset[str]]:
    """Module -> modules of the same package that it imports."""
    known = modules(package)
    graph = {}
    for name, file in known.items():
        targets = {target if target in known else target.rpartition(".")[0] for target in imports(file)}
        graph[name] = frozenset(target for target in targets if target in known and target != name)
    return graph


def room(module: str) -> str:
    return [*module.split("."), ""][1]


def test_the_library_never_imports_the_laboratory() -> None:
    above = [
        f"{name} imports {target}"
        for name, file in modules("pointsman").items()
        for target in imports(file)
        if target.split(".")[0] == "pointsman_lab"
    ]
    assert above == []


def test_the_library_is_tested_without_the_laboratory() -> None:
    others = ("pointsman_lab.", "tests.lab.", "tests.tasks.", "tools.")
    wrong = [
        f"{file.name} imports {target}"
        for file in (ROOT / "tests" / "library").rglob("*.py")
        for target in imports(file)
        if f"{target}.".startswith(others) and not target.startswith("tools.bench.peak")
    ]
    assert wrong == []
    assert not any(target.startswith("pointsman") for target in imports(ROOT / "tools" / "bench" / "peak.py"))


@pytest.mark.parametrize("package", ROOMS)
def test_a_package_never_imports_the_tools(package: str) -> None:
    files = modules(package).values()
    assert [file for file in files if any(target.split(".")[0] == "tools" for target in imports(file))] == []


@pytest.mark.parametrize("package", ROOMS)
def test_imports_run_downward(package: str) -> None:
    rooms = ROOMS[package]
    wrong, used = [], set()
    for name, targets in edges(package).items():
        if not room(name):
            continue  # the package's own __init__ offers names of all rooms
        assert room(name) in rooms, f"{name}: a room that the list does not know"
        for target in targets:
            pair = (room(name), room(target))
            if pair[0] == pair[1] or not pair[1]:
                continue
            if pair in EXCEPTIONS:
                used.add(pair)
            elif pair[1] not in rooms[: rooms.index(pair[0])]:
                wrong.append(f"{name} imports {target}")
    assert wrong == []
    assert package != "pointsman" or used == set(EXCEPTIONS), "an exception that is no longer used"


@pytest.mark.parametrize("package", ROOMS)
def test_files_import_in_no_circle(package: str) -> None:
    def allowed(name: str, target: str) -> bool:
        return (room(name), room(target)) in EXCEPTIONS

    graph = {
        name: {target for target in targets if not allowed(name, target)} for name, targets in edges(package).items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_the_page_lists_every_room_in_this_order() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rooms = [room for rooms in ROOMS.values() for room in rooms]
    place = 0
    for room in rooms:  # the packages may have a room of one name
        found = re.compile(rf"^ +(.*, )?{room}(/|\.py)[ ,]", re.MULTILINE).search(page, place)
        assert found, f"{room}: missing, or not in this order"
        place = found.start()


def test_the_page_lists_every_public_name_with_its_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in pointsman.__all__:
        home = getattr(pointsman, name).__module__.removeprefix("pointsman.").replace(".", "/") + ".py"
        assert re.search(rf"^\|.*`{name}`.*\| `{home}` \|$", page, re.MULTILINE), f"{name}: {home}"


FILE_CALLS = re.compile(
    r"(io\.|os\.)?open|os\.fdopen|.*\.(read_text|read_bytes|write_text|write_bytes|touch)|json\.loads?|pickle\..*"
    r"|zlib\.decompress(obj)?|(gzip|bz2|lzma)\.(open|decompress)|(zipfile\.)?ZipFile|tarfile\.open|.*Image\.open"
    r"|(np|numpy)\.(load|memmap|fromfile|lib\.format\.open_memmap)|torch\.load|.*safe_open|.*load_file"
)
"""Calls that open a file, or that make much of little."""
OPENED_ELSEWHERE = {
    "cli.progress": "os.devnull",
    "cli.main": "the null device, in place of an output that nobody reads",
    "_files": "the one way to files",
    "_shapes": "the bounds of what is parsed and unpacked",
    "data.reading": "a checked file of the user's data, read in blocks",
    "data.cache": "the user's own cache, with checksums",
    "tasks.masked_language_modelling.text": "the user's own cache",
    "tasks.images.sources": "the user's own cache",
    "tasks.images.layouts": "an opened .npy file or archive, pixels of bounded pictures",
    "traces.trace": "a checked file, whose header the reader bounds; its own files in a scratch folder",
    "training.checkpoint": "a checked file of a checkpoint; the reader bounds the header",
    "runs.environment": "the system's list of processors",
    "exam.exam": "the package's own record",
    "report.forms": "the package's own page",
    "report.published": "the package's own tables",
    "training.config": "a copy of what was just written as JSON",
    "testing.trainers.check": "what its own two ranks wrote into a scratch folder",
}
"""Module -> what it opens that no stranger's file is, or that was checked."""


CHANGES = re.compile(
    r"shutil\.(copy\w*|move|rmtree|chown|make_archive|unpack_archive)|tempfile\.\w+|os\.(rename|renames|replace|remove"
    r"|removedirs|unlink|rmdir|mkdir|makedirs|link|symlink|truncate|chmod|chown|mkfifo|mknod)"
    r"|.*\.(unlink|rmdir|mkdir|rename|chmod|symlink_to|hardlink_to|tofile|save_pretrained|from_pretrained|from_file)"
    r"|(np|numpy)\.save\w*|.*\bsave_file|torch\.save|urllib\.request\.\w+|subprocess\.\w+|os\.(system|popen|exec\w+|spawn\w+)"
)
"""Calls that make, move or remove files, hand a folder to another library, or start a program."""
CHANGED_ELSEWHERE = {
    "_files": "the one way to files",
    "runs.checkpoints": "folders under names that cannot be foreseen, in the run's own folder of checkpoints",
    "training.sharded": "the same, rank by rank",
    "runs.compact": "a scratch folder of this process",
    "runs.sharing": "the new folder of `open`, where it did not become whole",
    "runs.environment": "git, asked for the commit of the source that runs",
    "data.cache": "the user's own cache",
    "data.download": "a scratch file in the user's own folder of data",
    "data.subwords": "the tokenizer, into a scratch folder of `export`",
    "tasks.images.sources": "the user's own cache",
    "tasks.masked_language_modelling.text": "arrays in memory",
    "models.huggingface.reading": "the settings of a Hugging Face model, without its code",
    "cli.export": "a scratch folder, whose files take the places of an earlier export's",
    "cli.share": "the new folder of a file that is refused late",
    "cli.hf": "a Hugging Face model into --out, which holds no run",
    "checkpoints.audit.result": "a name of its own in --out",
    "hf.loading": "a Hugging Face model that the user names, without its code",
    "checkpoints.on_disk": "the same",
    "processes": "a scratch folder, and the ranks of this run",
    "testing": "a scratch folder",
    "testing.trainers.case": "a scratch folder",
    "testing.trainers.check": "a scratch folder, and the two ranks of a check",
    "checks.loops": "a scratch folder",
}


def opens(call: ast.Call) -> bool:
    """Whether it opens a file, as `path.open("rb")` does, too."""
    name = ast.unparse(call.func)
    named = name.endswith(".open") and call.args and re.match(r"['\"]", ast.unparse(call.args[0]))
    return bool(FILE_CALLS.fullmatch(name) or named)


def changes(call: ast.Call) -> bool:
    """Whether it changes files; `path.replace(target)` has one argument, a text's and a dataclass's have others."""
    name = ast.unparse(call.func)
    moved = name.endswith(".replace") and len(call.args) == 1 and not call.keywords
    return bool(CHANGES.fullmatch(name) or moved)


def test_every_folder_with_modules_is_a_package() -> None:
    """One that is not imports all the same, and pages of the reference do not find what is in it."""
    folders = {file.parent for package in ROOMS for file in modules(package).values()}
    assert sorted(folder for folder in folders if not (folder / "__init__.py").is_file()) == []


@pytest.mark.parametrize(("kind", "allowed"), [(opens, OPENED_ELSEWHERE), (changes, CHANGED_ELSEWHERE)])
def test_files_have_one_door(kind: Callable[[ast.Call], bool], allowed: Mapping[str, str]) -> None:
    found: dict[str, list[str]] = {}
    for name, file in (one for package in ROOMS for one in modules(package).items()):
        calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        if told := [ast.unparse(call)[:60] for call in calls if kind(call)]:
            found[name.partition(".")[2]] = told
    assert {name: calls for name, calls in found.items() if name not in allowed} == {}
    assert sorted(allowed.keys() - found.keys()) == [], "exceptions that are no longer used"
