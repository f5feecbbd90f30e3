"""A comparison's directory, as versions before this one left it, and as other processes change it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman._errors import RunError, Stopped
from pointsman_lab.progress import Quiet
from pointsman_lab.runs.comparison import required_plan, write_plan
from pointsman_lab.runs.paths import COMPARISON, CONFIG, run_path
from pointsman_lab.training.compare import Plan, compare, merged
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.task import Task, pretraining_task


def test_a_comparison_of_an_earlier_version_goes_on(settings: Callable[..., RunConfig], tmp_path: Path) -> None:
    plan = Plan(settings(), ("smoe",), (0, 1))
    write_plan(tmp_path, settings=plan.settings(), routers=plan.routers, seeds=plan.seeds, command="", data="0")
    values = json.loads((tmp_path / COMPARISON).read_text())
    assert "top_k" not in values["settings"]["model"]
    values["settings"]["model"]["top_k"] = 2  # was a setting of its own
    del values["settings"]["model"]["pre_norm"]  # did not exist
    (tmp_path / COMPARISON).write_text(json.dumps(values))
    more = Plan(settings(), ("smoe", "xmoe"), (0,))
    assert merged(more, tmp_path).routers == ("smoe", "xmoe")
    with pytest.raises(RunError, match="learning_rate is"):
        merged(Plan(settings(learning_rate=1.0), ("smoe",), (0,)), tmp_path)
    values["settings"]["model"]["rooms"] = 3
    (tmp_path / COMPARISON).write_text(json.dumps(values))
    with pytest.raises(RunError, match=r"model\.rooms: did you mean"):
        merged(more, tmp_path)


def test_rows_that_another_process_adds_meanwhile_stay(
    settings: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While this one reads the data, which may take minutes."""
    plan, stop = Plan(settings(), ("smoe",), (0,)), threading.Event()
    stop.set()

    def another_adds(config: RunConfig, *arguments: Any) -> Task:
        task = pretraining_task(config, *arguments)
        write_plan(tmp_path, settings=plan.settings(), routers=("xmoe",), seeds=(1,), command="", data=task.fingerprint)
        return task

    monkeypatch.setattr("pointsman_lab.training.compare.pretraining_task", another_adds)
    with pytest.raises(Stopped):
        compare(plan, tmp_path, progress=Quiet(), stop=stop)
    assert required_plan(tmp_path)["routers"] == ["xmoe", "smoe"]
    assert required_plan(tmp_path)["seeds"] == [0, 1]


def test_the_command_of_a_tuned_comparison_names_the_rows_as_asked(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    told = "pointsman compare --routers smoe --tune router_lr_scale=1,4"
    plan = Plan(settings(), ("smoe:lr_scale=4", "dense"), (0,), told, {"smoe:lr_scale=4": {"row": "smoe"}})
    write_plan(
        tmp_path, settings=plan.settings(), routers=plan.routers, seeds=plan.seeds, command=told, data="0",
        tuned=plan.tuned,
    )  # fmt: skip
    assert merged(plan, tmp_path).command == "pointsman compare --routers smoe,dense --tune router_lr_scale=1,4"
    more = Plan(settings(), ("xmoe",), (0,), "pointsman compare --routers xmoe")
    tuning = "pointsman compare --routers smoe --tune router_lr_scale=1,4"
    both = f"{tuning}\npointsman compare --routers dense,xmoe"
    assert merged(more, tmp_path).command == both
    values = json.loads((tmp_path / COMPARISON).read_text())
    (tmp_path / COMPARISON).write_text(json.dumps({**values, "routers": ["smoe:lr_scale=4"]}))
    again = Plan(settings(), ("smoe:lr_scale=4",), (0, 1), "pointsman compare --routers smoe:lr_scale=4 --seeds 2")
    assert merged(again, tmp_path).command == f"{tuning} --seeds 2"


def test_the_command_of_a_comparison_that_grew_imports_what_its_rows_need(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    told = "pointsman compare --import 'my files/mine.py' --import=other.py --routers smoe"
    plan = Plan(settings(), ("smoe",), (0,), told)
    write_plan(tmp_path, settings=plan.settings(), routers=plan.routers, seeds=plan.seeds, command=told, data="0")
    more = Plan(settings(), ("xmoe",), (0,), "pointsman compare --routers xmoe --import other.py")
    whole = "pointsman compare --routers smoe,xmoe --import other.py --import 'my files/mine.py'"
    assert merged(more, tmp_path).command == whole


def test_seeds_of_one_row_are_evaluated_at_the_same_k(settings: Callable[..., RunConfig], tmp_path: Path) -> None:
    """A cell is the mean over all seeds of its row."""
    plan = Plan(settings(eval_top_k=(1, 2)), ("smoe", "xmoe", "dense"), (0, 1))
    write_plan(tmp_path, settings=plan.settings(), routers=plan.routers, seeds=plan.seeds, command="", data="0")
    for router, seed in (("smoe", 0), ("smoe", 1), ("xmoe", 0), ("dense", 1)):
        run = run_path(tmp_path, router, seed)
        run.mkdir(parents=True)
        (run / CONFIG).write_text(json.dumps(plan.config(router, seed).to_dict()))
    other = settings(eval_top_k=(1,))
    with pytest.raises(RunError, match=r"eval_top_k is \[1, 2\] there, \[1\] here; .* \(smoe, seed 1\)"):
        merged(Plan(other, ("smoe", "xmoe"), (0,)), tmp_path)
    assert merged(Plan(other, ("smoe",), (0, 1)), tmp_path).base == other
    assert merged(Plan(other, ("xmoe", "switch", "dense"), (0,)), tmp_path).base == other, "rows may differ"


def test_a_finished_run_without_its_settings_is_told(settings: Callable[..., RunConfig], tmp_path: Path) -> None:
    """No table could have its row."""
    plan = Plan(settings(steps=1, eval_tokens=50, eval_top_k=(1,)), ("smoe",), (0,))
    compare(plan, tmp_path, progress=Quiet())
    (run_path(tmp_path, "smoe", 0) / CONFIG).unlink()
    with pytest.raises(
        RunError, match=r"seed-0 has checkpoints but no config\.json.*; choose .* or move this folder away"
    ):
        compare(plan, tmp_path, progress=Quiet())
