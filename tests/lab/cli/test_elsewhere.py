"""Routers of other packages: entry points, `--import`, and runs that find them again."""

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pointsman import build_router, list_routers
from pointsman._errors import RunError
from pointsman.routers.frame import elsewhere, registry
from pointsman.routers.papers import topk
from pointsman_lab import registry as tasks
from pointsman_lab.cli import exam
from pointsman_lab.cli.main import main
from pointsman_lab.exam.exam import ALWAYS
from pointsman_lab.progress import Quiet
from pointsman_lab.runs import imports
from pointsman_lab.training.jobs import Work
from tests.campaigns.observer import observed
from tests.lab.report.fixtures import write_run

SOURCE = '''
from pointsman.routers.frame.registry import LayerSpec, register_router
from pointsman.routers.frame.stages import Stages
from pointsman.routers.papers.topk import LinearScorer


@register_router("mine", paper="nowhere")
def mine(layer: LayerSpec, *, sharpness: float = 1.0) -> Stages:
    """A linear router under another name."""
    return Stages(LinearScorer(layer.dim, layer.columns))
'''
RUN = [
    "--router", "mine", "--preset", "tiny", "--steps", "2", "--eval-tokens", "128", "--top-k", "2",
    "--set", "model.dim=16", "--set", "model.num_heads=2", "--set", "model.head_dim=8", "--set", "model.hidden_dim=16",
    "--set", "model.num_experts=4", "--set", "batch_size=2", "--set", "segment_length=16", "--set", "memory_length=16",
    "--set", "eval_batch_size=2", "--set", "eval_segment_length=16", "--set", "valid_tokens=128",
]  # fmt: skip


LOOKS_AHEAD = SOURCE.replace("Stages(LinearScorer", "Stages(Ahead").replace(
    "@register",
    """
class Ahead(LinearScorer):
    def forward(self, hidden, context):
        return super().forward(hidden, context).roll(-1, 1)


@register""",
)
OF_COMPARE = ["--routers", "smoe,mine", *RUN[2:]]


