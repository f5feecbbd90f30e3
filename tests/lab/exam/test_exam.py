"""The exam: measures against sklearn, data from (task, seed, step), floors, scores, interruption."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pointsman import Routing
from pointsman._errors import RunError, Stopped
from pointsman.routers.frame.registry import ROUTERS, parse_spec
from pointsman_lab._files import write_whole
from pointsman_lab.cli.exam import parser, plan_of
from pointsman_lab.cli.main import main
from pointsman_lab.data.catalog import data_folder
from pointsman_lab.exam import cell as cells_module
from pointsman_lab.exam import run as run_module
from pointsman_lab.exam.card import Card, level, write_card
from pointsman_lab.exam.cell import VERSION, chosen, fill, read_cell, variants
from pointsman_lab.exam.exam import ALWAYS, Plan, collect, examine, worker, written_record
from pointsman_lab.exam.run import adjusted_mutual_information, experts_per_token, heaviest, rate_at, run, used
from pointsman_lab.exam.scores import QUICK, TASKS, difference, regret, scores, tasks
from pointsman_lab.exam.sequences import Sources, language_bytes
from pointsman_lab.exam.student import Student
from pointsman_lab.exam.task import BLOCK, Batch, Task, applied
from pointsman_lab.progress import Quiet
from pointsman_lab.runs import imports

HERE = [name for name in TASKS if name != "languages" or data_folder()]
"""Tasks whose data is here."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Task:
    """`clusters` with few steps."""
    monkeypatch.setattr(type(TASKS["clusters"]), "steps", 20)
    monkeypatch.setattr(cells_module, "RATES", (1e-3, 1e-2))
    monkeypatch.setattr(cells_module, "FIRST", (1e-3, 1e-2))
    return TASKS["clusters"]


def never() -> None:
    return


@pytest.mark.parametrize("shape", [(8, 8), (3, 9), (1, 4), (1, 1), (32, 8)])
def test_mutual_information_is_that_of_sklearn(shape: tuple[int, int]) -> None:
    from sklearn.metrics import adjusted_mutual_info_score

    draw = np.random.default_rng(0)
    for count in (500, 12):
        first, second = draw.integers(shape[0], size=count), draw.integers(shape[1], size=count)
        second = np.where(draw.random(count) < 0.5, first % shape[1], second)
        counts = np.zeros(shape, dtype=np.int64)
        np.add.at(counts, (first, second), 1)
        assert adjusted_mutual_information(counts) == pytest.approx(adjusted_mutual_info_score(first, second), abs=1e-9)


def test_measures_by_hand() -> None:
    experts = torch.tensor([[2, 0], [-1, 1], [-1, -1], [0, 1], [0, -1]])
    weights = torch.tensor([[0.4, 0.6], [9.0, 0.1], [9.0, 9.0], [0.7, 0.3], [0.5, 9.0]])
    routing = Routing(experts, weights, torch.ones(5, 8) / 8, torch.zeros(5, 8))
    assert heaviest(routing).tolist() == [0, 1, 8, 0, 0]
    assert experts_per_token(routing) == pytest.approx(6 / 5)
    loads = torch.tensor([50, 30, 2, 3, 15])  # a fifth of an equal share: 4
    many = torch.arange(5).repeat_interleave(loads)[:, None]
    assert used(Routing(many, torch.ones(100, 1), torch.ones(100, 5) / 5, torch.zeros(100, 5))) == 3
    two = torch.tensor([[[1.0], [3.0]]])
    batch = Batch(two, two, two, two, two, torch.tensor([[1.0, 3.0]]), two)
    assert TASKS["clusters"].value(torch.zeros(1, 2, 1), batch) == pytest.approx(28 / 3)  # about a mean of 2.5
    assert TASKS["drift"].judge({300: 9.0, 330: 1.0, 600: 3.0}) == 2.0
    assert [level(score) for score in (0.19, 0.2, 0.95)] == [0, 1, 5]


