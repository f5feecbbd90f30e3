"""`pointsman share` and `pointsman open`: what goes along, what is moved, and what a stranger's file may not do."""

import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from pointsman_lab._files import write_whole
from pointsman_lab.cli.main import main
from pointsman_lab.runs.comparison import read
from pointsman_lab.runs.imports import remember
from tests.lab.report.fixtures import dump, write_comparison, write_finetuning, write_run

SOURCE = "print('run by nobody')\nraise SystemExit('unasked')\n"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sender").mkdir()
    (tmp_path / "receiver").mkdir()
    monkeypatch.chdir(tmp_path / "sender")


def change(file: Path, **values: Any) -> None:
    dump(file, json.loads(file.read_text()) | values)


def test_a_comparison_arrives_whole_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_comparison(Path("mine"), ["smoe", "xmoe@loss-free+similarity:tau=0.1"], [0, 1])
    assert main(["share", "mine"]) == 0
    before = read(Path("mine"))
    Path("mine.pointsman").rename(tmp_path / "receiver" / "mine.pointsman")
    monkeypatch.chdir(tmp_path / "receiver")
    capsys.readouterr()
    assert main(["open", "mine.pointsman"]) == 0
    assert "xmoe@loss-free+similarity" in capsys.readouterr().out
    after = read(Path("mine"))
    assert after.routers == before.routers
    assert {key: run.results() for key, run in after.runs.items()} == {
        key: run.results() for key, run in before.runs.items()
    }
    papers = Path("mine/papers.bib").read_text()
    assert {"1701.06538", "2204.09179", "2408.15664"} <= set(papers.replace("{", " ").replace("}", " ").split())
    assert Path("mine/report.html").is_file()
    assert Path("mine/table.tex").is_file()
    assert main(["open", "mine.pointsman"]) == 2
    assert "it exists and is not empty" in capsys.readouterr().err


def test_tables_of_tasks_and_shifts_are_made_again() -> None:
    runs = write_comparison(Path("mine"), ["smoe", "xmoe"], [0]) / "runs"
    shifted = {"kind": "fgsm", "results": [{"top_k": 1, "clean": 0.5, "attacked": 0.25}], "protocol": {"top_k": [1]}}
    for run, router in ((runs / "r0/seed-0", "smoe"), (runs / "r1/seed-0", "xmoe")):
        dump(run / "robust-fgsm.json", shifted)
        write_finetuning(run, "sst2", router, 0, metric=0.75)
    assert main(["share", "mine"]) == 0
    assert main(["open", "mine.pointsman", "--out", "theirs"]) == 0
    assert "25.00" in Path("theirs/robust-fgsm.txt").read_text()
    assert "75.00" in Path("theirs/task-sst2.txt").read_text()


def test_an_opening_that_was_killed_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    write_comparison(Path("mine"), ["smoe", "xmoe"], [0])
    assert main(["share", "mine", "--out", "a.pointsman"]) == 0
    assert main(["open", "a.pointsman", "--out", "whole"]) == 0
    wanted = {file.name: file.read_text() for file in Path("whole").iterdir() if file.suffix in (".json", ".jsonl")}
    for number, kept in enumerate([(), ("papers.bib",), ("papers.bib", "record.jsonl"), tuple(wanted)]):
        out = Path(f"killed-{number}")
        out.mkdir()
        (out / ".papers.bib.writing-1-").touch()  # before the first has its name
        for name in kept:
            shutil.copy(Path("whole", name), out)
        assert main(["open", "a.pointsman", "--out", str(out)]) == 0
        assert {name: (out / name).read_text() for name in wanted} == wanted
        assert (out / "report.html").is_file()
    for name, text in (("papers.bib", "other"), ("notes.txt", "mine")):
        (out := Path(f"other-{name}")).mkdir()
        (out / name).write_text(text)
        assert main(["open", "a.pointsman", "--out", str(out)]) == 2
        assert (out / name).read_text() == text
    assert "it exists and is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("enwik8:newlines=drop", "docs/data.md says where enwik8:newlines=drop comes from"),
        ("xtreme-text:languages=de+en", "docs/data.md says where xtreme-text:languages=de+en comes from"),
        ("texts/mine", "name yours with --data"),
        ("multilingual:mine", "name yours with --data"),
    ],
)
def test_the_docs_are_named_for_public_data_alone(capsys: pytest.CaptureFixture[str], data: str, told: str) -> None:
    change(write_run(Path("run")) / "config.json", data=data)
    assert main(["share", "run"]) == 0
    assert main(["open", "run.pointsman", "--out", "theirs"]) == 0
    assert f"they are not in the file: {told}\n" in capsys.readouterr().out


