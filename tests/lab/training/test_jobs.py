"""Jobs side by side: the same bits as one after another, one stop, and failures that leave the others saved."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pointsman._errors import RunError, Stopped
from pointsman.routers.frame import entries
from pointsman_lab.progress import Progress, Quiet, Stop
from pointsman_lab.runs import imports
from pointsman_lab.runs.imports import import_named
from pointsman_lab.training.compare import Plan, compare, default_jobs
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.jobs import Here, Work, _Process, _told, do_all


class Notes(Quiet):
    """Keeps what it is told, of all lines; sets `stop` when two jobs go on."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self.told: list[str] = []
        self.stop = stop

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.told.append(f"{self.title}{name} {done}/{total}")
        if self.stop is not None and len(self.told) == 2:
            self.stop.set()

    def note(self, message: str) -> None:
        self.told.append(message)

    def line(self) -> Notes:
        return self


def sums(folder: Path) -> Work:
    def work(job: Any, progress: Progress, stop: Stop | None) -> None:
        progress.phase("adds", 10)
        if job == "warns":
            warnings.warn("in one\nline", stacklevel=1)
        if job == "wrong":
            raise RunError("the third job is wrong")
        if job == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while job == "waits":
            assert stop is not None
            if stop.is_set():
                (folder / "saved").touch()
                raise Stopped("stopped and saved")
            time.sleep(0.01)
        (folder / str(job)).write_text(str(torch.get_num_threads()))

    return work


def run(jobs: list[Any], folder: Path, stop: threading.Event | None = None) -> tuple[list[int], Notes]:
    ended: list[int] = []
    notes = Notes(stop)
    titles = [f"job {number}: " for number in range(len(jobs))]
    setup = partial(sums, folder)
    do_all(jobs, titles, setup, setup, 2, progress=notes, ended=ended.append, stop=stop)
    return ended, notes


@pytest.mark.slow
def test_every_job_is_done_once_with_one_thread(tmp_path: Path) -> None:
    ended, notes = run(list(range(5)), tmp_path)
    assert sorted(ended) == [0, 1, 2, 3, 4]
    assert {(tmp_path / str(job)).read_text() for job in range(5)} == {"1"}
    assert len([told for told in notes.told if told.endswith(": adds 0/10")]) == 5


@pytest.mark.slow
def test_a_warning_of_a_job_is_one_line_without_a_place_in_the_code(tmp_path: Path) -> None:
    assert "in one line" in run(["warns", "too"], tmp_path)[1].told


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "message"), [("wrong", "third job is wrong"), ("dies", "died with exit code -9")])
def test_a_failure_stops_the_others_when_they_have_saved(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        run(["waits", bad, "never"], tmp_path)
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_signal_before_a_worker_has_begun_leaves_it(tmp_path: Path) -> None:
    """Ctrl-C reaches all processes of a terminal, those that still import, too."""
    [worker] = Here(1).begin(partial(sums, tmp_path), [], Quiet())
    assert isinstance(worker, _Process)
    assert worker._process.pid is not None
    os.kill(worker._process.pid, signal.SIGINT)
    assert worker.receive() == ("ready", ())
    worker.send(None)
    assert worker.receive() == ("finished", ())
    worker.end()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(errno.ENOSPC, "No space left", "file"), OSError, "No space left: 'file'"),
        (MemoryError("Unable to allocate 9 TiB"), MemoryError, "9 TiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 40 bytes"), MemoryError, "40 bytes"),
        (RuntimeError("a fault"), RuntimeError, "RuntimeError: a fault"),
        (UnicodeDecodeError("ascii", b"", 0, 1, "why"), ValueError, "why"),
    ],
)
def test_what_the_user_can_mend_keeps_its_class(error: Exception, kind: type[Exception], text: str) -> None:
    try:
        raise error
    except Exception as raised:
        told = pickle.loads(pickle.dumps(_told(raised)))
    assert type(told) is kind
    assert text in str(told)
    assert ("Traceback" in str(told)) == (kind is RuntimeError)


