"""The pages: tutorials run, the API reference names what exists, commands are taken, lines are not too long."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import pointsman
from pointsman.routers.frame import registry
from pointsman_lab.cli.finetune import settings_of_comparison
from pointsman_lab.cli.main import main
from pointsman_lab.cli.runs import run_config
from pointsman_lab.registry import _installed, learner

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("pytest ",)


def commands(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def install(project: dict[str, Any]) -> None:
    """What pip leaves of a package's entry points, in this folder, which Python imports from."""
    about = project["project"]
    folder = Path(f"{about['name']}-{about['version']}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    lines = [f"[{group}]\n{name} = {at}\n" for group, of in about.get("entry-points", {}).items()
             for name, at in of.items()]  # fmt: skip
    (folder / "entry_points.txt").write_text("".join(lines))
    _installed.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before, names, count = dict(registry.ROUTERS), {"__name__": page.stem}, 0
    try:
        for kind, title, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if title:
                Path(title).write_text(block, encoding="utf-8")
                if title == "pyproject.toml" and "pointsman.tasks" in block:
                    install(tomllib.loads(block))
            elif kind == "python":
                exec(compile(block, f"{page.name}: {block.splitlines()[0]}", "exec"), names)
                count += 1
            elif kind == "sh":
                for command in commands(block):
                    if not command.startswith(NOT_RUN):
                        program, *words = shlex.split(command)
                        assert program == "pointsman"
                        assert main(words) == 0, command
                        count += 1
    finally:
        registry.ROUTERS.clear()
        registry.ROUTERS.update(before)
        for name in ("my_router", "reversal"):
            sys.modules.pop(name, None)
        _installed.cache_clear()
    assert count > 2


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_example_of_a_front_page_runs(page: str) -> None:
    blocks = [block for kind, _, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")) if kind == "python"]
    assert len(blocks) == 1
    exec(compile(blocks[0], page, "exec"), {})


def test_the_readme_fits_in_sixty_seconds_and_says_what_the_claims_say() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 500
    found = readme.partition("## What was found")[2].partition("\n## ")[0]
    findings = [line.removeprefix("- ").rstrip(").") for line in found.splitlines() if line.startswith("- ")]
    claims = " ".join((ROOT / "docs" / "results" / "claims.md").read_text(encoding="utf-8").split())
    assert len(findings) == 5
    assert [finding for finding in findings if finding not in claims] == []
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", readme):
        assert (ROOT / picture).is_file()


def reference() -> list[str]:
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M)]


@pytest.mark.parametrize("name", reference())
def test_the_reference_names_what_exists(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last)


def test_the_reference_has_every_public_name() -> None:
    assert {f"pointsman.{name}" for name in pointsman.__all__} <= set(reference())


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    linked = [  # a page of a router or of a grid is in one of both
        f"{file.parent.name}/{page}"
        for file in [ROOT / "docs" / "routers" / "index.md", *(ROOT / "docs" / "results").glob("*.md")]
        for page in re.findall(r"\]\((\w[\w.-]*\.md)", file.read_text(encoding="utf-8"))
    ]
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in listed if page not in pages] == []
    assert [page for page in pages if page.count("/") < 2 and page not in (*listed, *linked)] == []


def test_the_options_of_every_router_name_who_has_a_balance_loss_by_default() -> None:
    index = (ROOT / "docs" / "routers" / "index.md").read_text(encoding="utf-8")
    named = re.search(r"^\| `balance` \| `0.0` \((.*): `0.01`\)", index, re.MULTILINE)
    assert named
    balanced = {name: entry.balance for name, entry in registry.ROUTERS.items() if entry.balance}
    assert balanced == dict.fromkeys(re.findall(r"`([\w-]+)`", named[1]), 0.01)


def claims_commands() -> list[str]:
    grids = tomllib.loads((ROOT / "records" / "claims.toml").read_text(encoding="utf-8"))["grids"].values()
    lines = [line for grid in grids for line in (f"{grid['command']} --routers smoe", *grid.get("after", ()))]
    return sorted({command for line in lines for command in re.findall("pointsman [^;]+", line)})


@pytest.mark.parametrize("command", claims_commands())
def test_a_command_of_the_claims_is_taken(command: str) -> None:
    _, name, *words = shlex.split(command)
    values = importlib.import_module(f"pointsman_lab.cli.{name}").parser().read(words)
    if name == "compare" and values.task:
        for settings in settings_of_comparison(values):
            values.preset = "tiny-mlm" if "encoder" in learner(settings.task).takes else "tiny"  # GRID's family
            settings.check(run_config(values, "smoe"))


def prose(page: Path) -> list[tuple[int, str]]:
    """The lines outside code, tables and links that stand alone."""
    lines, code = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif not code and not line.startswith(("|", "    ")) and not re.fullmatch(r"[^ ]*\[[^]]*\]\([^)]*\)\S*", line):
            lines.append((number, line))
    return lines


PAGES = [*ROOT.glob("*.md"), *(page for name in ("docs", "benchmarks", "packages", "tests", "tools", "examples")
                               for page in sorted((ROOT / name).rglob("*.md")))]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_at_most_120_characters(page: Path) -> None:
    assert [f"line {number}: {len(line)}" for number, line in prose(page) if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_was_left_half_done(page: Path) -> None:
    assert not re.search(r"^(<<<<<<< |>>>>>>> )", page.read_text(encoding="utf-8"), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_go_to_sections_that_exist_and_named_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text)
    assert [(to, at) for to, at in links if at not in anchors(page.parent / to if to else page)] == []
    named = [name for name in re.findall(r"\btests/[\w/]+\.py\b", text) if "NAME" not in name]
    assert [name for name in named if not (ROOT / name).is_file()] == []
