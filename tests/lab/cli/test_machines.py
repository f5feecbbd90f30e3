"""Machines that lack something: packages, permissions, the current folder; packages that lie in a zip file."""

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import pointsman
import pointsman_lab
from pointsman._errors import RunError, needing
from pointsman_lab._files import read_json
from pointsman_lab.cli.main import describe, main
from pointsman_lab.exam import card
from tests.lab.report.fixtures import write_run


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(words: list[str]) -> int:
        raise error

    monkeypatch.setattr("pointsman_lab.cli.verify.run", run)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("libtorch_cpu.so: failed to map segment", name="_C"), "loaded: libtorch_cpu.so: failed to map"),
        (ImportError("the tokenizer needs protobuf"), "cannot be loaded: the tokenizer needs protobuf"),
        (
            ImportError("cannot import name 'moe' from 'transformers'", name="transformers"),
            "cannot import name 'moe' from 'transformers'; pip install 'pointsman[hf]' brings a version that fits",
        ),
    ],
)
def test_a_package_that_cannot_be_loaded_is_not_called_missing(
    error: ImportError, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, error)
    assert main(["verify", "x"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pointsman: an installed package cannot be loaded: ")
    assert says in line


def test_an_import_of_our_own_that_fails_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, ImportError("cannot import name 'x'", name="pointsman_lab.runs"))
    with pytest.raises(ImportError):
        main(["verify", "x"])


def test_an_optional_package_that_cannot_be_loaded_says_why() -> None:
    said = r"figures need it \(installed, but built for numpy 1\): pip install"
    with pytest.raises(RunError, match=said), needing("figures need it", "report"):
        raise ImportError("built for numpy 1")


def test_an_interrupt_before_the_command_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("pointsman_lab.cli.main.keep_freed_memory", interrupted)
    assert main(["verify", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def of_torch(told: list[str]) -> None:
    """Reached within an import of torch, which may lose an interrupt."""
    code = "import signal; signal.raise_signal(signal.SIGTERM); told.append('imported')"
    exec(code, {"__name__": "torch", "told": told})
    for _ in range(1000):
        time.sleep(0.01)


def of_numpy(told: list[str]) -> None:
    """Caught on the way; what comes after fails."""
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        told.append("caught")
    raise ImportError("cannot load module more than once per process", name="numpy")


def of_work(told: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        signal.raise_signal(signal.SIGTERM)
    told.append(type(caught.value).__name__)  # the built-in one sets Python's exit code where it leaves code of torch
    raise caught.value


@pytest.mark.parametrize(("work", "did"), [(of_torch, "imported"), (of_numpy, "caught"), (of_work, "Interrupted")])
def test_every_command_ends_with_a_line_after_a_signal(
    work: Callable[[list[str]], None],
    did: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    monkeypatch.setattr("pointsman_lab.cli.verify.run", lambda words: work(told))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["verify", "x"]) == 130
    assert capsys.readouterr().err == "interrupted by SIGTERM\n"
    assert told == [did]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(os.name != "posix", reason="a folder in use cannot be removed")
def test_a_current_folder_that_was_removed_is_told(tmp_path: Path) -> None:
    """oneMKL ended the process: "Cannot load libtorch_cpu.so"."""
    (tmp_path / "gone").mkdir()
    code = (
        "import os, sys; from pointsman_lab.cli.main import main; "
        "os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); sys.exit(main(['routers', 'smoe']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "gone")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pointsman: the current folder was removed: cd to another one\n"


def test_another_folder_is_advised_where_one_is_written_to(tmp_path: Path) -> None:
    there = tmp_path / "config.json"
    there.write_text("{}")
    assert describe(PermissionError(13, "Permission denied", str(there))) == f"no permission: {there}"
    new = tmp_path / "new"
    assert describe(PermissionError(13, "Permission denied", str(new))).endswith("; choose another folder with --out")


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A run whose folder of checkpoints may not be read."""
    run = write_run(tmp_path / "run")
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints").chmod(0)
    if os.access(run / "checkpoints", os.R_OK):
        pytest.skip("this user may read everything")
    return run


def test_what_may_not_be_read_is_called_so(closed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(closed)]) == 1
    assert f"{closed / 'checkpoints'}: no permission to read this folder\n" in capsys.readouterr().out
    (closed / "config.json").chmod(0)
    with pytest.raises(RunError, match=r"config\.json cannot be read: Permission denied$"):
        read_json(closed / "config.json")
    closed.chmod(0)
    assert main(["verify", str(closed)]) == 2
    assert capsys.readouterr().err == f"pointsman: {closed}: no permission to read this folder\n"
    closed.chmod(0o700)


def test_a_report_without_jinja2_is_refused_before_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("pointsman_lab.report.samples.collect_all", lambda *_, **__: pytest.fail("samples were made"))
    assert main(["report", str(run)]) == 2
    assert capsys.readouterr().err == "pointsman: the report page needs jinja2: pip install 'pointsman[report]'\n"


def test_a_card_without_jinja2_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    told = card.told_card(card.Card([], {}, []), tmp_path)
    assert told == "no page: the report page needs jinja2: pip install 'pointsman[report]'"
    assert (tmp_path / "exam.txt").is_file()


def test_the_page_is_made_from_a_zip_file(tmp_path: Path) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for module in (pointsman, pointsman_lab):
            root = Path(str(module.__file__)).parent
            for place in sorted(root.rglob("*")):
                if "__pycache__" not in place.parts:  # folders too, as zipapp does
                    file.write(place, place.relative_to(root.parent))
    code = "from pointsman_lab.report import forms; print(forms.__file__); print(len(forms.asset('page.js')))"
    environment = {**os.environ, "PYTHONPATH": str(packed)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(str(packed))
    assert done.returncode == 0, done.stderr
