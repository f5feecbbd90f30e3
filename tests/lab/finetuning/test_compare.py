"""Fine-tuning every row of a comparison, and the tables it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pointsman._errors import RunError, Stopped
from pointsman_lab.cli.main import main
from pointsman_lab.finetuning import Finetuning, compare_tasks
from pointsman_lab.progress import Quiet
from pointsman_lab.report import TaskTable
from pointsman_lab.runs.comparison import read_comparison


class Titles(Quiet):
    """Keeps the title of each job that begins, and counts those that end."""

    def __init__(self) -> None:
        self.told: dict[str, None] = {}
        self.over = 0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.told[self.title.partition(" ")[2]] = None

    def line(self) -> Titles:
        return Line(self)

    def ended(self) -> None:
        self.over += 1


class Line(Titles):
    """A worker's line."""

    def __init__(self, whole: Titles) -> None:
        self.told = whole.told


class StopAtOnce:
    def is_set(self) -> bool:
        return True


@pytest.fixture
def own(comparison: Path, tmp_path: Path) -> Path:
    """A copy of the trained comparison."""
    shutil.copytree(comparison, tmp_path / "own")
    return tmp_path / "own"


def test_every_row_is_fine_tuned_and_an_interrupted_comparison_goes_on(own: Path, task: str) -> None:
    settings = Finetuning(task, steps=2, freeze=("router",), balance=0.01, settings={"batch_size": 8})
    with pytest.raises(Stopped, match="the same command goes on"):
        compare_tasks(own, [settings], progress=Quiet(), stop=StopAtOnce())
    watch = Titles()
    compare_tasks(own, [settings], repeats=2, progress=watch)
    name = settings.variant
    table = TaskTable.of(read_comparison(own), name)
    table.write(own)
    every = [f"{router} on {name}, seed {seed}" for seed in (0, 1000) for router in ("smoe", "xmoe", "dense")]
    assert list(watch.told) == every
    for suffix in ("txt", "csv", "md", "tex"):
        content = (own / f"task-{name}.{suffix}").read_text()
        assert all(router in content for router in ("smoe", "xmoe", "dense"))
    assert [row.router for row in table.table.rows] == ["smoe", "xmoe", "dense"]
    assert [len(row.done) for row in table.table.rows] == [2, 2, 2]
    assert table.table.metric.name == "accuracy"
    assert table.table.top_k == [1, 2, 4]
    for router in ("smoe", "xmoe"):
        assert table.routing[router]["consistency"] is not None
        assert table.routing[router]["top1"] is not None
    assert table.routing["dense"]["top1"] is None
    assert "Paired differences to smoe" in table.text()
    assert "frozen: router; balance loss: 0.01" in table.text()
    assert "not comparable" not in table.text(), "a dense row has neither"
    record = json.loads((own / "runs/dense/seed-0/finetune" / name / "seed-0/evaluation.json").read_text())
    assert record["protocol"]["frozen"] == []  # a dense row has no router
    for row in table.table.rows:
        record = json.loads((own / f"runs/{row.router}/seed-0/finetune/{name}/seed-0/evaluation.json").read_text())
        assert row.cost["total"] == record["parameters"], "what trains: the head, no router"
    compare_tasks(own, [settings], repeats=2, progress=Quiet())
    assert TaskTable.of(read_comparison(own), name).csv() == table.csv()


def test_any_number_of_jobs_gives_the_same_bits(own: Path, task: str, tmp_path: Path) -> None:
    settings = Finetuning(task, steps=2, settings={"batch_size": 8})
    other = shutil.copytree(own, tmp_path / "other")
    for out, jobs in ((own, 1), (other, 2)):
        watch = Titles()
        compare_tasks(out, [settings], jobs=jobs, progress=watch, ended=watch.ended)
        assert sorted(watch.told) == [f"{one} on {settings.variant}, seed 0" for one in ("dense", "smoe", "xmoe")]
        assert watch.over == 3
    for router in ("smoe", "xmoe", "dense"):
        path = Path("runs", router, "seed-0/finetune", settings.variant, "seed-0/evaluation.json")
        one, two = (json.loads((out / path).read_text())["results"] for out in (own, other))
        assert one == two
    watch = Titles()
    compare_tasks(own, [settings], progress=watch, ended=watch.ended)
    assert not watch.over  # nothing was new


