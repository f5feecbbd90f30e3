"""The disk format: what is written comes back, torch is not needed, and a damaged end of a file loses one row."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pointsman_lab.runs
from pointsman._errors import RunError
from pointsman_lab.runs.comparison import gather, read_comparison, read_plan, write_plan
from pointsman_lab.runs.environment import differing_bits, environment
from pointsman_lab.runs.paths import finetuned_path, run_path, slug
from pointsman_lab.runs.record import MetricsFile, RunRecord, is_current, read_metrics


def test_the_disk_format_needs_no_torch() -> None:
    modules = [f"pointsman_lab.runs.{file.stem}" for file in Path(pointsman_lab.runs.__file__).parent.glob("[!_]*.py")]
    code = f"import sys\nimport {', '.join(modules)}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_metrics_come_back_by_kind_without_what_follows_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(read_metrics(path)) == []
    rows: list[dict[str, Any]] = [{"kind": kind, "step": step} for step in (1, 2, 3) for kind in ("train", "routing")]
    file = MetricsFile(path, 0)
    file.write(rows)
    file.close()
    with path.open("a") as opened:
        opened.write('[1]\n{"kind": "train"}\n{"kind": "train", "st')
    assert list(read_metrics(path)) == rows
    assert list(read_metrics(path, "routing")) == rows[1::2]
    resumed = MetricsFile(path, 2)
    assert resumed.lost == 2  # the last line is torn by a kill, which is no loss
    resumed.write([{"kind": "train", "step": 3, "loss": 1.0}])
    resumed.close()
    assert resumed.rows == [*rows[:4], {"kind": "train", "step": 3, "loss": 1.0}] == list(read_metrics(path))


@pytest.mark.parametrize("content", [None, "", "somebody else's"])
def test_metrics_that_were_removed_or_replaced_are_written_again(tmp_path: Path, content: str | None) -> None:
    file = MetricsFile(path := tmp_path / "metrics.jsonl", 0)
    file.write([{"kind": "train", "step": 1}])
    path.unlink()
    if content is not None:
        path.write_text(content)
    file.write([{"kind": "train", "step": 2}])
    file.sync()
    file.write([{"kind": "train", "step": 3}])
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_an_evaluation_says_what_it_is_of() -> None:
    results = [{"split": "test", "top_k": k, "metric": "loss", "value": 1.0} for k in (1, 2)]
    record = {"checkpoint": "step-7", "protocol": {"tokens": 5, "data": "x"}, "results": results}
    asked: dict[str, Any] = {"step": 7, "protocol": {"tokens": 5}, "split": "test", "top_k": (1, 2)}
    assert is_current(record, **asked)
    changes: list[dict[str, Any]] = [{"step": 8}, {"protocol": {"tokens": 6}}, {"split": "valid"}, {"top_k": (1,)}]
    for change in changes:
        assert not is_current(record, **{**asked, **change})
    assert not is_current(None, **asked)
    attacked = {**results[0], "attack": {"kind": "word"}}
    for found, split in (([attacked, *results, attacked, "x", {"split": "test"}], "test"), (results, "valid")):
        run = RunRecord(Path("run"), "smoe", 0, {}, evaluation={"results": found})
        assert run.results(split) == {1: results[0], 2: results[1]}


def test_an_environment_equals_itself_and_names_what_differs() -> None:
    here = environment({"linear": "plain"}, threads=2)
    assert json.loads(json.dumps(here)) == here
    assert differing_bits(here, here) == []
    assert differing_bits({**here, "threads": 3}, here) == ["threads (3 there, 2 here)"]
    assert differing_bits({**here, "ranks": 2}, here) == ["ranks (2 there, None here)"]


def test_a_comparison_directory_is_found_again(tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    with pytest.raises(RunError, match="neither a run directory"):
        read_comparison(tmp_path)
    router = "xmoe:tau0=0.07|smoe"
    write_plan(tmp_path, settings={"model": {}}, routers=["smoe", router], seeds=[0, 1], command="x y", data="abc")
    folder = run_path(tmp_path, router, 1)
    assert folder == tmp_path / "runs" / "xmoe,tau0=0.07~smoe" / "seed-1"
    assert finetuned_path(folder, "sst2", 0) == folder / "finetune" / "sst2" / "seed-0"
    assert slug("a/b c") == "a_b_c"
    for seed in (1, 2):  # 2 is no seed of the plan
        path = run_path(tmp_path, router, seed)
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"seed": seed, "model": {"router": router.split("|")}}))
    found = read_comparison(tmp_path)
    assert (found.routers, found.seeds, found.settings) == (["smoe", router], [0, 1], {"model": {}})
    assert found.command == "x y"
    assert [run.path for run in found.runs.values()] == [run.path for run in found.of(router)] == [folder]
    assert len(found.missing()) == 4
    runs = [RunRecord(Path("a"), router, 0, {"steps": steps, "data": "x"}) for router, steps in (("b", 1), ("c", 2))]
    assert gather(runs).settings == {"data": "x"}, "what all runs have in common"
    (tmp_path / "comparison.json").write_text('{"format": 2, "settings": {"model": {}}, "routers": [], "seeds": []}')
    with pytest.raises(RunError, match="not a comparison of format 1"):
        read_comparison(tmp_path)