def test_maps_are_applied_to_the_rows_that_name_them() -> None:
    draw = torch.Generator().manual_seed(0)
    maps, rows = torch.randn(5, 4, 4, generator=draw), torch.randn(3, 7, 4, generator=draw)
    which = torch.randint(5, (3, 7), generator=draw)
    assert torch.allclose(applied(maps, which, rows), torch.einsum("btd,btde->bte", rows, maps[which]), atol=1e-5)


@pytest.mark.parametrize("name", HERE)
def test_data_depends_on_task_seed_and_step_alone(name: str) -> None:
    task = TASKS[name]
    world = task.world(0)
    first = task.block(world, 0, BLOCK)
    torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(first, task.block(task.world(0), 0, BLOCK), strict=True))
    assert not torch.equal(first.inputs, task.block(world, 0, 0).inputs)
    assert not torch.equal(first.inputs, task.block(task.world(1), 1, BLOCK).inputs)
    assert first.inputs.shape[:3] == (BLOCK, task.batch, task.length)
    assert first.experts.shape == first.shares.shape


RECORDED = {
    "clusters": (1.0666, 0.041125, 1.0558, -0.031874, 1, 1),
    "many": (1.2097, 0.036657, 1.4429, 0.10688, 1, 1),
    "fine": (1.166, 0.01456, 1.1464, -0.042492, 1, 0.25),
    "zipf": (1.0712, 0.13895, 1.0356, 0.020366, 1, 1),
    "norms": (1.7824, -0.0055949, 1.7433, 0.10415, 7.9771, 1),
    "collapse": (0.85598, -0.0035703, 0.75897, 6.7556e-05, 1, 1),
    "neighbours": (0.84572, 0.053179, 0.83638, -0.015872, 1, 1),
    "neighbours-causal": (0.85039, -0.030719, 0.84312, 0.013452, 1, 1),
    "outliers": (1.1381, -0.032143, 1.1207, -0.0656, 0.98919, 1),
    "amount": (1.0712, -0.044046, 0.838, -0.013358, 1, 0.25),
    "any-k": (1.0373, 0.056883, 0.48208, 1.0628e-05, 1, 0.25),
    "nothing": (1.0706, -0.03194, 0.53004, -0.01391, 1, 0.49805),
    "drift": (1.0639, 0.01536, 1.0591, 0.13917, 1, 1),
    "ids": (0.82614, 0.027224, 0.80869, -0.008806, 1, 1),
    "freeze": (1.072, -0.044792, 1.0723, -0.054285, 1, 1),
    "sources": (0.0625, 0.093844, 7.5477, 11.346, 1.1445, 1),
    "sources-switching": (0.0625, 0.092686, 6.9646, 10.436, 1.1093, 1),
    "teacher": (0.79656, -0.0033509, 0.78272, -0.025013, 1, 1),
    "languages": (0.0039062, 0.005977, 142.99, 214.6, 0, 1),
}
"""Of the first block of seed 0: mean |inputs|, their tilted mean, both of the targets, mean weight, mean share."""


@pytest.mark.parametrize("name", HERE)
def test_the_data_are_those_that_the_record_was_made_on(name: str) -> None:
    task = TASKS[name]
    batch = task.block(task.world(0), 0, 0)

    def sums(values: torch.Tensor) -> tuple[float, float]:
        values = values.double()
        tilted = values * torch.linspace(1, 2, values.shape[-1], dtype=torch.float64)
        return float(values.abs().mean()), float(tilted.mean())

    found = [*sums(batch.inputs), *sums(batch.targets), float(batch.weight.mean()), float(batch.shares.mean())]
    assert found == pytest.approx(RECORDED[name], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in TASKS if not isinstance(TASKS[name], Sources)])