def forget() -> None:
    """As if the process were a new one."""
    registry.ROUTERS.pop("mine", None)
    registry.MIXERS.pop("chat", None)
    elsewhere._FOUND.clear()
    imports._IMPORTED.clear()
    imports._NAMED.clear()
    for name in [name for name in sys.modules if name.startswith(("pointsman_import_", "my_"))]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(registry.ROUTERS)
    yield
    forget()
    registry.ROUTERS.clear()
    registry.ROUTERS.update(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "mine.py"
    written.write_text(SOURCE)
    return written


def installed(folder: Path, module: str, source: str, group: str = "routers") -> None:
    """A package in `folder`, as pip would install it, with an entry point."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pointsman.{group}]\nmine = {module}\n")
    sys.path.insert(0, str(folder))


def test_an_installed_package_brings_its_routers(tmp_path: Path) -> None:
    installed(tmp_path, "my_routers", SOURCE)
    elsewhere.load_installed()
    assert "mine" in list_routers()
    assert build_router("mine:sharpness=2", dim=8, num_experts=4).spec == "mine:sharpness=2"


def test_a_package_that_fails_is_named_and_takes_nothing_down(tmp_path: Path) -> None:
    installed(tmp_path, "my_broken", "raise RuntimeError('no\\nGPU')")
    with pytest.warns(UserWarning, match="package 'my_broken' are missing: my_broken fails with RuntimeError: no GPU"):
        elsewhere.load_installed()
    assert "smoe" in list_routers()


def test_a_task_that_is_none_is_named_and_takes_nothing_down(tmp_path: Path) -> None:
    installed(tmp_path, "my_task", "", "tasks")
    tasks._installed.cache_clear()
    with pytest.warns(UserWarning, match="'mine' of the package 'my_task' is missing: my_task is no TaskEntry"):
        assert "transformer-xl" in tasks.families()
    tasks._installed.cache_clear()


def test_a_module_and_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert elsewhere.import_routers(str(file)) == str(file)
    assert elsewhere.import_routers(str(file)) == str(file)
    assert "mine" in list_routers()
    forget()
    monkeypatch.syspath_prepend(str(file.parent))
    (file.parent / "my_module.py").write_text(SOURCE)
    assert elsewhere.import_routers("my_module") == "my_module"
    assert "mine" in list_routers()


def test_a_module_that_was_imported_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own routers came then; of another nothing comes, however often it is named."""
    monkeypatch.syspath_prepend(str(file.parent))
    (file.parent / "my_module.py").write_text(SOURCE)
    import_module("my_module")
    assert elsewhere.import_routers("my_module") == "my_module"
    assert elsewhere.import_routers(str(file.parent / "my_module.py")).endswith("my_module.py")
    (file.parent / "empty.py").write_text("")
    for name in ("os", str(file.parent / "empty.py")) * 2:
        with pytest.raises(ValueError, match="registers no router"):
            elsewhere.import_routers(name)


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        (None, "mine.py", "no such file"),
        (None, "my_nowhere", "there is no module 'my_nowhere'"),
        (None, "my_nowhere.deep", "there is no module 'my_nowhere'"),
        (None, "../mine", "allowed are a module, as package.module, and a file that ends in .py"),
        (None, "", "allowed are a module"),
        ("def x(:", "mine.py", "SyntaxError"),
        ("1 / 0", "mine.py", "ZeroDivisionError: division by zero"),
        ("import my_nowhere", "mine.py", "ModuleNotFoundError: No module named 'my_nowhere'"),
        ("", "mine.py", "registers no router"),
        (
            SOURCE.replace('"mine"', '"smoe"'),
            "mine.py",
            f"the name 'smoe' is taken: {topk.__file__} registers it",
        ),
        (SOURCE.replace("sharpness", "balance"), "mine.py", "every router has an option 'balance'"),
        (
            SOURCE.replace('"mine"', '"oracle"'),
            "mine.py",
            "a router or mixer cannot be called 'oracle': it is reserved",
        ),
        (SOURCE.replace('"mine"', '"a|b"'), "mine.py", "called 'a|b': allowed is a word without any of : @ + | , ="),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str | None, name: str, says: str
) -> None:
    file = tmp_path / name
    if source is not None:
        file.write_text(source)
    assert main(["routers", "--import", str(file) if name == "mine.py" else name]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert says in lines[0]


MIXER = '''
import my_routers
from pointsman.routers.frame.registry import register_mixer
from pointsman.routers.frame.stages import Mixer


@register_mixer("chat", paper="none")
def chat(layer):
    """Nothing yet."""
    return Mixer()
'''


def test_an_exam_of_a_file_has_no_routers_that_it_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_routers.py").write_text(SOURCE)
    (tmp_path / "mixer.py").write_text(MIXER)
    assert main(["exam", str(tmp_path / "mixer.py"), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "registers no router itself; name specs instead" in told
    assert " mine,smoe+" in told
    assert "smoe+chat" in told


LIBRARY = '''
from pointsman.routers.frame.stages import Stages
from pointsman.routers.papers.topk import LinearScorer


def make(scale):
    def build(layer):
        """A router of the library."""
        return Stages(LinearScorer(layer.dim, layer.num_experts))

    return build
'''
FACTORY = """
from my_library import make
from pointsman.routers.frame.registry import register_router

register_router("made", paper="none")(make(1.0))
"""


@pytest.mark.parametrize(
    ("source", "rows", "told"),
    [
        (FACTORY, ["made"], ""),
        (FACTORY + SOURCE, ["made", "mine"], ""),
        ("import my_routers\n" + FACTORY, ["made"], "FILE imports register them: mine (--import FILE mine does)"),
    ],
)
def test_an_exam_of_a_file_has_the_routers_that_it_registers(
    source: str, rows: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those whose functions come from a library."""
    (tmp_path / "my_library.py").write_text(LIBRARY)
    (tmp_path / "my_routers.py").write_text(SOURCE)
    file = tmp_path / "own.py"
    file.write_text(source)
    plan = exam.plan_of(exam.parser().read([str(file), "--quick"]))
    assert list(plan.rows[len(ALWAYS) :]) == rows
    said = capsys.readouterr().err
    assert told.replace("FILE", str(file)) in said
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    "command", [["train", *RUN], ["compare", *OF_COMPARE], ["exam", "mine", "--tasks", "clusters"]]
)
def test_a_router_that_looks_ahead_and_does_not_say_so_is_not_trained(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "text.txt").write_text("the pointsman sets the points; the wagon leaves on its track.\n" * 400)
    file.write_text(LOOKS_AHEAD)
    data = [] if command[0] == "exam" else ["--data", str(tmp_path / "text.txt")]
    assert main([*command, *data, "--import", str(file), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "mine breaks the contract: `causal`" in told
    assert "declared causal in evaluation, but experts before token 1 changed with token 1" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("return super().forward(hidden, context) + hidden.new_empty(()).normal_()", "torch's generator moved"),
        ("hidden.data.clamp_(-1, 1); return super().forward(hidden, context)", "changes the hidden states in place"),
        ("return super().forward(hidden, context).abs() * float('nan')", "k=1: logits: NaN"),
        (
            "return super().forward(hidden, context) + hidden @ self.rows[0].T\n\n    def __init__(self, *sizes):\n"
            "        super().__init__(*sizes)\n        self.rows = [self.weight.detach().clone().normal_()]",
            "with the state_dict of another routes as that one does",
        ),
    ],
)
def test_what_an_imported_router_draws_changes_or_hides_in_silence_is_told(file: Path, change: str, says: str) -> None:
    file.write_text(LOOKS_AHEAD.replace("return super().forward(hidden, context).roll(-1, 1)", change))
    imports.import_named(str(file))
    with pytest.raises(RunError, match=says):
        imports.check_imported(["mine"], 8, 4)


def test_a_router_with_a_selector_of_its_own_is_said_to_have_no_halves(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = SOURCE.replace("columns))", "columns), select=TopK())").replace("import Stages", "import Stages, TopK")
    file.write_text(own)
    assert main(["routers", "--import", str(file), "mine"]) == 0
    told = capsys.readouterr().out
    assert "neither mine@… nor …@mine: it has a selector of its own" in told
    assert "as choice" not in told
    assert main(["routers"]) == 0
    assert "mine" not in capsys.readouterr().out.partition("as scores, ")[2]


def test_an_assertion_of_a_routers_own_is_no_broken_promise(file: Path) -> None:
    own = "assert hidden.shape[1] % 16 == 0, 'chunks'; return super().forward(hidden, context)"
    file.write_text(LOOKS_AHEAD.replace("return super().forward(hidden, context).roll(-1, 1)", own))
    imports.import_named(str(file))
    imports.check_imported(["mine"], 8, 4)


def test_a_module_named_like_a_file_nearby_is_told_of_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    (file.parent / "my_own.py").write_text(SOURCE)
    assert main(["routers", "--import", "my_own"]) == 2
    assert "did you mean my_own.py?" in capsys.readouterr().err


def test_a_run_finds_its_router_again(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", str(tmp_path / "run")
    text.write_text("the pointsman sets the points; the wagon leaves on its track.\n" * 400)
    train = ["train", *RUN, "--data", str(text), "--out", out]
    assert main([*train, "--import", str(file)]) == 0
    forget()
    assert main(["report", out, "--map", "none"]) == 0
    assert "mine" in list_routers()
    forget()
    assert main(["evaluate", out, "--top-k", "1"]) == 0
    forget()
    assert main([*train, "--resume", "--steps", "2"]) == 0
    capsys.readouterr()
    forget()
    file.write_text(SOURCE + "\n# changed\n")
    for command in (["evaluate", out], [*train, "--resume"]):
        assert main(command) == 2
        assert f"--import {file}" in capsys.readouterr().err
    assert main(["report", out]) == 0  # the page, without the sample
    assert "no sample of mine: router 'mine': the run takes it from" in capsys.readouterr().err
    for command in (["evaluate", out], [*train, "--resume"]):
        assert main([*command, "--import", str(file)]) == 2
        assert f"{out}: mine.py is not what it was when router 'mine' was trained" in capsys.readouterr().err
    forget()
    file.write_text(SOURCE)
    assert main(["evaluate", out, "--import", str(file)]) == 0


def compared(text: Path, out: Path, *more: str) -> list[str]:
    text.write_text("the pointsman sets the points; the wagon leaves on its track.\n" * 400)
    return ["compare", "--routers", *RUN[1:], "--data", str(text), "--out", str(out), "--jobs", "1", *more]


def test_a_row_is_of_one_source_wherever_it_lies(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file with the module beside it; a comparison goes on and is shared with a copy, not with what has changed."""
    helper, out, packed = tmp_path / "my_own.py", tmp_path / "out", tmp_path / "packed"
    helper.write_text("HALF = 0.5\n")
    file.write_text(SOURCE.replace("1.0", "HALF") + "\n")
    file.write_text(file.read_text().replace("\n", "\nfrom my_own import HALF\n", 1))
    command = compared(tmp_path / "text.txt", out)
    assert main([*command, "--import", str(file)]) == 0
    environment = json.loads((out / "runs/mine/seed-0/environment.json").read_text())
    assert list(environment["origin"]) == ["mine.py", "my_own.py"]
    elsewhere_now = tmp_path / "moved"
    elsewhere_now.mkdir()
    for one in (file, helper):
        one.rename(elsewhere_now / one.name)
    forget()
    assert main(["share", str(out), "--out", str(packed)]) == 2
    assert "or a copy of it" in capsys.readouterr().err
    moved = ["--import", str(elsewhere_now / "mine.py")]
    assert main([*command, "--seeds", "2", *moved]) == 0
    assert main(["share", str(out), "--out", str(packed), *moved]) == 0
    told = json.loads(zlib.decompress(packed.read_bytes()))
    assert set(told["sources"]) == {"mine.py", "my_own.py"}
    assert str(tmp_path) not in json.dumps(told)
    assert "pointsman compare --routers mine" in told["comparison"]["command"]
    capsys.readouterr()
    assert main(["submit", str(out), "--router", "mine", "--out", str(tmp_path / "entry.json"), *moved]) == 2
    assert "comes from my_own.py, which an entry does not carry" in capsys.readouterr().err
    (elsewhere_now / "my_own.py").write_text("HALF = 0.25\n")
    forget()
    for words, says in (
        ([*command, "--seeds", "3"], "my_own.py is not what it was"),
        (["submit", str(out), "--router", "mine"], "comes from my_own.py, which an entry does not carry"),
        (["share", str(out)], f"the routers' file {file} is missing, has changed or was never imported here"),
    ):
        assert main([*words, *moved]) == 2
        assert says in capsys.readouterr().err
    assert not (out / "runs/mine/seed-2").exists()


def test_a_row_is_fine_tuned_with_a_copy_of_its_source(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in the processes of `--jobs`; other rows do without it."""

    def in_a_process_of_its_own(jobs: Sequence[Any], _: Any, setup: Callable[[], Work], *__: Any, **___: Any) -> None:
        forget()
        work = setup()
        for job in jobs:
            work(job, Quiet(), None)

    out, task = tmp_path / "out", tmp_path / "task.tsv"
    command = compared(tmp_path / "text.txt", out)
    command[2] = "mine,smoe"
    assert main([*command, "--import", str(file)]) == 0
    copy = file.rename(tmp_path / "copy.py")
    task.write_text("text\tlabel\n" + "".join(f"wagon {number}\t{number % 2}\n" for number in range(80)))
    tune = ["compare", "--out", str(out), "--task", str(task), "--task-steps", "1", "--length", "8"]
    forget()
    assert main(tune) == 2
    assert f"repeat the command with --import {file} or a copy of it" in capsys.readouterr().err
    monkeypatch.setattr("pointsman_lab.finetuning.run.do_all", in_a_process_of_its_own)
    assert main([*tune, "--task-routers", "smoe"]) == 0
    assert "mine" not in list_routers()
    assert main([*tune, "--import", str(copy)]) == 0
    assert len([*out.glob("runs/*/seed-0/finetune/*/seed-0/evaluation.json")]) == 2


def test_of_two_copies_one_is_imported_and_two_modules_of_a_name_are_told_apart(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    copy = other / "copy.py"
    copy.write_text(SOURCE)
    assert main(["routers", "--import", str(file), "--import", str(copy)]) == 0
    copy.write_text(SOURCE + "\n")
    assert main(["routers", "--import", str(copy)]) == 2
    assert f"the name 'mine' is taken: {file} registers it" in capsys.readouterr().err
    forget()
    for folder, name in ((tmp_path, "mine"), (other, "yours")):
        (folder / "my_own.py").write_text("HALF = 0.5\n")
        (folder / f"{name}.py").write_text("import my_own\n" + SOURCE.replace('"mine"', repr(name)))
    assert main(["routers", "--import", str(file), "--import", str(other / "yours.py")]) == 2
    assert f"it got {tmp_path / 'my_own.py'} in place of {other / 'my_own.py'}" in capsys.readouterr().err


def test_an_installed_package_is_recorded_and_named_to_the_receiver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "my_routers", SOURCE)
    elsewhere.load_installed()
    out, packed = tmp_path / "out", tmp_path / "a.pointsman"
    assert main(compared(tmp_path / "text.txt", out)) == 0
    environment = json.loads((out / "runs/mine/seed-0/environment.json").read_text())
    assert re.fullmatch("my_routers 1.0, SHA-256 [0-9a-f]{64}", environment["origin"].pop("my_routers"))
    assert not environment["origin"]
    capsys.readouterr()
    assert main(["submit", str(out), "--router", "mine"]) == 2
    assert "comes from my_routers 1.0, which an entry does not carry" in capsys.readouterr().err
    assert main(["share", str(out), "--out", str(packed)]) == 0
    assert "routers came from 'my_routers 1.0', which is not in the file" in capsys.readouterr().err
    forget()
    assert main(["open", str(packed), "--out", str(tmp_path / "theirs")]) == 0
    assert "routers came from 'my_routers 1.0', which is not in the file" in capsys.readouterr().out


@pytest.mark.parametrize("changed", ["__init__.py", "parts/scale.py"])
def test_a_package_that_is_edited_at_the_same_version_is_another_router(tmp_path: Path, changed: str) -> None:
    """As with `pip install -e`: what its module imports of it counts, and of runs of before the version alone."""

    def origin() -> dict[str, str]:
        forget()
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_routers"]:
            del sys.modules[name]
        imports._origin.cache_clear()
        elsewhere.load_installed()
        return imports.origin_of("mine")

    package = tmp_path / "my_routers"
    (package / "parts").mkdir(parents=True)
    for name in ("parts/__init__.py", "parts/scale.py", "unused.py"):
        (package / name).write_text("SCALE = 1.0\n")
    installed(tmp_path, "my_routers", SOURCE + "from my_routers.parts.scale import SCALE\nimport torch\n")
    (tmp_path / "my_routers.py").rename(package / "__init__.py")
    before = origin()
    (package / "unused.py").write_text("SCALE = 2.0\n")
    assert origin() == before
    assert imports.unlike_origin(before, before) == ""
    (package / changed).write_text((package / changed).read_text() + "# another\n")
    assert imports.unlike_origin(before, origin()) == "my_routers"
    with pytest.raises(RunError, match="out: my_routers is not what it was when router 'mine' was trained"):
        imports.check_origin("out", before, "mine")
    imports.check_origin("out", {"my_routers": "my_routers 1.0"}, "mine")
    with pytest.raises(RunError, match="my_routers is not what it was"):
        imports.check_origin("out", {"my_routers": "my_routers 0.9"}, "mine")
    imports._origin.cache_clear()


def test_a_run_of_somebody_else_imports_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="never imported here; if you trust it"):
        imports.import_recorded("mine", [str(file)])
    with pytest.raises(ValueError, match="unknown router 'mine'"):
        imports.import_recorded("mine", [])
    assert not any(name.startswith("pointsman_import_") for name in sys.modules)
    imports.import_recorded("smoe", [str(file)])
    imports.import_named(str(file))
    imports.import_recorded("smoe|mine", ["my_nowhere"])


@pytest.mark.slow
def test_a_worker_imports_nothing_of_somebody_elses_either(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of ours are added to a comparison that was sent: their processes leave its file alone, there or not."""
    done = tmp_path / "executed"
    file.write_text(f"import pathlib\npathlib.Path({str(done)!r}).touch()\n" + SOURCE)
    command = compared(tmp_path / "text.txt", tmp_path / "out")
    assert main([*command, "--import", str(file)]) == 0
    forget()
    done.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of_somebody_else"))
    command[-1] = "2"
    for rows in ("smoe,smoe-dropout", "smoe,hyperrouter,xmoe"):
        command[2] = rows
        assert main(command) == 0
        assert not done.exists()
        file.unlink(missing_ok=True)


@pytest.mark.filterwarnings("ignore:the token cache")
def test_a_home_that_cannot_be_written_to_is_no_hindrance(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this command names reaches its processes without the cache folder."""
    (tmp_path / "no_folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_folder"))
    command = compared(tmp_path / "text.txt", tmp_path / "out")
    command[command.index("mine")] = "mine,smoe"
    command[-1] = "2"
    assert main([*command, "--import", str(file)]) == 0


def test_the_code_that_a_run_names_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of a router that nobody knows nor of one that we have, by whatever reads the run."""
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n" + SOURCE)
    for router in ("mine", "smoe"):
        run = write_run(tmp_path / router, router=router)
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "imports": [str(evil), "my_evil"]}))
        (run / "my_evil.py").write_text(evil.read_text())
        with observed(tmp_path) as seen:
            assert main(["report", str(run), "--map", "none", "--out", str(tmp_path / "page.html")]) == 0
            assert main(["evaluate", str(run), "--out", str(tmp_path / "out")]) == 2
        assert run / "config.json" in seen.opened
        assert not [file for file in seen.opened if file.suffix == ".py"]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_a_router_of_a_notebook_has_no_file(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_notebook")
    monkeypatch.setitem(sys.modules, "my_notebook", module)
    exec(SOURCE, module.__dict__)
    if file:
        module.__file__ = file
    assert imports.origin_of("mine") == {}