def test_source_and_data_of_the_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(SOURCE + "# \x1b[31mred\n")
    Path("mytext.txt").write_text("a few words\n" * 9)
    run = write_run(Path("run"))
    here = str(Path("mine.py").resolve())
    remember(here)
    change(run / "config.json", imports=[here, "a.module"], data=str(Path("mytext.txt").resolve()) + ":level=word")
    change(run / "evaluation.json", protocol={"data": f"{Path('mytext.txt').resolve()}: bytes, V 11"})
    write_whole(run / "checkpoints" / "step-2" / "state.json", '{"data": "0123abcd"}')
    (run / "vocabulary.json").write_text("{}")
    (run / "explorer.json").write_text("{}")
    assert main(["share", "run", "--out", str(tmp_path / "receiver" / "a.pointsman")]) == 0
    monkeypatch.chdir(tmp_path / "receiver")
    capsys.readouterr()
    before = set(sys.modules)
    assert main(["open", "a.pointsman", "--out", "theirs"]) == 0
    said = capsys.readouterr().out
    assert "raise SystemExit" in said
    assert "\x1b" not in said
    assert f"\n   1 | {SOURCE.splitlines()[0]}\n" in said, "a line of a stranger is none of ours"
    assert "data: mytext.txt: bytes, V 11, 108 bytes, sha256" in said
    assert "fingerprint 0123abcd" in said
    assert "name yours with --data" in said
    assert "'a.module'" in said
    assert not [name for name in {*sys.modules} - before if name.startswith("pointsman_import_")]
    assert Path("theirs/sources/mine.py").read_text() == SOURCE + "# \x1b[31mred\n"
    config = json.loads(Path("theirs/config.json").read_text())
    assert config["imports"][0] == str(Path("theirs/sources/mine.py").resolve())
    assert config["data"] == "mytext.txt:level=word"
    assert str(tmp_path / "sender") not in "".join(file.read_text() for file in Path("theirs").glob("*.json"))
    assert not Path("theirs/vocabulary.json").exists()
    assert not Path("theirs/explorer.json").exists()


@pytest.mark.parametrize("words", [["share", "theirs"], ["submit", "theirs", "--router", "smoe"]])
def test_a_strangers_folder_hands_on_no_file_of_mine(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(f"PASSWORD = 'abc'\n{SOURCE}")
    write_comparison(Path("theirs"), ["smoe"], [0])
    before = {file: file.read_bytes() for file in Path("theirs").rglob("*") if file.is_file()}
    out = ["--out", "packed"]
    assert main(["share", "theirs", *out]) == 0
    plan = Path("theirs/comparison.json")
    settings = json.loads(plan.read_text())["settings"]
    assert before == {file: file.read_bytes() for file in Path("theirs").rglob("*") if file.is_file()}
    change(plan, settings={**settings, "imports": [str(Path("mine.py").resolve())]})
    Path("packed").unlink()
    capsys.readouterr()
    assert main([*words, *out]) == 2
    assert "mine.py is missing, has changed or was never imported here" in capsys.readouterr().err
    assert not Path("packed").exists()


@pytest.mark.parametrize("strange", [{"imports": 3}, {"imports": [["x"]]}, {"model": {"family": ["x"]}}])
def test_a_strangers_settings_end_in_no_traceback(strange: dict[str, Any]) -> None:
    write_comparison(Path("theirs"), ["smoe"], [0])
    settings = json.loads(Path("theirs/comparison.json").read_text())["settings"]
    change(Path("theirs/comparison.json"), settings=settings | strange)
    if "imports" in strange:
        change(Path("theirs/runs/r0/seed-0/config.json"), **strange)
    refused = 2 if "model" in strange else 0
    assert main(["share", "theirs"]) == refused
    assert main(["submit", "theirs", "--router", "smoe"]) == refused
    assert main(["report", "theirs", "--map", "none"]) == 0


def test_an_exam_arrives_with_the_cells_that_the_record_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pointsman_lab.exam.exam import VERSION, collect, plan_in, record

    Path("mine.py").write_text(SOURCE)
    remember("mine.py")
    task, row = next((task, row) for task, row in record() if row not in ("oracle", "plain"))
    own = {"row": "mine", "tried": [], "runs": {"0": {"value": 0.5, "curve": []}}}
    rows = ["oracle", "plain", row, "mine"]
    plan = {"version": VERSION, "rows": rows, "tasks": [task], "seeds": 1, "imports": [str(Path("mine.py").resolve())]}
    Path(f"exam/cells/{task}").mkdir(parents=True)
    dump(Path("exam/exam.json"), plan)
    dump(Path(f"exam/cells/{task}/exam-mine.json"), own)
    before = collect(plan_in(Path("exam")), Path("exam"))
    assert set(before) == {(task, one) for one in rows}
    assert main(["share", "exam", "--out", str(tmp_path / "receiver" / "exam.pointsman")]) == 0
    monkeypatch.chdir(tmp_path / "receiver")
    monkeypatch.setattr("pointsman_lab.exam.exam.record", dict)  # a version whose record lacks them
    capsys.readouterr()
    assert main(["open", "exam.pointsman"]) == 0
    said = capsys.readouterr().out
    assert "raise SystemExit" in said
    assert task in said
    assert "docs/data.md" not in said
    assert collect(plan_in(Path("exam")), Path("exam")) == before
    assert Path("exam/report.html").is_file()
    told = json.loads(zlib.decompress(Path("exam.pointsman").read_bytes()))
    for record_of, says in (
        ({"plan": plan, "cells": {"../exam-x.json": own}}, "a cell called"),
        ({"plan": plan, "cells": {f"cells/{task}/exam-a.json": {"row": 3}}}, "cells"),
        ({"cells": {}}, "plan"),
    ):
        bad = told | {"record": json.dumps(record_of)}
        Path("bad.pointsman").write_bytes(zlib.compress(json.dumps(bad).encode()))
        assert main(["open", "bad.pointsman"]) == 2
        assert says in capsys.readouterr().err
        assert not Path("bad").exists()


def test_missing_data_are_no_nearest_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "mytext.txt", "--out", "t"]) == 2
    said = capsys.readouterr().err
    assert "no file or folder 'mytext.txt'" in said
    assert "text8" not in said


