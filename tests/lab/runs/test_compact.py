"""record.jsonl: what it keeps is enough for tables and page, and it is refused when it is not whole."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab._files import SCRATCH, owner
from pointsman_lab.report.page import render
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.compact import RECORD, from_columns, packed, restore, thinned, to_columns, write_record
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.runs.paths import finetuned_runs
from tests.lab.report.fixtures import write_comparison, write_finetuning


def test_tables_and_page_come_out_the_same(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe", "xmoe+similarity:tau=0.1"), seeds=(0, 1))
    before = ComparisonTable.read(out)
    page = render(read_comparison(out))
    file = write_record(out)
    assert file == out / RECORD
    content = file.read_bytes()
    assert len(content.splitlines()) == 4
    shutil.rmtree(out / "runs")
    assert len(restore(out)) == 4
    assert restore(out) == []
    after = ComparisonTable.read(out)
    assert (after.text(), after.csv(), after.latex()) == (before.text(), before.csv(), before.latex())
    assert abs(len(render(read_comparison(out))) - len(page)) < 0.05 * len(page)
    write_record(out)
    assert file.read_bytes() == content, "what is thin already stays as it is"


def test_reading_a_comparison_restores_what_is_missing_elsewhere(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe", "xmoe"), seeds=(0,))
    write_record(out)
    shutil.rmtree(out / "runs" / "r1")
    changed = out / "runs" / "r0" / "seed-0" / "environment.json"
    changed.write_text('{"python": "4"}')
    found = read_comparison(out)
    assert found.missing() == []
    assert found.runs["smoe", 0].environment == {"python": "4"}
    assert not (out / "runs" / "r1").exists(), "a folder that is read is not written to"
    assert found.runs["xmoe", 0].path.parts[-4] == "grid", "errors name a run by its path"
    write_record(out)
    assert '"path":"runs/r1/seed-0"' in (out / RECORD).read_text(), "a run that only the record knows stays in it"


def test_copies_of_runs_in_the_folder_count_for_nothing(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0,))
    run = Path(shutil.move(out / "runs" / "r0", out / "runs" / "smoe")) / "seed-0"
    tuned = write_finetuning(run, "sst2", "smoe", 0, metric=0.9)
    write_record(out)
    record = (out / RECORD).read_bytes()
    shutil.copytree(tuned, tuned.with_name("seed-0.bak"))
    shutil.copytree(run, run.with_name("seed-0.bak"))
    shutil.copytree(run.parent, out / "runs" / "smoe-old")
    assert read_comparison(out).runs["smoe", 0].path == run
    assert [place.name for place in finetuned_runs(run)] == ["seed-0"]
    shutil.rmtree(out / "runs" / "smoe-old")
    write_record(out)
    assert (out / RECORD).read_bytes() == record, "a name that a record may not hold"


def test_a_text_may_hold_any_end_of_line(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0,))
    (out / "runs/r0/seed-0/environment.json").write_text(json.dumps({"python": "a\u2028b\u0085c\r\n"}))
    write_record(out)
    shutil.rmtree(out / "runs")
    assert read_comparison(out).runs["smoe", 0].environment == {"python": "a\u2028b\u0085c\r\n"}


def test_a_record_holds_neither_weights_nor_unfinished_runs(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0, 1))
    run = out / "runs" / "r0" / "seed-0"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "state.json").write_text("{}")
    (run / "vocabulary.json").write_text("{}")
    assert {"config.json", "environment.json", "evaluation.json", "metrics.jsonl"} <= packed(run).keys()
    assert not {"vocabulary.json", "checkpoints/step-1/state.json"} & packed(run).keys()
    (out / "runs" / "r0" / "seed-1" / "evaluation.json").unlink()
    write_record(out)
    assert [json.loads(line)["path"] for line in (out / RECORD).read_text().splitlines()] == ["runs/r0/seed-0"]
    assert write_record(tmp_path) is None


def test_metrics_are_thinned_evenly_and_once() -> None:
    rows = [{"kind": "train", "step": s, "loss": 1 / (s + 2), "step_seconds": 0.1} for s in range(1, 1001)]
    rows += [{"kind": "valid", "step": 500, "top_k": 1, "value": 1.23456789012}]
    thin = thinned(rows, 1000)
    kept = [row["step"] for row in thin if row["kind"] == "train"]
    assert len(kept) == 160
    assert kept[-1] == 1000
    assert max(b - a for a, b in pairwise(kept)) <= 7
    assert thin[0].keys() == {"kind", "step", "loss"}
    assert thin[-1] == {"kind": "valid", "step": 500, "top_k": 1, "value": 1.235}
    assert thinned(thin, 1000) == thin


def test_columns_give_the_rows_back() -> None:
    rows = [
        {"kind": kind, "step": step, "layer": layer, "load": [0.5 / step, 1]} if layer else {"kind": kind, "step": step}
        for step in range(1, 4)
        for kind, layer in (("train", ""), ("routing", "a"), ("routing", "b"))
    ]
    rows.insert(4, {"kind": "valid", "step": 2, "top_k": 1, "value": None})
    rows.insert(5, {"kind": "valid", "step": 2, "top_k": 2, "value": 1.5})
    columns = to_columns(rows)
    assert [group["same"] for group in columns] == [
        {"kind": "train"}, {"kind": "routing", "layer": "a"}, {"kind": "routing", "layer": "b"}, {"kind": "valid"},
    ]  # fmt: skip
    again = from_columns(json.loads(json.dumps(columns)))
    assert sorted(map(json.dumps, again)) == sorted(map(json.dumps, rows))
    assert [row["step"] for row in again] == sorted(row["step"] for row in rows)
    assert to_columns(again) == columns


def test_restoring_writes_through_no_link_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("kept")
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0,))
    write_record(out)
    shutil.rmtree(out / "runs")
    (out / "runs/r0").mkdir(parents=True)
    for name in (".seed-0.restoring-7", f"{SCRATCH}{owner()}"):
        (out / "runs/r0" / name).symlink_to(mine)
    assert restore(out) == [out / "runs/r0/seed-0"]
    assert (mine / "config.json").read_text() == "kept"
    assert [file.name for file in mine.iterdir()] == ["config.json"]
    shutil.rmtree(out / "runs/r0/seed-0")
    (out / "runs/r0/seed-0").symlink_to(tmp_path / "grid" / "nothing")
    with pytest.raises(RunError, match="the run of the record was not restored"):
        restore(out)
    assert len(list((out / "runs/r0").iterdir())) == 3, "no scratch folder stays"
    shutil.rmtree(out / "runs")
    (out / "runs").symlink_to(mine)
    with pytest.raises(RunError, match="a link leads out"):
        restore(out)


@pytest.mark.parametrize(
    "name",
    ["/tmp/x.json", "../x.json", "sub/config.json", "finetune/../seed-1/config.json", "finetune/a/seed-x/config.json",
     "a\\config.json", "c:config.json", ".bashrc", "x.json", "explorer.json", "vocabulary.json", "",
     "checkpoints/step-1/state.json", "finetune/a\x00b/seed-1/config.json"],
)  # fmt: skip
def test_a_record_names_only_files_that_it_holds(tmp_path: Path, name: str) -> None:
    entry = {"format": 1, "path": "runs/a/seed-0", "files": {"config.json": {}, "evaluation.json": {}, name: {}}}
    (tmp_path / RECORD).write_text(json.dumps(entry))
    with pytest.raises(RunError, match=r"record\.jsonl, line 1: .*damaged"):
        restore(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [RECORD]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"format": 1, "path": "runs/a/seed-0", "files": {"config.json": 1, "evaluation.json": {}}}',
        '{"format": 1, "path": "runs/./seed-0", "files": {"config.json": {}, "evaluation.json": {}}}',
        '{"format": 1, "path": "runs/a/seed-0/", "files": {"config.json": {}, "evaluation.json": {}}}',
        '{"format": 1, "path": "runs/a/other", "files": {"config.json": {}, "evaluation.json": {}}}',
        '{"format": 3, "path": "runs/a/seed-0", "files": {"config.json": {}, "evaluation.json": {}}}',
        '{"format": 2, "path": "runs/a/seed-0", "files": {"config.json": {}, "evaluation.json": {}, '
        '"metrics.jsonl": [{"fields": ["kind", "step", "loss"], "same": {}, "each": {"step": [1, 2], "loss": [1]}}]}}',
        '{"format": 1, "path": "runs/../seed-0", "files": {"config.json": {}, "evaluation.json": {}}}',
        '{"format": 1, "path": "runs/a/seed-0", "files": {"config.json": {}, "evaluation.json": {}, "../x": {}}}',
        '{"format": 1, "path": "runs/a/seed-0", "files": {"config.json": {}}}',
    ],
)
def test_a_damaged_record_is_refused_by_line(tmp_path: Path, line: str) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0,))
    write_record(out)
    with (out / RECORD).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RunError, match=r"record\.jsonl, line 2: .*damaged"):
        restore(out)
