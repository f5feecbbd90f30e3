"""Ranks as processes of one machine: exit codes, restarts, signals. The commands are a few lines without torch."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from pointsman_lab import processes as launching
from pointsman_lab.cli import ranks
from pointsman_lab.cli.options import Parser
from pointsman_lab.processes import ending_signals, launch

RANK = "import os, sys, time, signal\nrank, out = int(os.environ['RANK']), sys.argv[1]\n"


def run(code: str, out: Path, restarts: int = 3, count: int = 2) -> int:
    return launch([sys.executable, "-c", RANK + code, str(out)], count, restarts)


def test_all_done(tmp_path: Path) -> None:
    code = "open(f'{out}/{rank}', 'w').write(os.environ['WORLD_SIZE'] + os.environ['POINTSMAN_RANKS_STORE'][-5:])"
    assert run(code, tmp_path, count=3) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3store"] * 3


def test_the_first_that_fails_ends_the_others(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run("sys.exit(2) if rank else time.sleep(60)", tmp_path) == 2
    assert run("sys.exit(1) if rank == 0 else time.sleep(60)", tmp_path) == 1
    assert time.monotonic() - began < 30


def test_one_that_is_killed_begins_again_with_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "open(f'{out}/{rank}', 'a').write(f'{sys.argv[2:]}')\n"
        "if '--resume' not in sys.argv and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if '--resume' not in sys.argv: time.sleep(60)\n"
    )
    assert run(code, tmp_path) == 0
    assert (tmp_path / "1").read_text() == "[]['--resume']"
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["pointsman: rank 1 was ended by SIGKILL", "pointsman: starting again (1 of 3)"]


def test_a_launcher_that_was_killed_leaves_no_folder_once_another_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = RANK + "os.kill(os.getppid(), signal.SIGKILL)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    script = f"from pointsman_lab.processes import launch\nlaunch({command!r}, 1, 0)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    assert run("pass", tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_restarts_has_an_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)", tmp_path, restarts=1) == 137
    assert capfd.readouterr().err.count("rank 1 was ended by SIGKILL") == 2, "the last time, too"
    assert run("sys.exit(75) if rank else time.sleep(60)", tmp_path, restarts=1) == 75


def test_a_signal_reaches_all_ranks_and_they_end_with_the_launcher(tmp_path: Path) -> None:
    code = RANK + (
        "signal.signal(signal.SIGTERM, lambda *_: (open(f'{out}/{rank}', 'w').close(), sys.exit(130)))\n"
        "open(f'{out}/here-{rank}', 'w').close()\n"
        "time.sleep(0 if False else 60)\n"
    )
    script = f"import sys\nfrom pointsman_lab.processes import launch\nsys.exit(launch({[sys.executable, '-c', code, str(tmp_path)]!r}, 2, 0))"  # noqa: E501
    launcher = subprocess.Popen([sys.executable, "-c", script], env=dict(os.environ))
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("here-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 130
    finally:
        launcher.kill()
    assert (tmp_path / "0").exists() or (tmp_path / "1").exists()


@pytest.mark.parametrize("number", ending_signals())
def test_a_signal_while_ranks_start_ends_those_started_and_starts_no_more(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = [], launching._start

    def third(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments))
        if len(started) == 3:
            signal.raise_signal(number)
        return started[-1]

    monkeypatch.setattr(launching, "_start", third)
    with pytest.raises(KeyboardInterrupt):
        run("time.sleep(20)", tmp_path, count=10)
    assert len(started) == 3
    assert all(process.returncode in (-signal.SIGTERM, -number, -signal.SIGKILL) for process in started)


def test_a_signal_before_ranks_can_answer_ends_them_for_good(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even one that is in native code, where an exception of Python waits."""
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "if rank == 0: os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(20)\n"
    )
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(code, tmp_path)
    assert time.monotonic() - began < 15
    assert "starting again" not in capfd.readouterr().err


def test_a_second_signal_ends_ranks_that_answer_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PATIENCE", 0.5)
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "for _ in range(2 * (rank == 0)): os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5)\n"
        "time.sleep(20)\n"
    )
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(code, tmp_path)
    assert time.monotonic() - began < 15


def test_ranks_that_still_import_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    slow = tmp_path / "torch.py"
    slow.write_text(
        f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pointsman_lab", "train", "--processes", "2"]
    script = f"from pointsman_lab.processes import launch\nlaunch({command!r}, 2, 0)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    launcher = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths})

    def ranks() -> list[int]:
        return [int(file.name) for file in tmp_path.iterdir() if file.name.isdigit()]

    def alive() -> list[int]:
        return [rank for rank in ranks() if Path(f"/proc/{rank}").exists()]

    try:
        until = time.monotonic() + 60
        while len(ranks()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(alive()) == 2
    finally:
        launcher.kill()
        launcher.wait()
    until = time.monotonic() + 10
    while alive() and time.monotonic() < until:
        time.sleep(0.05)
    left = alive()
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert left == []


def test_ranks_look_for_no_modules_where_they_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But `python -m`, which looks there itself, may find the laboratory there alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    begun: list[list[str]] = []
    monkeypatch.setattr(ranks, "launch", lambda command, *_: begun.append(command))
    for _ in range(2):
        values = Namespace(processes=2, parallel=None, restarts=0)
        ranks.launched(Parser("train", "", ""), values, "cpu", "train", ["x"], lambda count, layout: None)
        monkeypatch.syspath_prepend(str(tmp_path))
    assert ["-P" in command for command in begun] == [True, False]