@pytest.mark.slow
def test_one_stop_reaches_all(tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(Stopped, match="stopped and saved"):  # what all of them say
        run(["waits", "waits", "never"], tmp_path, stop)
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_any_number_of_jobs_gives_the_same_bits(
    settings: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also of a router that only a file of the user registers: every worker imports it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from pointsman.routers.frame.registry import register_router\n"
        "from pointsman.routers.papers.topk import linear_scores\n\n\n"
        "@register_router('of-a-file', paper='none')\n"
        "def mine(layer):\n    'As smoe.'\n    return linear_scores(layer)\n"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = import_named(str(file))
    request.addfinalizer(lambda: entries.ROUTERS.pop("of-a-file"))
    plan = Plan(settings(steps=4, imports=(name,)), ("smoe", "of-a-file"), (0, 1))
    results: dict[int, Mapping[str, bytes]] = {}
    before = torch.get_num_threads()
    for jobs in (1, 2):
        ends, out = [], tmp_path / str(jobs)
        compare(plan, out, jobs=jobs, progress=Notes(), ended=partial(ends.append, jobs))
        assert len(ends) == 4
        results[jobs] = {
            str(file.relative_to(out)): file.read_bytes()
            for file in out.glob("runs/*/*/checkpoints/*/model.safetensors")
        }
    assert torch.get_num_threads() == before
    assert len(results[1]) >= 4
    assert results[1] == results[2]


def in_a_worker(change: Callable[[], object]) -> Callable[..., None]:
    """`do_all` as a worker does it, which reads the data itself, after `change`; in this process."""

    def do(
        jobs: Sequence[Any], titles: Any, setup: Callable[[], Work], *_: Any, progress: Progress, **others: Any
    ) -> None:
        change()
        work = setup()
        for job in jobs:
            work(job, progress, None)

    return do


def test_a_worker_refuses_what_has_changed_since_the_command_read_it(
    settings: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison names one text and one code for all its rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("some words of a text\n" * 400)
    plan = Plan(settings(steps=1, data=str(text)), ("smoe",), (0,))
    other = partial(monkeypatch.setattr, imports, "origin_of", lambda router: {"mine.py": "now"})
    monkeypatch.setattr("pointsman_lab.training.compare.do_all", in_a_worker(other))
    monkeypatch.setattr("pointsman_lab.training.compare.origin_of", lambda router: {"mine.py": "then"})
    with pytest.raises(RunError, match=r"mine\.py is not what it was when router 'smoe'"):
        compare(plan, tmp_path / "code", jobs=2, progress=Notes())
    longer = partial(text.write_text, "some words of a text\n" * 401)
    monkeypatch.setattr("pointsman_lab.training.compare.do_all", in_a_worker(longer))
    with pytest.raises(RunError, match=r"text\.txt has changed since this command read it"):
        compare(plan, tmp_path / "data", jobs=2, progress=Notes())
    assert not (tmp_path / "data" / "runs").exists()


def test_the_default_follows_the_size_of_the_model(settings: Callable[..., RunConfig]) -> None:
    small, large = settings(), settings(**{"model.dim": 1024, "model.hidden_dim": 1024})
    assert (default_jobs(small, "cpu") or 0) >= 1
    assert default_jobs(large, "cpu") is None
    assert default_jobs(small, "cuda") is None


@pytest.mark.slow
def test_a_worker_runs_no_code_of_the_folder_where_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pointsman` does not, and Python would: it looks there first for the modules of a worker."""
    monkeypatch.chdir(tmp_path)
    for name in ("multiprocessing", "pickle", "torch"):
        Path(f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    [worker] = Here(1).begin(partial(sums, tmp_path), [], Quiet())
    told = worker.receive()
    worker.end()
    assert not (tmp_path / "ran").exists()
    assert told == ("ready", ())