def test_a_worker_refuses_data_that_have_changed_since_the_command_read_them(
    own: Path, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shutil.copytree(task, tmp_path / "data")

    def changed(jobs: Any, titles: Any, setup: Any, *_: Any, **others: Any) -> None:
        (data / "train.csv").write_text((data / "train.csv").read_text() + "one more good,pos\n")
        setup()(jobs[0], Quiet(), None)

    monkeypatch.setattr("pointsman_lab.finetuning.run.do_all", changed)
    with pytest.raises(RunError, match="data has changed since this command read it"):
        compare_tasks(own, [Finetuning(str(data), steps=2)], jobs=2, progress=Quiet())
    assert not list(own.glob("runs/*/seed-0/finetune"))


def test_rows_of_one_seed_see_the_same_batches(own: Path, task: str) -> None:
    settings = Finetuning(task, steps=1, settings={"batch_size": 8, "learning_rate": 1e-12})
    compare_tasks(own, [settings], progress=Quiet())
    lines = {}
    for router in ("smoe", "xmoe", "dense"):
        metrics = own / "runs" / router / "seed-0/finetune" / settings.variant / "seed-0/metrics.jsonl"
        [row] = [json.loads(line) for line in metrics.read_text().splitlines() if '"train"' in line]
        lines[router] = row["loss"]
    # an untrained head on hidden states of unit variance: losses stay close where labels and heads are the same
    assert max(lines.values()) - min(lines.values()) < 0.2


def test_the_command_line_takes_a_trained_comparison(own: Path, task: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--task", task, "--task-steps", "1", "--out", str(own), "--device", "cpu", "--top-k", "2"]
    assert main([*arguments, "--names", "smoe=Plain"]) == 0
    shown = capsys.readouterr().out
    assert "Plain" in shown, "names of rows are kept without --routers, too"
    assert "accuracy (%) on the test split" in shown
    assert "k=2" in shown
    assert "k=4" in shown  # the dense row's only column
    assert main(["compare", "--task", "sst3", "--out", str(own)]) == 2
    assert "unknown task 'sst3'" in capsys.readouterr().err
    assert main(["compare", "--task", task]) == 2
    assert "--routers is missing" in capsys.readouterr().err


def test_only_the_rows_that_are_named_and_have_saved(own: Path, task: str) -> None:
    settings = Finetuning(task, steps=1, settings={"batch_size": 8})
    shutil.rmtree(own / "runs/xmoe/seed-0/checkpoints")
    notes: list[str] = []

    class Noting(Quiet):
        def note(self, message: str) -> None:
            notes.append(message)

    compare_tasks(own, [settings], routers=["xmoe", "dense"], progress=Noting())
    assert "passed over, without a checkpoint: xmoe (seed 0)" in notes
    assert [row.router for row in TaskTable.of(read_comparison(own), settings.variant).table.rows] == ["dense"]
    with pytest.raises(RunError, match="has no row 'smeo': did you mean 'smoe'"):
        compare_tasks(own, [settings], routers=["smeo"], progress=Quiet())
    with pytest.raises(RunError, match="no run has a checkpoint"):
        compare_tasks(own, [settings], routers=["xmoe"], progress=Quiet())


def test_no_comparison_no_tables(tmp_path: Path, task: str) -> None:
    with pytest.raises(RunError, match="holds no comparison"):
        compare_tasks(tmp_path, [Finetuning(task)], progress=Quiet())
    with pytest.raises(RunError, match="neither a run directory"):
        TaskTable.of(read_comparison(tmp_path), "sst2")
