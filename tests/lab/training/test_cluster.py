"""Runs as tasks of a cluster: the bits of one job, a node killed in the middle, one stop, failures in one line."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman._errors import RunError, Stopped
from pointsman_lab.cli.main import main
from pointsman_lab.progress import Progress, Quiet, Stop
from pointsman_lab.report import protocol
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.training.cluster import Nodes, Ray, Slurm, _Task
from pointsman_lab.training.compare import Plan, compare, merged
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.jobs import Work, do_all


class Processes:
    """A scheduler of processes on this machine."""

    address = "127.0.0.1"

    def __init__(self, lost: int = 0) -> None:
        self.lost = lost  # tasks whose node dies before they have connected

    def start(self, title: str, call: Callable[[], None]) -> Any:
        self.lost, call = self.lost - 1, call if self.lost < 1 else partial(os._exit, 1)
        process = multiprocessing.get_context("spawn").Process(target=call, daemon=True)
        process.start()
        return process

    def fault(self, task: Any) -> str | None:
        return None if task.is_alive() else f"exit code {task.exitcode}"

    def cancel(self, task: Any) -> None:
        task.kill()
        task.join()


class Notes(Quiet):
    """Keeps the notes of all lines; calls `began` at each phase."""

    def __init__(self, began: Callable[[], object] = lambda: None) -> None:
        self.told: list[str] = []
        self.began = began

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.began()

    def note(self, message: str) -> None:
        self.told.append(message)

    def line(self) -> Notes:
        return self


def works(folder: Path) -> Work:
    def work(job: str, progress: Progress, stop: Stop | None) -> None:
        progress.phase(job, 1)
        if job == "divides":
            raise ZeroDivisionError("by nothing")
        if job == "dies" or (job == "dies once" and not (folder / "died").exists()):
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while job == "waits":
            assert stop is not None
            if stop.is_set():
                raise Stopped("stopped; the same command goes on")
            time.sleep(0.01)
        (folder / job).touch()

    return work


def run(jobs: list[str], folder: Path, lost: int = 0, **more: Any) -> list[tuple[int, str]]:
    began: list[tuple[int, str]] = []
    setup = partial(works, folder)
    titles = [f"run {job!r}" for job in jobs]
    do_all(
        jobs, titles, setup, setup, 1, ended=lambda _: None, hosts=Nodes(Processes(lost), folder),
        began=lambda *one: began.append(one), **more,
    )  # fmt: skip
    return began


@pytest.mark.slow
def test_a_task_that_is_lost_goes_on_elsewhere_and_a_fault_is_one_line(tmp_path: Path) -> None:
    notes = Notes()
    began = run(["dies once", "first"], tmp_path, progress=notes)
    assert sorted(number for number, _ in began) == [0, 0, 1]
    assert {node for _, node in began} == {socket.gethostname()}
    assert (tmp_path / "dies once").exists()
    assert [note for note in notes.told if note.startswith("run 'dies once'") and "goes on on another" in note]
    with pytest.raises(RunError, match=r"^run 'divides', on .*: ZeroDivisionError: by nothing \(traceback in .*\)$"):
        run(["waits", "divides"], tmp_path, progress=Quiet())
    assert "Traceback" in (tmp_path / ".error.txt").read_text()
    with pytest.raises(RunError, match=r"^run 'dies', on .*: lost on (.*, ){3}.*the same command goes on$"):
        run(["dies"], tmp_path, progress=Quiet())


def test_where_a_task_of_a_tuning_failed_the_comparison_may_begin(
    settings: Callable[..., RunConfig], tmp_path: Path
) -> None:
    scheduler: Any = SimpleNamespace(start=lambda *_: None)
    task = _Task(Nodes(scheduler, tmp_path), 0, "a run", lambda number: None, Quiet())
    told = str(task._told(RuntimeError("Traceback\nValueError: by nothing")))
    assert told == f"a run: ValueError: by nothing (traceback in {tmp_path}/.error.txt)"
    assert merged(plan := Plan(settings(), ("smoe",), (0,)), tmp_path) is plan


@pytest.mark.slow
def test_a_node_that_is_lost_before_its_task_has_connected(tmp_path: Path) -> None:
    notes = Notes()
    assert run(["first"], tmp_path, lost=2, progress=notes) == [(0, socket.gethostname())]
    assert [note for note in notes.told if "its node was lost" in note] == notes.told[:2]
    with pytest.raises(RunError, match=r"^run 'first': exit code 1; what is saved is kept"):
        run(["first"], tmp_path, lost=4, progress=Notes())


@pytest.mark.slow
def test_one_stop_reaches_tasks_that_run_and_those_that_wait(tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(Stopped, match="same command goes on"):
        run(["waits", "waits"], tmp_path, progress=Notes(stop.set), stop=stop)


def finished(plan: Plan, out: Path, **more: Any) -> dict[str, Any]:
    """What the runs of a comparison end with: weights and figures."""
    compare(plan, out, jobs=1, progress=Quiet() if "progress" not in more else more.pop("progress"), **more)
    weights = {str(one.relative_to(out)): one.read_bytes() for one in out.glob("runs/*/*/checkpoints/*/model.*")}
    figures = [json.loads(one.read_text())["results"] for one in sorted(out.glob("runs/*/*/evaluation.json"))]
    assert len(figures) == len(plan.routers) * len(plan.seeds)
    return {**weights, "figures": figures}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_gives_the_same_bits_also_when_a_node_is_killed(
    settings: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # the loopback address only
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    plan = Plan(settings(steps=60, checkpoint_every=10), ("smoe", "xmoe"), (0,))
    alone = finished(plan, tmp_path / "alone")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    scheduler = Ray(cluster.address, "cpu")
    out = tmp_path / "ray"

    def kill() -> None:
        deadline = time.monotonic() + 200
        while not list(out.glob("runs/*/*/checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        cluster.remove_node(nodes[0], allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        notes = Notes()
        assert finished(plan, out, hosts=Nodes(scheduler, out), progress=notes) == alone
    finally:
        killer.join()
        scheduler.close()
        cluster.shutdown()
    assert [note for note in notes.told if "was lost; it goes on on another node" in note]
    comparison = read_comparison(out)
    tried = sorted(len(set(places)) for places in comparison.nodes.values())
    assert tried in ([1, 2], [2, 2])
    shown = dict(protocol.environment(comparison))
    assert sorted(name.split("(")[0] for name in shown if name.startswith("node ")) == ["node 127.0.0.1 "] * 2
    assert any("(not to its end)" in text for name, text in shown.items() if name.startswith("node "))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit waits for none of its own
def test_slurm_s_tasks_give_the_same_bits(settings: Callable[..., RunConfig], tmp_path: Path) -> None:
    """By submitit's executor of this machine."""
    pytest.importorskip("submitit")
    plan = Plan(settings(steps=4), ("smoe", "xmoe"), (0,))
    nodes = Nodes(Slurm("", "cpu", tmp_path / "jobs", cluster="local"), tmp_path / "slurm")
    assert finished(plan, tmp_path / "slurm", hosts=nodes) == finished(plan, tmp_path / "alone")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cluster", "rya"], "--cluster 'rya': allowed are ray, ray://HOST:PORT, slurm and slurm://PARTITION"),
        (["--cluster", "ray:10"], "--cluster 'ray:10': allowed are"),
        (["--cluster", "ray://127.0.0.1:1"], "--cluster ray://127.0.0.1:1: cannot be reached as HOST:PORT: "),
        (["--cluster", "ray://head"], "--cluster ray://head: cannot be reached as HOST:PORT: "),
        (["--cluster", "ray", "--jobs", "2"], "--jobs has no effect with --cluster"),
        (["--cluster", "ray", "--processes", "2"], "--processes has no effect with --cluster"),
        (["--cluster", "ray", "--device", "mps"], "--device mps: with --cluster, allowed are cpu and cuda"),
    ],
)
def test_what_is_no_cluster_is_refused(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--routers", "smoe", "--out", str(tmp_path / "out"), *words]) == 2
    assert told in capsys.readouterr().err