def test_nothing_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    write_run(Path("begun"))
    Path("begun/evaluation.json").unlink()
    for folder in ("empty", "begun", "none"):
        assert main(["share", folder]) == 2
        assert not Path(f"{folder}.pointsman").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["share", "mine"], ["submit", "mine", "--router", "smoe"]])
def test_only_an_earlier_file_of_the_command_is_replaced(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_lab.training.compare.check_runs", lambda folder: None)
    write_comparison(Path("mine"), ["smoe", "xmoe"], [0])
    for content in ("my own", '{"my": "own"}'):
        Path("notes.json").write_text(content)
        assert main([*words, "--out", "notes.json"]) == 2
        assert "notes.json: it exists and is no" in capsys.readouterr().err
        assert Path("notes.json").read_text() == content
    assert main([*words, "--out", "new"]) == 0
    assert main([*words, "--out", "new"]) == 0


def test_what_open_would_refuse_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_comparison(Path("mine"), ["smoe"], [0], steps=4)
    for name in ("runs.sharing.MOST_OTHERS", "runs.sharing.MOST_LINE"):
        with monkeypatch.context() as patch:
            patch.setattr(f"pointsman_lab.{name}", 1000, raising=False)
            assert main(["share", "mine"]) == 2
        assert "mine: too large for one file (" in capsys.readouterr().err
    assert main(["share", "mine"]) == 0
    text = zlib.decompress(Path("mine.pointsman").read_bytes())
    Path("mine.pointsman").unlink()
    monkeypatch.setattr("pointsman._files.MOST_VALUES", sum(map(text.count, (b",", b"[", b"{"))) - 1)
    assert main(["share", "mine"]) == 2
    assert " values); share single runs" in capsys.readouterr().err
    assert not Path("mine.pointsman").exists()


def test_a_file_is_opened_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full.pointsman").write_bytes(packed())
    real = write_whole

    def full(file: Path, text: str) -> Path:
        if file.name == "evaluation.json":
            raise OSError(28, "No space left on device")
        return real(file, text)

    monkeypatch.setattr("pointsman_lab.runs.sharing.write_whole", full)
    assert main(["open", "full.pointsman"]) != 0
    assert "no space left" in capsys.readouterr().err
    assert not Path("full").exists()


@pytest.mark.parametrize("begun", [None, [], [".kept"]])
def test_what_is_refused_late_leaves_nothing(begun: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that calls itself a comparison is refused when its tables are made; what was there before stays."""
    told = json.loads(zlib.decompress(packed()))
    entry = json.loads(told["record"])
    entry["files"]["comparison.json"] = {"settings": {"model": {}}, "routers": ["smoe"], "seeds": [0]}
    Path("bad.pointsman").write_bytes(zlib.compress(json.dumps(told | {"record": json.dumps(entry) + "\n"}).encode()))
    if begun is not None:
        Path("bad").mkdir()
        for name in begun:
            Path("bad", name).touch()
    assert main(["open", "bad.pointsman"]) == 2
    assert "comparison" in capsys.readouterr().err.splitlines()[-1]
    assert Path("bad").exists() == (begun is not None)
    assert begun is None or any(Path("bad").iterdir()) == bool(begun)


def packed(**changes: Any) -> bytes:
    write_run(Path("good"))
    assert main(["share", "good"]) == 0
    told = json.loads(zlib.decompress(Path("good.pointsman").read_bytes()))
    return zlib.compress(json.dumps(told | changes).encode())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sources": {"../evil.py": "x"}}, "only names of Python files"),
        ({"sources": {"a/b.py": "x"}}, "only names of Python files"),
        ({"sources": {"CON.sh": "x"}}, "only names of Python files"),
        ({"record": '{"format": 2, "path": "../x/seed-0", "files": {}}\n'}, "no run of a record"),
        ({"record": ""}, "0 runs"),
        ({"version": 2}, "of version 1"),
        ({"data": 3}, "data"),
        ({"modules": [3]}, "modules"),
    ],
)
def test_strangers_files(changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.pointsman").write_bytes(packed(**changes))
    assert main(["open", "bad.pointsman"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert says in said[0]
    assert said[0].startswith("pointsman: bad.pointsman")
    assert not Path("bad").exists()
    assert sorted(file.name for file in Path().iterdir()) == ["bad.pointsman", "good", "good.pointsman"]


def test_a_bomb_and_noise(capsys: pytest.CaptureFixture[str]) -> None:
    for content, says in [
        (zlib.compress(bytes(2**27)), "when unpacked"),
        (b"noise", "not a file of `pointsman share`"),
        (packed()[:200], "not a file of `pointsman share`"),
    ]:
        Path("bad.pointsman").write_bytes(content)
        assert main(["open", "bad.pointsman"]) == 2
        assert says in capsys.readouterr().err


def test_the_data_of_several_files(tmp_path: Path) -> None:
    from hashlib import sha256

    from pointsman_lab.runs.sharing import _data

    for name in ("en.txt", "de.txt"):
        (tmp_path / name).write_text(name)
    told, places = _data(f"{tmp_path}/en.txt,wikitext-2,{tmp_path}/de.txt", {})
    assert told["name"] == "en.txt,wikitext-2,de.txt"
    assert told["bytes"] == 12
    assert told["sha256"] == ", ".join(sha256(name.encode()).hexdigest() for name in ("en.txt", "de.txt"))
    assert places == [f"{tmp_path}/en.txt", f"{tmp_path}/de.txt"]


@pytest.mark.parametrize("kind", ["", "multilingual:"])
def test_no_path_of_the_sender_stays(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "Jürgen"
    (home / "texts").mkdir(parents=True)
    source = home / "mine.py"
    source.write_text(SOURCE)
    remember(str(source))
    run = write_run(home / "run")
    change(run / "config.json", imports=[str(source)], data=f"{kind}{home}/texts")
    change(run / "evaluation.json", protocol={"data": f"{home}/texts: bytes"})
    assert main(["share", str(run), "--out", "a.pointsman"]) == 0
    told = json.loads(zlib.decompress(Path("a.pointsman").read_bytes()))
    assert told["data"] == {"name": f"{kind}texts", "about": "texts: bytes"}
    assert "rgen" not in told["record"]
    assert main(["open", "a.pointsman", "--out", "theirs"]) == 0
    config = json.loads(Path("theirs/config.json").read_text())
    assert config["imports"] == [str(Path("theirs/sources/mine.py").resolve())]
    assert config["data"] == f"{kind}texts"


def test_a_small_file_does_not_become_a_large_folder(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(zlib.decompress(packed()))
    entry = json.loads(told["record"])
    entry["files"]["config.json"]["note"] = "@shared@" * 400_000
    for changes in ({"record": json.dumps(entry) + "\n"}, {"sources": {"a.py": "#" * 5_000_000}}):
        Path("bad.pointsman").write_bytes(zlib.compress(json.dumps(told | changes).encode(), 9))
        assert main(["open", "bad.pointsman"]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert "bad.pointsman" in said[0]
        assert "damaged" in said[0]
        assert not Path("bad").exists()


def test_tables_of_a_strangers_comparison_compute_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_comparison(Path("theirs"), ["=HYPERLINK(1)"], [0])
    evaluation = Path("theirs/runs/r0/seed-0/evaluation.json")
    results = json.loads(evaluation.read_text())["results"]
    change(evaluation, results=[{**one, "split": "@x\x1b[2J"} for one in results])
    assert main(["share", "theirs"]) == 0
    assert main(["open", "theirs.pointsman", "--out", "here"]) == 0
    rows = Path("here/results.csv").read_text().splitlines()[1:]
    assert rows
    assert all(row.startswith("'=HYPERLINK(1),0,") and ",'@x\N{REPLACEMENT CHARACTER}[2J," in row for row in rows)