def test_the_true_experts_make_the_targets(name: str) -> None:
    task = TASKS[name]
    world = task.world(0)
    batch = task.test(world, 0)
    parts = world.get("parts")
    if parts is None:
        output = torch.stack([applied(world["maps"], one.clamp_min(0), batch.inputs) * (one >= 0)[..., None]
                              for one in batch.experts.unbind(-1)])  # fmt: skip
        output = (output * batch.shares.movedim(-1, 0)[..., None]).sum(0)
    else:
        output = sum(batch.shares[..., j, None] * applied(parts[:, j], batch.cluster, batch.inputs)
                     for j in range(parts.shape[1]))  # fmt: skip
    assert task.value(output, batch) < 1e-9


@pytest.mark.parametrize("name", ["sources", "sources-switching"])
def test_text_follows_its_chains(name: str) -> None:
    task = TASKS[name]
    world = task.world(0)
    batch = task.test(world, 0)
    chains = world["chains"]
    own = -chains[batch.cluster, batch.ids, batch.targets].log()
    assert torch.allclose(own, batch.weight)
    assert task.value(chains.log()[batch.cluster, batch.ids], batch) == pytest.approx(0, abs=1e-6)
    switches = (batch.cluster.diff(dim=1) != 0).float().mean()
    assert switches == 0 if name == "sources" else 0.03 < switches < 0.08


def test_the_floor_of_any_k_is_what_the_true_parts_leave() -> None:
    task = TASKS["any-k"]
    world = task.world(0)
    batch = task.test(world, 0)
    found = []
    for k in task.judged_at:
        parts = range(min(k, 4))
        output = sum(batch.shares[..., j, None] * applied(world["parts"][:, j], batch.cluster, batch.inputs)
                     for j in parts)  # fmt: skip
        found.append(task.value(output, batch))
    left = [torch.einsum("cw,cwde->cde", world["shares"][:, k:], world["parts"][:, k:]) for k in (0, *task.judged_at)]
    whole, *variances = (float(one.square().sum((1, 2)).mean()) for one in left)  # the parts are blind to the centres
    assert sum(found) / len(found) == pytest.approx(sum(variances) / whole / len(found), rel=0.05)


@pytest.mark.parametrize("name", HERE)
def test_every_task_trains_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TASKS[name]), "steps", 20)
    for row in ("oracle", "plain", "smoe"):
        found = run(TASKS[name], row, 0, 1e-3)
        assert found["value"] is not None
        assert ("confusion" in found) == (row != "plain")
        assert row != "oracle" or found["ami"] > 0.6


def test_k_is_lowered_one_by_one_from_the_k_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    task, seen = TASKS["amount"], list[int | None]()

    def at(task: Task, student: Student, test: Any, k: int | None) -> tuple[float, Routing]:
        seen.append(k)
        return 0.0, Routing(*[torch.zeros(4, 4 if k is None else k, dtype=torch.int64)] * 4)

    monkeypatch.setattr(run_module, "_at", at)
    for row, wanted in (("top-p", [None, 7, 6, 5, 4, 3, 2]), ("smoe", [None, 1]), ("oracle", [None])):
        seen.clear()
        run_module.judged(task, Student(task, row, 0), None, {})  # type: ignore[arg-type]
        assert seen == wanted


def test_two_passes_differ_on_classes_too() -> None:
    task = TASKS["sources"]
    student = Student(task, "thor:alpha=100", 0)
    batch = task.block(task.world(0), 0, 0).at(0)
    torch.manual_seed(0)
    far = run_module.objective(task, student, batch).item()
    student.layer.router.objective_weight = 0.0  # type: ignore[union-attr]
    torch.manual_seed(0)
    assert far > run_module.objective(task, student, batch).item() + 0.01


def test_rows_have_the_same_experts_and_a_run_repeats(short: Task) -> None:
    first, second = Student(short, "smoe", 3).layer.experts, Student(short, "xmoe", 3).layer.experts
    oracle = Student(short, "oracle", 3).layer
    assert torch.equal(first.w_in, second.w_in)  # type: ignore[union-attr, arg-type]
    assert torch.equal(first.w_in, oracle.w_in)  # type: ignore[union-attr, arg-type]
    assert run(short, "noisy-topk", 1, 1e-2) == run(short, "noisy-topk", 1, 1e-2)


