"""Files of runs that somebody else made: small ones that ask for much, damaged ones, and what a terminal would obey."""

import base64
import hashlib
import json
import os
import re
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman._errors import RunError
from pointsman_lab._grid import Grid
from pointsman_lab._values import finite, printable
from pointsman_lab.cli.main import main
from pointsman_lab.data.subwords import Subwords
from pointsman_lab.report.cell import squared_variation
from pointsman_lab.report.inside import readable
from pointsman_lab.report.page import write_report
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.report.task_table import TaskTable, consistency
from pointsman_lab.runs.checkpoints import CheckpointError
from pointsman_lab.runs.compact import RECORD, restore, write_record
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.runs.record import read_metrics
from pointsman_lab.tasks.images.layouts import open_layout
from pointsman_lab.training.run import load_run
from tests.lab.report.fixtures import write_comparison, write_finetuning, write_run

posix = pytest.mark.skipif(os.name != "posix", reason="pipes of a POSIX system")


def changed(file: Path, change: Callable[[Any], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_a_record_that_becomes_many_times_as_large_is_refused(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0,))
    entry = json.loads((write_record(out) or out).read_text())
    steps, text = list(range(20_000)), "x" * 20_000
    group = {"fields": ["step", "kind", "text"], "same": {"kind": "a", "text": text}, "each": {"step": steps}}
    entry["path"], entry["files"]["metrics.jsonl"] = "runs/other/seed-0", [group]
    (out / RECORD).write_text(json.dumps(entry) + "\n")
    tracemalloc.start()
    try:
        with pytest.raises(RunError, match=r"record\.jsonl, line 1: .*times as large"):
            restore(out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert not (out / "runs" / "other").exists()


@pytest.mark.parametrize(
    ("name", "lists"), [("comparison.json", ("routers", "seeds")), ("exam.json", ("rows", "tasks"))]
)
def test_rows_times_columns_are_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, lists: tuple[str, str]
) -> None:
    rest = {"format": 1, "settings": {"model": {}}, "version": 1, "seeds": 1}
    many = {"routers": ["r"], "seeds": [0], "rows": ["r"], "tasks": ["clusters"]}
    told = {**rest, **{key: many[key] * 3000 for key in lists}}
    (tmp_path / name).write_text(json.dumps(told))
    for words in (["verify"], ["share", "--out", str(tmp_path / "x")], ["report", "--map", "none"]):
        assert main([*words, str(tmp_path)]) == (1 if words == ["verify"] else 2)
        said = capsys.readouterr()
        if words[0] != "report" or name == "comparison.json":  # of an exam there is no page
            assert f"{name}: {lists[0]} times {lists[1]} is 9,000,000; at most 65,536 are read" in said.out + said.err


def test_rows_times_ks_are_bounded(tmp_path: Path) -> None:
    rows = [f"r{row}" for row in range(300)]
    plan = {"format": 1, "settings": {"model": {}}, "routers": rows, "seeds": [0]}
    (tmp_path / "comparison.json").write_text(json.dumps(plan))
    lines = []
    for k, row in enumerate(rows, 1):
        result = {"top_k": k, "split": "test", "metric": "bits_per_character", "value": 1.0}
        files = {"config.json": {"model": {"router": row}, "seed": 0}, "evaluation.json": {"results": [result]}}
        lines.append(json.dumps({"format": 2, "path": f"runs/{row}/seed-0", "files": files}) + "\n")
    (tmp_path / RECORD).write_text("".join(lines))
    with pytest.raises(RunError, match=r"rows times k is 90,000; at most 65,536 are shown"):
        write_report(tmp_path)


def test_nested_values_of_a_record_take_no_indentation(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0,))
    entry = json.loads((write_record(out) or out).read_text())
    deep: Any = [0] * 5000
    for _ in range(20):
        deep = [deep]
    entry["path"], entry["files"]["environment.json"] = "runs/other/seed-0", {"packages": {}, "more": deep}
    size = (out / RECORD).write_text(json.dumps(entry) + "\n")
    (made,) = restore(out)
    assert sum(file.stat().st_size for file in made.rglob("*.json")) < 2 * size


def test_packed_routing_is_unpacked_no_further_than_its_tokens_say() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(1 << 27), 9)).decode()
    sample = {
        "format": 3, "tokens": ["a"], "top_k": [1], "num_experts": 2, "layers": ["x"], "usage": {}, "routing": bomb,
        "map": {"method": "pca", "top_k": 1, "tokens": ["a"], "layers": {}, "first": {}},
    }  # fmt: skip
    tracemalloc.start()
    try:
        assert readable({**sample, "routing": base64.b64encode(zlib.compress(bytes(4))).decode()})
        assert not readable(sample)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
        assert not readable({**sample, "num_experts": 2**40, "tokens": ["a"] * 1000})
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("setting", ["dim", "num_experts", "num_layers", "vocab_size"])
def test_the_sizes_of_a_model_are_compared_with_its_weights_first(trained: Path, tmp_path: Path, setting: str) -> None:
    run = copied(trained / "runs" / "smoe" / "seed-0", tmp_path / "run")
    large = {"dim": 2**20, "num_experts": 2**16, "num_layers": 2**14, "vocab_size": 2**30}
    changed(run / "config.json", lambda config: config["model"].__setitem__(setting, large[setting]))
    with pytest.raises(CheckpointError, match=r"step-6 is foreign"):
        load_run(run)


