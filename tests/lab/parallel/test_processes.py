"""`pointsman train --processes N` and `torchrun -m pointsman_lab train`."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pointsman_lab.cli.main import main
from tests.lab.parallel.test_training import content, difference

SMALL = {
    "model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.head_dim": 8, "model.hidden_dim": 16,
    "model.num_experts": 4, "model.dropout": 0.0, "batch_size": 4, "segment_length": 8, "memory_length": 8,
    "eval_batch_size": 4, "eval_segment_length": 8, "eval_memory_length": 8, "eval_tokens": 100, "valid_tokens": 50,
    "checkpoint_every": 2, "keep_checkpoints": 1000, "validate_every": 1000, "log_every": 1, "deterministic": True,
}  # fmt: skip

STOPPED = "pointsman: stopped after step {step}; saved: the same command with --resume (--out {out}) goes on"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command of a small run, without --out."""
    draw = random.Random(0)
    file = tmp_path / "text.txt"
    file.write_text("".join(draw.choice("abcdefgh \n") for _ in range(4000)))
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    return ["train", "--router", "smoe:balance=0.05", "--data", str(file), "--device", "cpu", "--top-k", "1,2", *sets]


def pointsman(words: Sequence[str], launcher: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "pointsman_lab", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--processes", "2", "--parallel", "experts=3"], "experts=3 does not divide 2 ranks"),
        (["--processes", "2", "--parallel", "expert=2"], "did you mean 'experts'"),
        (["--processes", "0"], "whole numbers from 1"),
        (["--processes", "100000"], "4 for each core of this machine; torchrun starts any number"),
        (["--processes", "2", "--preset", "tony"], "did you mean 'tiny'"),
        (["--processes", "2", "--router", "smoo"], "did you mean 'smoe'"),
        (["--processes", "2", "--data", "enwik"], "did you mean 'enwik8'"),
        (["--processes", "3"], "3 ranks cannot share batch_size=4 evenly; 1, 2, 4 can"),
        (["--processes", "2", "--router", "compete"], "'compete' trains in one process"),
        (["--processes", "2", "--parallel", "experts=2", "--set", "model.num_experts=3"], "not divide the 3 experts"),
        (["--parallel", "experts=2"], "--parallel has no effect in one process: give --processes N, or start it with"),
        (["--processes", "1", "--restarts", "2"], "--restarts has no effect in one process"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_mistakes_before_any_rank_starts(
    command: str,
    flags: list[str],
    says: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delattr("pointsman_lab.processes._start")
    words = [command, *words[1:], *flags, "--out", str(tmp_path / "out")]
    assert main(words if command == "train" else ["--routers" if word == "--router" else word for word in words]) == 2
    assert not (tmp_path / "out").exists()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


@pytest.mark.parametrize(("command", "says"), [("compare", "start compare with --processes N"), ("finetune", "in one")])
def test_torchrun_starts_training_only(
    command: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command]) == 2
    assert says in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main([command]) == 2
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_mistakes_of_the_ranks_are_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    done = pointsman([*words, "--out", str(tmp_path / "run"), "--steps", "4", "--processes", "2"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "is not empty" in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_and_torchrun_train_what_one_process_trains(words: list[str], tmp_path: Path) -> None:
    runs = {"one": [], "two": ["--processes", "2", "--parallel", "experts=2"], "torchrun": ["--parallel", "experts=2"]}
    for name, flags in runs.items():
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] * (name == "torchrun")
        done = pointsman([*words, "--steps", "4", "--out", str(tmp_path / name), *flags], launcher)
        assert done.returncode == 0, done.stderr
        if name == "one":
            table = done.stdout
        assert done.stdout.splitlines()[0] == table.splitlines()[0]
        assert len(done.stdout.splitlines()) == len(table.splitlines())
    for name in ("two", "torchrun"):
        assert difference(content(tmp_path / "one"), content(tmp_path / name)) < 1e-4  # float32


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_on_two_processes(words: list[str], tmp_path: Path) -> None:
    """It writes what one process writes; a rank that is killed costs no row."""
    words = ["compare", *words[1:], "--routers", "smoe,dense", "--steps", "12"]
    del words[words.index("--top-k") : words.index("--top-k") + 2]
    del words[words.index("--router") : words.index("--router") + 2]
    one, two = tmp_path / "one", tmp_path / "two"
    done = pointsman([*words, "--out", str(one), "--jobs", "1"])
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "pointsman_lab", *words, "--out", str(two), "--processes", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as launcher:
        try:
            os.kill(rank_of(launcher, 1, two / "runs" / "smoe" / "seed-0", after=3), signal.SIGKILL)
            told, errors = launcher.communicate(timeout=600)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, errors
    assert "pointsman: rank 1 was ended by SIGKILL\npointsman: starting again (1 of 3)\n" in errors
    assert [line.split()[0] for line in told.splitlines() if line.startswith(("smoe ", "dense "))][:2] == [
        "smoe",
        "dense",
    ]
    for router in ("smoe", "dense"):
        runs = [content(out / "runs" / router / "seed-0") for out in (one, two)]
        assert difference(*runs) < 1e-4  # float32


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("signals", "says"), [
    ([signal.SIGINT], STOPPED), ([signal.SIGTERM], STOPPED), ([signal.SIGINT, signal.SIGINT], "interrupted"),
])  # fmt: skip
def test_ctrl_c_saves_on_all_ranks_and_says_so_once(
    signals: list[signal.Signals], says: str, words: list[str], tmp_path: Path
) -> None:
    """A second one ends at once. Nothing is left running."""
    out = tmp_path / "run"
    command = [*words, "--steps", "100000", "--checkpoint-every", "10000", "--out", str(out), "--processes", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pointsman_lab", *command], stderr=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        try:
            rank_of(launcher, 0, out, after=2)
            ranks = children(launcher.pid)
            for number in signals:
                launcher.send_signal(number)
                time.sleep(0.02)
            _, told = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert launcher.returncode == 130
    step = max(steps(out), default=0) if (out / "checkpoints").exists() else 0
    assert bool(step) == (len(signals) == 1)
    lines = [line for line in told.splitlines() if line]
    assert lines == ["stopping: saving first (Ctrl-C again to stop at once)", says.format(step=step, out=out)]
    assert len(ranks) == 2
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_hangs_is_named(words: list[str], tmp_path: Path) -> None:
    """After the timeout; nothing is left running, and the run goes on afterwards."""
    out = tmp_path / "run"
    command = [*words, "--steps", "100000", "--out", str(out), "--processes", "2", "--timeout", "20", "--restarts", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pointsman_lab", *command], stderr=subprocess.PIPE, text=True, env=environment
    ) as launcher:
        try:
            one = rank_of(launcher, 1, out)
            with suppress(ProcessLookupError):  # the launcher has ended it
                for _ in range(240):
                    os.kill(one, signal.SIGSTOP)
                    time.sleep(0.5)
            _, told = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 75
    lines = [line for line in told.splitlines() if line.startswith("pointsman: rank")]
    assert len(lines) == 1, told
    assert lines[0].startswith("pointsman: rank 1 ended or hangs: ")
    with pytest.raises(ProcessLookupError):
        os.kill(one, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_again_and_again_it_ends_with_the_figures_of_the_unbroken_run(words: list[str], tmp_path: Path) -> None:
    """A rank is killed at a random moment. At most the steps after the last checkpoint are done again."""
    draw = random.Random(1)
    words = [*words, "--steps", "90", "--checkpoint-every", "5", "--processes", "2", "--parallel", "experts=2"]
    assert pointsman([*words, "--out", str(tmp_path / "unbroken")]).returncode == 0
    out = tmp_path / "broken"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pointsman_lab", *words, "--out", str(out), "--restarts", "25"]
    killed, saved = 0, 0
    gone: set[int] = set()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as launcher:
        try:
            while killed < 6 and launcher.poll() is None:
                one = rank_of(launcher, draw.randrange(2), out, after=killed % 4 * draw.randrange(1, 5), gone=gone)
                time.sleep(draw.uniform(0, 0.2))
                if launcher.poll() is None:
                    gone |= children(launcher.pid)
                    os.kill(one, signal.SIGKILL)
                    killed += 1
                    before, saved = saved, max(steps(out), default=0)
                    assert saved >= before  # what was whole stays
            _, told = launcher.communicate(timeout=600)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, told
    assert told.count("was ended by SIGKILL") == killed, told
    assert killed >= 4
    assert not list((out / "checkpoints").glob(".*"))
    assert difference(content(tmp_path / "unbroken"), content(out)) == 0  # equal layouts: bit for bit


def steps(out: Path) -> list[int]:
    """The steps of whole checkpoints: a folder called step-N has a manifest."""
    found = list((out / "checkpoints").glob("step-*"))
    assert all((folder / "manifest.json").is_file() for folder in found)
    return [int(folder.name.removeprefix("step-")) for folder in found]


def children(process: int) -> set[int]:
    try:
        return {int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()}
    except OSError:
        return set()


def rank_of(
    launcher: subprocess.Popen[str], rank: int, out: Path, *, after: int = 1, gone: Collection[int] = ()
) -> int:
    """The process of a rank, after so many steps of its own; none of those that are gone. 0: all is done."""
    until = time.monotonic() + 600
    metrics = out / "metrics.jsonl"
    seen: dict[int, float] = {}
    first: int | None = None
    while time.monotonic() < until:
        time.sleep(0.02)
        if launcher.poll() is not None:
            return 0
        for child in children(launcher.pid) - set(gone):
            try:
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RANK={rank}".encode() not in environment:
                continue
            began = seen.setdefault(child, time.time())
            if after and not (metrics.is_file() and metrics.stat().st_mtime > began and metrics.stat().st_size):
                continue
            lines = len(metrics.read_text().splitlines()) if after else 0
            first = lines if first is None else first
            if lines >= first + after - 1 or not after:
                return child
    raise AssertionError("no such rank")