def test_a_router_that_looks_ahead_is_refused_where_order_counts(tmp_path: Path) -> None:
    fill(TASKS["sources"], "expert-choice", 1, tmp_path, never, lambda _: None)
    assert "later tokens" in read_cell(tmp_path, "sources", "expert-choice")["refused"]


def test_a_cell_copied_over_another_rows_is_refused(tmp_path: Path) -> None:
    """It would give the one row the other's figures; `verify` names it, too."""
    cell = {"row": "smoe", "tried": [], "runs": {"0": {"value": 0.1, "curve": [[1, 0.1]]}}}
    for row in ("smoe", "xmoe"):
        write_whole(tmp_path / f"cells/clusters/exam-{row}.json", json.dumps(cell))
    write_whole(tmp_path / "exam.json", json.dumps({"version": VERSION, "rows": ["smoe", "xmoe"], "tasks": ["clusters"],
                                                    "seeds": 1}))  # fmt: skip
    assert read_cell(tmp_path, "clusters", "smoe") == cell
    with pytest.raises(RunError, match=r"exam-xmoe\.json is of row 'smoe', not of 'xmoe'"):
        read_cell(tmp_path, "clusters", "xmoe")
    assert main(["verify", str(tmp_path)]) == 1


def test_the_rate_decays_in_each_cycle() -> None:
    task = TASKS["freeze"]
    assert rate_at(task, 150) == pytest.approx(0.5)
    assert rate_at(task, 299) < 1e-3 < rate_at(task, 320)
    assert rate_at(TASKS["drift"], 440) == 1
    assert rate_at(TASKS["drift"], 599) < 1e-3


def test_the_rate_is_chosen_on_seeds_of_its_own() -> None:
    asked: list[tuple[str, float, int]] = []

    def value(spec: str, rate: float, seed: int) -> float:
        asked.append((spec, rate, seed))
        return abs(rate - 1e-2) + (0 if spec.endswith("tau=8") else 1)

    assert chosen("smoe+similarity", value) == ("smoe+similarity:tau=8", 1e-2)
    assert {seed for _, _, seed in asked} == set(cells_module.TUNING_SEEDS)
    assert cells_module.count("smoe+similarity", 0, {"tried": [], "runs": {}}) == (0, len(asked))


@pytest.mark.parametrize("best", cells_module.RATES)
def test_rates_are_tried_until_the_best_lies_between_two_others(best: float) -> None:
    tried: set[float] = set()

    def value(spec: str, rate: float, seed: int) -> float:
        tried.add(rate)
        return abs(np.log(rate / best))

    assert chosen("smoe", value) == ("smoe", best)
    ends = (cells_module.RATES[0], cells_module.RATES[-1])
    assert best in ends or min(tried) < best < max(tried)
    assert len(tried) <= 9


@pytest.mark.parametrize("best", [1e-2, 1.0])
def test_progress_never_tells_more_runs_than_there_are(
    best: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_module, "run", lambda task, row, seed, rate, check: {"value": abs(np.log(rate / best))})
    told, totals = list[int](), list[int]()

    class Seen(Quiet):
        def phase(self, name: str, total: int, done: int = 0) -> None:
            totals.append(total)

        def advance(self, done: int, figures: object) -> None:
            assert done <= totals[-1]
            told.append(done)

    work = worker(tmp_path, 2, (), None)
    for _ in range(2):  # also of a cell that is done already
        work(("clusters", "smoe"), Seen(), None)
        assert told[-1] == totals[-1]
    assert told == [*range(told[-1] + 1), told[-1]]