def test_labels_and_ids_are_bounded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 4, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.array([0, 10**10]))
    with pytest.raises(RunError, match=r"x\.npy: the label 10,000,000,000"):
        open_layout(tmp_path / "x.npy")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 2**32 - 1}, "unk_token": "a"}
    with pytest.raises(RunError, match="the id 4,294,967,295"):
        Subwords(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def test_attacks_of_a_strangers_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    row = {"top_k": 1, "metric": "bits_per_character", "value": 1.0, "attack": {"rate": 0.1, "seed": 0, "word": "AAA"}}
    file = run / "attacks-word-x-test.json"
    file.write_text(json.dumps({"results": [row]}))
    assert 'id="attack-word-x-test"' in write_report(run).read_text()
    for attack in ({"rate": 0.1}, {**row["attack"], "word": 3}, {**row["attack"], "rate": 7}):
        file.write_text(json.dumps({"results": [{**row, "attack": attack}]}))
        with pytest.raises(RunError, match="attack"):
            write_report(run)
    file.write_text(json.dumps({"results": [row], "routing": [{"attack": row["attack"], "layers": [1]}]}))
    with pytest.raises(RunError, match="layers"):
        write_report(run)


def test_the_page_runs_its_own_scripts_only(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run")).read_text()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    policy = re.search(r"script-src ([^;\"]*)", page)
    assert policy
    assert policy[1].split() == [f"'sha256-{one}'" for one in hashes]


@posix
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(RunError, match=r"x\.npy: no ordinary file"):
        open_layout(tmp_path / "x.npy")


def test_lines_hold_nothing_that_a_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", router="smoe\x1b]0;owned\x07\x9b31m")
    assert main(["report", str(tmp_path / "\x1b[31mno")]) == 2
    assert main(["report", str(run), "--map", "none", "--out", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    text = Grid(["router", "k"], [["smoe\x1b[2J\x07\x9b", "1"]]).text()
    assert not set("\x1b\x07\x9b") & set(text)
    assert "smoe" in text
    assert printable("a\u202e\u2066b\u2069\u2028\n\tc") == "a\ufffd\ufffdb\ufffd\ufffd\n\tc"


def test_cells_of_a_csv_file_begin_no_formula() -> None:
    grid = Grid(["router", "k"], [["=HYPERLINK(1)", "-0.5"], ["+x", -1.5], ["@y", None], ["-z", "\tq"], ["-", "+1.0"],
                                   ["-1+cmd|'/C calc'!A0", "-0.1 ± 0.2 (0.1)"], ["+1e-05", "-3"]])  # fmt: skip
    lines = grid.csv().splitlines()[1:]
    assert lines == ["'=HYPERLINK(1),-0.5", "'+x,-1.5", "'@y,-", "'-z,'\tq", "-,+1.0",
                     "'-1+cmd|'/C calc'!A0,-0.1 ± 0.2 (0.1)", "+1e-05,-3"]  # fmt: skip


def test_a_cost_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    changed(run / "evaluation.json", lambda values: values.__setitem__("cost", {"flops": 2_000_000, "active": 5}))
    assert "MFLOP" not in ComparisonTable.read(run).text()
    changed(run / "evaluation.json", lambda values: values["cost"].__setitem__("total", 7))
    assert "MFLOP" in ComparisonTable.read(run).text()


def test_figures_that_no_run_has_stop_no_page(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "grid", ("smoe",), seeds=(0, 1), steps=20)
    for seed in (0, 1):
        run = out / "runs" / "r0" / f"seed-{seed}"
        changed(run / "evaluation.json", lambda values: values["results"][0].update(value=1.7e308))
        tuned = write_finetuning(run, "sst2", "smoe", seed, metric=0.7)
        changed(
            tuned / "evaluation.json", lambda values: (values.pop("protocol"), values["results"][0].update(top_k=2))
        )
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [{**row, "load": []} if row["kind"] == "routing" else row for row in map(json.loads, lines)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    page = write_report(out).read_text()
    assert "the protocol is not recorded" in page
    changed(run / "evaluation.json", lambda values: values["results"][0]["routers"]["blocks.0.moe"].pop("load"))
    assert TaskTable.of(read_comparison(out), "sst2").note == "the protocol is not recorded"
    changed(tuned / "evaluation.json", lambda values: values["results"][0]["routers"]["blocks.0.moe"].pop("load"))
    assert consistency([(tuned, json.loads((tuned / "evaluation.json").read_text()))]) is None
    assert [finite(value) for value in (1e151, -(10**400), float("nan"), 2, True)] == [None, None, None, 2.0, None]
    assert squared_variation({"load": [1e-200, float("nan")]}) is None


def test_rows_of_metrics_have_types(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows: list[Any] = [
        {"kind": "routing", "step": 1, "layer": {"a": 1}}, {"kind": ["x"], "step": 1}, {"kind": "train", "step": True},
        {"kind": "routing", "step": 2, "layer": "x"}, {"kind": "train", "step": "3"}, {"kind": "train", "step": -1},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["step"] for row in read_metrics(file)] == [2]


def copied(folder: Path, target: Path) -> Path:

    return Path(shutil.copytree(folder, target))