def test_a_row_with_a_run_that_diverged_has_no_score() -> None:
    cells = made({"plain": [1.0, 1.0], "oracle": [0.0, 0.0], "smoe": [0.5, 0.5]})
    cells["clusters", "smoe"]["runs"]["1"]["value"] = None
    assert scores(cells, "clusters", "smoe") == {}
    assert Card(["clusters"], cells, ["smoe"]).text_of("clusters", "smoe") == "1 diverged"
    assert run(TASKS["clusters"], "plain", 0, 1e30)["value"] is None


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_router_that_raises_at_a_nan_has_diverged(
    short: Task, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], factor: float
) -> None:
    steps, real = 0, run_module.objective

    def objective(*given: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        loss = real(*given) * (factor if steps > 3 else 1.0)
        if steps > 3:
            raise kind("found invalid values")
        return loss

    monkeypatch.setattr(run_module, "objective", objective)
    if factor == 1:
        with pytest.raises(kind, match="invalid"):
            run(short, "smoe", 0, 1e-3)
        return
    found = run(short, "smoe", 0, 1e-3)
    assert (found["value"], [step for step, _ in found["curve"]]) == (None, [2])


def test_a_router_that_needs_an_attention_trace_gets_it_where_there_is_attention(short: Task) -> None:
    assert Student(TASKS["sources"], "smoe+attention", 0)(
        TASKS["sources"].test(TASKS["sources"].world(0), 0, 0.5), None
    )
    with pytest.raises(ValueError, match="needs an attention trace"):
        Student(short, "smoe+attention", 0)


def test_open_options_are_tried_unless_the_spec_says_one() -> None:
    assert variants("smoe") == ["smoe"]
    assert variants("oracle") == ["oracle"]
    assert variants("loss-free:update=quantile") == ["loss-free:update=quantile"]
    assert variants("smoe+similarity:tau=1") == ["smoe+similarity:tau=1"]
    assert variants("hyperrouter@loss-free")[1] == "hyperrouter@loss-free:rate=0.01"
    assert variants("hyperrouter@sigma+uniform")[0] == "hyperrouter:embed_dim=8@sigma+uniform"
    for row in ("xmoe@expert-choice", "hyperrouter@loss-free+similarity", "loss-free", "depths"):
        assert all(parse_spec(spec) for spec in variants(row))
    assert variants("xmoe+uniform")[0] == "xmoe:routing_dim=4+uniform"


def test_an_interrupted_cell_goes_on_bit_for_bit(short: Task, tmp_path: Path) -> None:
    fill(short, "smoe", 2, tmp_path / "whole", never, lambda _: None)
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Stopped("stopped")

    with pytest.raises(Stopped):
        fill(short, "smoe", 2, tmp_path / "broken", stop, lambda _: None)
    assert len(read_cell(tmp_path / "broken", "clusters", "smoe")["tried"]) == 3
    fill(short, "smoe", 2, tmp_path / "broken", never, lambda _: None)
    assert read_cell(tmp_path / "broken", "clusters", "smoe") == read_cell(tmp_path / "whole", "clusters", "smoe")


@pytest.mark.parametrize("another", [False, True])
def test_an_exam_whose_folder_is_moved_away_writes_into_no_other(short: Task, tmp_path: Path, another: bool) -> None:
    out, calls = tmp_path / "out", 0
    out.mkdir()

    def move() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            out.rename(tmp_path / "moved")
            if another:
                write_whole(out / "exam.json", "{}")

    with pytest.raises(RunError, match="out was removed or renamed while the exam trained; nothing more is saved"):
        fill(short, "smoe", 1, out, move, lambda _: None)
    assert not (out / "cells").exists()
    assert len(read_cell(tmp_path / "moved", "clusters", "smoe")["tried"]) == 2


def test_a_worker_refuses_a_file_that_has_changed_since_the_command_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(jobs: Any, titles: Any, setup: Any, *_: Any, **others: Any) -> None:
        monkeypatch.setattr(imports, "origin_of", lambda row: {"mine.py": "now"})
        setup()(jobs[0], Quiet(), None)

    monkeypatch.setattr("pointsman_lab.exam.exam.do_all", later)
    monkeypatch.setattr("pointsman_lab.exam.exam.origin_of", lambda row: {"mine.py": "then"})
    with pytest.raises(RunError, match=r"mine\.py is not what it was when router 'smoe'"):
        examine(Plan(("smoe",), ("clusters",), 1, again=True), tmp_path, jobs=2, progress=Quiet(), ended=never)
    assert not (tmp_path / "cells").exists()


def test_a_disk_that_is_full_is_no_refusal_of_the_row(
    short: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_once(file: Path, content: str) -> Path:
        monkeypatch.setattr(cells_module, "write_whole", write_whole)
        raise RunError(f"{file}: no space left on the disk")

    monkeypatch.setattr(cells_module, "write_whole", full_once)
    with pytest.raises(RunError, match="no space left"):
        fill(short, "smoe", 1, tmp_path, never, lambda _: None)
    assert "refused" not in read_cell(tmp_path, "clusters", "smoe")


def made(values: dict[str, list[float]], task: str = "clusters") -> dict[tuple[str, str], dict[str, Any]]:
    return {(task, row): {"runs": {str(seed): {"value": one} for seed, one in enumerate(found)}}
            for row, found in values.items()}  # fmt: skip


def test_a_score_is_paired_by_seed() -> None:
    cells = made({"plain": [1.0, 0.5], "oracle": [0.0, 0.1], "smoe": [0.5, 0.1], "xmoe": [0.5]})
    assert scores(cells, "clusters", "smoe") == {0: 0.5, 1: 1.0}
    assert scores(cells, "clusters", "xmoe") == {0: 0.5}
    assert difference(cells, "clusters", "smoe", "xmoe").values == [0.0]
    assert regret(cells, "clusters", "smoe") == {0: 0.5, 1: 0.0}
    assert regret(cells, "clusters", "xmoe") == {0: 0.5}


def test_a_strangers_exam_is_shown_and_obeyed_by_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["oracle", "plain", "smoe", "[/a]\x1b]0;b\x07"]
    cells = made({"oracle": [1.0, 0.0], "plain": [1.0, 2.0], "smoe": [1.7e308] * 2, rows[3]: [0.5, 1.0]})
    cells["clusters", "smoe"]["runs"] |= {"00": {"value": 1.0}, "x": {"value": 1.0}}
    cells["clusters", "smoe"]["runs"]["0"]["curve"] = [[0, 1.0], [1.0]]
    cells["clusters", "plain"]["runs"]["0"]["curve"] = [[0, 1.0]]
    card = Card(["clusters"], cells, rows)
    assert scores(cells, "clusters", rows[3]) == {1: 0.5}
    assert scores(cells, "clusters", "smoe") == {}
    card.print()
    shown = capsys.readouterr().out
    assert "[/a]" in shown
    assert not set("\x1b\x07") & set(shown)
    page = write_card(card, tmp_path).read_text()
    assert "0.0,90.0" not in page
    assert ".exam td a { color: inherit;" in page  # readable in the dark, where a cell has no colour
    assert ".exam .l0 { background:" in page  # wins over `tbody tr:hover > *`
    Card([], {}, []).print()


def test_rows_of_fewer_seeds_are_named() -> None:
    cells = made({"plain": [1.0] * 3, "oracle": [0.0] * 3, "smoe": [0.5] * 3, "mine": [0.5] * 2})
    [grid] = Card(["clusters"], cells, ["smoe", "mine"]).shown_grids()
    assert grid.caption.endswith("Of fewer than 3 seeds: mine (2 seeds).")
    [grid] = Card(["clusters"], cells, ["smoe"]).shown_grids()
    assert grid.caption.endswith("95 % interval.")


def test_an_exam_writes_tables_and_a_page(short: Task, tmp_path: Path) -> None:
    plan = Plan((*ALWAYS, "smoe"), ("clusters",), 1, again=True)
    whole = examine(plan, tmp_path, jobs=1, progress=Quiet(), ended=never)
    found = collect(whole, tmp_path)
    card = Card(whole.tasks, found, whole.rows)
    page = write_card(card, tmp_path).read_text()
    assert "nan" not in page.lower().split("<body>")[1]
    assert "http" not in page.split("<body>")[1]
    assert {file.name for file in tmp_path.glob("exam.*")} == {
        "exam.json",
        "exam.txt",
        "exam.csv",
        "exam.md",
        "exam.tex",
    }
    entry = json.loads(written_record(found).splitlines()[0])
    assert (entry["task"], entry["row"]) == ("clusters", "oracle")
    with pytest.raises(RunError, match="holds no exam"):
        examine(plan, tmp_path.parent, jobs=1, progress=Quiet(), ended=never)


def test_the_files_of_an_exam_keep_the_rows_of_before(tmp_path: Path) -> None:
    """Of rows that the record knows, which need no training."""
    for row in ("xmoe", "smoe"):
        assert main(["exam", row, "--tasks", "clusters", "--seeds", "1", "--out", str(tmp_path)]) == 0
    rows = [line.split()[0] for line in (tmp_path / "exam.txt").read_text().splitlines()[4:]]
    assert rows == [*ALWAYS, "xmoe", "smoe"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["smoe", "--tasks", "cluster"], "did you mean 'clusters'"),
        (["smo"], "did you mean 'smoe'"),
        (["smoe", "--quick", "--seeds", "3"], "--seeds has no effect with --quick"),
        (["nowhere.py"], "there is no such file"),
        (["smoe", "--device", "cuda"], "runs on the CPU"),
        (["smoe,,xmoe"], "an empty name"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exam", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_file_that_is_imported_as_well_has_its_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(imports, "_IMPORTED", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(ROUTERS, "mine", ROUTERS["smoe"])
    del ROUTERS["mine"]
    file = tmp_path / "mine.py"
    file.write_text(ROUTER.replace("from my_scale import SCALE", ""))
    imports.import_named(str(file))
    values = parser().parse_args([str(file), "--quick"])
    values.imports = [str(file)]
    assert plan_of(values).rows == (*ALWAYS, "mine")
    for module in [name for name in sys.modules if name.startswith("pointsman_import_")]:
        del sys.modules[module]


def test_what_a_task_lacks_is_no_refusal_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_DATA", str(tmp_path))
    monkeypatch.setattr("pointsman_lab.exam.sequences.language_bytes", language_bytes.__wrapped__)
    with pytest.raises(RunError, match="holds none of the tasks"):
        fill(TASKS["languages"], "plain", 1, tmp_path, never, lambda _: None)
    assert "refused" not in read_cell(tmp_path, "languages", "plain")
    assert "languages" not in [one.name for one in tasks(None)]


ROUTER = '''
from my_scale import SCALE
from pointsman.routers.frame.registry import register_router
from pointsman.routers.frame.stages import Stages
from pointsman.routers.papers.topk import LinearScorer


@register_router("mine", paper="none")
def mine(layer):
    """A linear router."""
    return Stages(LinearScorer(layer.dim, layer.columns))
'''


def test_an_exam_that_goes_on_knows_what_its_folder_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(imports, "_IMPORTED", {})
    monkeypatch.setitem(ROUTERS, "mine", ROUTERS["smoe"])
    del ROUTERS["mine"]
    file = tmp_path / "mine.py"
    file.write_text(ROUTER.replace("from my_scale import SCALE", ""))
    imports.import_named(str(file))
    (tmp_path / "out").mkdir()
    held = {"version": VERSION, "rows": ["mine"], "tasks": ["clusters"], "seeds": 1, "imports": [str(file)]}
    (tmp_path / "out" / "exam.json").write_text(json.dumps(held))
    for rows in ("mine,smoe", "smoe"):
        values = parser().parse_args([rows])
        values.imports, values.out = [], tmp_path / "out"
        assert plan_of(values).imports == (str(file),)
    for module in [name for name in sys.modules if name.startswith("pointsman_import_")]:
        del sys.modules[module]


def test_a_row_is_of_one_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of another file that registers its name, nor with another module beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("pointsman_lab.exam.exam.do_all", lambda *_, **__: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "my_scale", sys)
    monkeypatch.setitem(ROUTERS, "mine", ROUTERS["smoe"])
    out = tmp_path / "out"

    def begun(name: str, source: str, scale: str) -> str:
        monkeypatch.setattr(imports, "_IMPORTED", {})
        del sys.modules["my_scale"], ROUTERS["mine"]
        (tmp_path / name).write_text(source)
        (tmp_path / "my_scale.py").write_text(f"SCALE = {scale}")
        file = imports.import_named(str(tmp_path / name))
        examine(Plan(("oracle", "mine"), (), 1, (file,)), out, jobs=1, progress=Quiet(), ended=never)
        return file

    begun("mine.py", ROUTER, "1")
    begun("copy.py", ROUTER, "1")
    with pytest.raises(RunError, match=r"my_scale\.py is not what it was when router 'mine' was trained"):
        begun("third.py", ROUTER, "2")
    file = begun("fourth.py", ROUTER, "1")
    with pytest.raises(RunError, match=r"mine\.py is not what it was"):
        begun("other.py", ROUTER + "# another\n", "1")
    examine(Plan(("oracle",), (), 1, (file,)), out, jobs=1, progress=Quiet(), ended=never)
    assert json.loads((out / "exam.json").read_text())["origins"].keys() == {"mine"}
    for module in [name for name in sys.modules if name.startswith("pointsman_import_")]:
        del sys.modules[module]


def test_where_a_router_crashed_is_told(short: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS, "mine", ROUTERS["smoe"])
    monkeypatch.setattr(cells_module, "run", lambda *given: [][1])
    with pytest.raises(IndexError) as crashed:
        fill(short, "mine", 1, tmp_path, never, lambda _: None)
    told = "on the exam's task clusters: mine, seed 1000; every run that ended is kept"
    assert crashed.value.__notes__ == [told]


def test_a_crash_costs_its_cell_alone(
    short: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(task: Task, row: str, *given: Any) -> dict[str, Any]:
        return [][1] if row == "smoe" else {"value": 0.1}  # type: ignore[no-any-return]

    monkeypatch.setattr(cells_module, "run", crash)
    words = ["exam", "smoe,xmoe", "--tasks", "clusters", "--seeds", "1", "--jobs", "1", "--again"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "IndexError: list index out of range\non the exam's task clusters: smoe, seed 1000" in told
    assert told.endswith("a router crashed, see above: clusters smoe; the same command tries again\n")
    assert read_cell(tmp_path, "clusters", "xmoe")["runs"]
    monkeypatch.setattr(cells_module, "run", lambda *given: {"value": 0.1})
    assert main([*words, "--out", str(tmp_path)]) == 0


def test_what_another_exam_wrote_before_the_folder_was_held_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def later(out: Path) -> Iterator[None]:
        held = {"version": VERSION, "rows": ["xmoe"], "tasks": ["zipf"], "seeds": 3}
        write_whole(out / "exam.json", json.dumps(held))
        yield

    monkeypatch.setattr("pointsman_lab.exam.exam.alone", later)
    whole = examine(Plan(("oracle",), ("clusters",), 1), tmp_path, jobs=1, progress=Quiet(), ended=never)
    assert (whole.rows, whole.tasks, whole.seeds) == (("xmoe", "oracle"), ("clusters", "zipf"), 3)


def test_of_a_cell_that_is_begun_again_the_record_is_shown_until_it_is_whole(
    short: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {("clusters", "smoe"): {"row": "smoe", "tried": [], "runs": {str(seed): {} for seed in range(8)}}}
    monkeypatch.setattr("pointsman_lab.exam.exam.record", lambda: known)
    fill(short, "smoe", 1, tmp_path, never, lambda _: None)
    assert len(collect(Plan(("smoe",), ("clusters",), 8), tmp_path)["clusters", "smoe"]["runs"]) == 8
    assert len(collect(Plan(("smoe",), ("clusters",), 1), tmp_path)["clusters", "smoe"]["runs"]) == 1


def test_quick_tasks_are_tasks() -> None:
    assert [one.name for one in tasks(list(QUICK))] == list(QUICK)
