"""X-MoE's tables beside invented fine-tunings."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman_lab.finetuning.settings import Finetuning
from pointsman_lab.recipes import preset
from pointsman_lab.report.cell import Cell, metric
from pointsman_lab.report.cells import average, setting
from pointsman_lab.report.language_table import LanguageTable
from pointsman_lab.report.paper import paper_tables
from pointsman_lab.report.published import open_paper
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.runs.record import RunRecord
from tests.lab.report.fixtures import dump, write_comparison, write_run
from tools.results.measures import Measure

ROUTERS = ("switch", "xmoe")
TASKS = ("udpos", "panx", "xquad", "mlqa", "tydiqa", "xnli", "pawsx")


def test_the_rule_gives_the_five_published_averages() -> None:
    table = open_paper("x-moe").tables[0]
    assert len(table.lines) == 5
    for line in table.lines:
        *figures, printed = line.values
        assert round(average([(c.task, v) for c, v in zip(table.columns, figures, strict=False)]), 1) == printed  # type: ignore[arg-type]
    assert average([("a", 1.0), ("a", 3.0), ("b", 5.0)]) == 3.5
    assert average([("a", 1.0), ("b", None)]) is None
    translated = open_paper("x-moe").tables[3]
    for line in translated.lines:
        *figures, printed = line.values
        assert average([(c.name, v) for c, v in zip(translated.columns, figures, strict=False)]) == pytest.approx(
            printed, abs=0.06
        )


def tuned(run: Path, variant: str, router: str, seed: int, value: float, **about: Any) -> None:
    """A finished fine-tuning with invented figures."""
    path = run / "finetune" / variant / f"seed-{seed}"
    path.mkdir(parents=True)
    task = variant.partition(",")[0]
    dump(path / "config.json", {"format": 1, "model": {"router": router, "num_experts": 8}, "data": task, "steps": 9,
                                "seed": seed, "preset": "finetune"})  # fmt: skip
    dump(path / "finetune.json", {"format": 1, "task": task, "freeze": [], "balance": None, "classes": [],
                                  "head_dropout": 0.1, "pooling": "first", "from_scratch": False, **about})  # fmt: skip
    row = {"split": "test", "top_k": 1, "metric": "f1" if task in ("panx", "tydiqa", "xquad", "mlqa") else "accuracy",
           "value": value, "exact_match": value - 0.2, "f1_xtreme": value + 0.1, "routers": {}}  # fmt: skip
    protocol = {"task": task, "split": "test", "from_scratch": False, "steps": 9, "balance": None, "frozen": [],
                "trained_with_k": "1", "pooling": "first", "length": 128, "truncated": {}}  # fmt: skip
    dump(path / "evaluation.json", {"format": 1, "checkpoint": "step-9", "protocol": protocol, "results": [row],
                                    "router_parameters": 1, "parameters": 2, "step_seconds": 1.0})  # fmt: skip


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    path = tmp_path / "comparison"
    write_comparison(path, ROUTERS, (0, 1))
    plan = json.loads((path / "comparison.json").read_text())
    for router in ROUTERS:
        for seed in (0, 1):
            run = next(run for key, run in read_comparison(path).runs.items() if key == (router, seed)).path
            for place, task in enumerate(TASKS if (router, seed) != ("xmoe", 1) else TASKS[:-1]):
                tuned(run, task, router, seed, 0.5 + 0.01 * place + 0.02 * seed + 0.1 * (router == "xmoe"))
    assert plan["routers"] == list(ROUTERS)
    return path


def test_a_figure_within_two_errors_of_its_floor_is_marked() -> None:
    lines = {("switch", 1): {"en": Cell({0: 0.61}), "de": Cell({0: 0.57})}}
    floors = {"en": ("majority", 0.5), "de": ("majority", 0.5)}
    errors, costs = {"en": 0.05, "de": 0.05}, {"switch": {"flops": 1_120_000, "active": 458_077, "total": 722_269}}
    table = LanguageTable("xtreme-xnli", ["en", "de"], lines, metric("accuracy"), "", floors, errors, costs)
    figures, floor, error = table.grid().rows
    assert figures[3:] == ["1.12", "458,077", "722,269"]
    assert table.csv().splitlines()[1].endswith("1120000,458077,722269")
    figures = figures[:3]
    assert [cell.endswith(" °") for cell in figures[1:]] == [False, True]
    same = LanguageTable("same", ["en"], {("switch", 1): {"en": Cell({0: 0.5})}}, metric("accuracy"), "", floors)
    assert same.at_floor(("switch", 1), "en"), "a figure equal to its floor, without an error"
    assert (floor[0], error[0]) == ("floor", "standard error over items")
    assert "not above its floor by two standard errors" in table.caption


def test_the_table_by_language_takes_mean_transfer_floors_and_errors_as_recorded(tmp_path: Path) -> None:
    languages = {"en": {"value": 0.9, "error": 0.1, "floor_name": "majority", "floor": 0.5},
                 "de": {"value": 0.6, "error": 0.2, "floor_name": "majority", "floor": 0.3}}  # fmt: skip
    row = {"split": "test", "top_k": 1, "metric": "accuracy", "value": 0.7, "transfer": 0.6, "gap": 0.3, "error": 0.05,
           "languages": languages}  # fmt: skip
    runs = [
        RunRecord(tmp_path, "xmoe", seed, {}, evaluation={"results": [row | {"error": 0.05 + 0.02 * seed}]})
        for seed in (0, 1)
    ]
    table = LanguageTable.of(runs, "xtreme-xnli")
    assert table is not None
    assert table.columns == ["en", "de", "mean", "transfer", "gap"]
    [cells] = table.lines.values()
    assert [cells[name].mean for name in table.columns] == pytest.approx([0.9, 0.6, 0.7, 0.6, 0.3])
    assert table.floors["mean"] == ("majority", pytest.approx(0.4))
    assert table.errors == pytest.approx({"en": 0.1, "de": 0.2, "mean": 0.06})


def test_a_difference_is_at_the_same_k_or_to_a_row_of_one_k() -> None:
    rows = {("smoe", 1): 0.5, ("smoe", 2): 0.6, ("fixed", 8): 0.9, ("xmoe", 2): 0.7}
    lines = {line: {"en": Cell({0: value})} for line, value in rows.items()}
    table = LanguageTable("xtreme-xnli", ["en"], lines, metric("accuracy"), "")
    assert [row[0] for row in table.difference_grid().rows] == ["xmoe k=2"]
    lines = {("dense", 8): lines.pop(("smoe", 1)), **lines}
    table = LanguageTable("xtreme-xnli", ["en"], lines, metric("accuracy"), "", dense=frozenset({"dense"}))
    assert [row[0] for row in table.difference_grid().rows] == ["smoe k=2", "fixed k=8", "xmoe k=2"]


def test_the_papers_first_table_has_one_row_of_ours_with_its_average(comparison: Path) -> None:
    table = paper_tables(comparison, "x-moe").tables[0]
    [setting] = table.ours
    assert setting.startswith("tiny, 400 steps, fine-tuned")
    assert setting.endswith("(not the paper's setting)")
    cells = table.ours[setting]
    place = len(table.published.columns) - 1
    assert len(cells[1, place].values) == 2
    assert len(cells[2, place].values) == 1
    assert cells[1, 0].mean == pytest.approx(0.61)  # POS F1
    by_hand = (0.6 + 0.51 + (0.52 + 0.32) / 2 + (0.53 + 0.33) / 2 + (0.54 + 0.34) / 2 + 0.55 + 0.56) / 7
    assert sorted(cells[1, place].values.values()) == pytest.approx([by_hand, by_hand + 0.02])


@pytest.mark.parametrize(
    ("languages", "others", "papers"),
    [(11, {}, True), (1, {}, False), (11, {"steps": 9}, False), (11, {"settings": {"learning_rate": 0.1}}, False)],
)
def test_a_fine_tuning_is_the_papers_with_its_languages_and_settings(
    languages: int, others: dict[str, Any], papers: bool, tmp_path: Path
) -> None:
    before = preset("xmoe-base", router="xmoe")
    dump(tmp_path / "config.json", before.to_dict())
    data = SimpleNamespace(name="xquad", splits={"train": range(83_219)})
    config = Finetuning("xquad", preset="finetune-xmoe", **others).config(before, data, 0)
    told = "xquad: trained on squad/train-v1.1.json (en 87,599; sha256 0), of which 4,380 for validation; reported: x"
    row = {"languages": {str(number): {} for number in range(languages)}}
    folder = tmp_path / "finetune/xquad,finetune-xmoe/seed-0"
    folder.mkdir(parents=True)
    dump(folder / "finetune.json", {"format": 1, "task": "xquad"})
    evaluation = {"protocol": {"task": told}, "results": [row]}
    run = RunRecord(folder, "xmoe", 0, config.to_dict(), evaluation=evaluation)
    assert setting(run, open_paper("x-moe").tables[0]).endswith("(not the paper's setting)") != papers


def test_a_line_without_a_figure_names_the_data_it_needs(comparison: Path) -> None:
    tables = {one.published.number: one.grid() for one in paper_tables(comparison, "x-moe").tables}
    assert tables["Table 4"].rows[1][1] == "ours: not run; needs WMT-10"
    for path in (comparison / "runs").rglob("finetune/xnli/*/evaluation.json"):
        record = json.loads(path.read_text())
        record["protocol"]["task"] = "xnli: XNLI-dev, split by the premise: 562 premises train (English), 268 test"
        dump(path, record)
    table = paper_tables(comparison, "x-moe").tables[0]
    place = [column.name for column in table.published.columns].index("XNLI")
    assert not any(place == column for found in table.ours.values() for _, column in found)
    assert table.note == "No figures of ours: XNLI, average; they need the published files of XTREME's seven tasks."


def test_tables_3_and_6_are_filled_by_freezing_and_balance(tmp_path: Path) -> None:
    routers = ("xmoe:gate=sigmoid", "xmoe:gate=sigmoid:routing_dim=full")
    write_comparison(tmp_path / "c", routers, (0,))
    for (router, seed), run in read_comparison(tmp_path / "c").runs.items():
        for task in ("xnli", "mlqa"):
            both = {"freeze": ["router", "experts"]}
            tuned(run.path, f"{task},freeze=router+experts,balance=0.01", router, seed, 0.6, **both, balance=0.01)
            tuned(run.path, f"{task},freeze=router+experts,balance=0.1", router, seed, 0.5, **both, balance=0.1)
            tuned(run.path, f"{task},balance=0.01", router, seed, 0.7, balance=0.01)
    tables = {one.published.number: one for one in paper_tables(tmp_path / "c", "x-moe").tables}
    third = tables["Table 3"]
    mine = next(found for name, found in third.ours.items() if "balance=0.01" in name)
    assert mine[0, 0].mean == mine[1, 0].mean == 0.6  # frozen, both routers
    assert mine[3, 0].mean == 0.7  # free
    assert mine[0, 2].mean == pytest.approx(0.4)  # MLQA's exact match
    [(name, sixth)] = [(name, found) for name, found in tables["Table 6"].ours.items() if "freeze" in name]
    assert "balance" not in name
    assert [sixth[line, 0].mean for line in (2, 3)] == [0.6, 0.5]
    assert (0, 0) not in sixth
    text = paper_tables(tmp_path / "c", "x-moe").text()
    assert "71.93" in text
    assert "ours: tiny, 400 steps, fine-tuned freeze=router+experts" in text


def test_translation_is_taken_by_language_and_at_the_k_of_training(tmp_path: Path) -> None:
    languages = [column.language for column in open_paper("x-moe").tables[3].columns if column.language]
    write_comparison(tmp_path / "c", ("switch", "xmoe"), (0,), metric="bleu")
    for (router, _), run in read_comparison(tmp_path / "c").runs.items():
        config, record = (json.loads((run.path / name).read_text()) for name in ("config.json", "evaluation.json"))
        names = languages if router == "switch" else languages[1:]
        config |= {
            "data": f"wmt:{'' if router == 'switch' else '/data/'}wmt10:from={'+'.join(names)}",
            "train_top_k": "2",
        }
        for row in record["results"]:
            values = {name: {"value": 10.0 * row["top_k"] + place} for place, name in enumerate(names)}
            row |= {"metric": "bleu", "languages": values}
        dump(run.path / "config.json", config)
        dump(run.path / "evaluation.json", record)
    table = paper_tables(tmp_path / "c", "x-moe").tables[3]
    [cells] = table.ours.values()
    assert cells[1, 0].mean == 20.0
    assert cells[1, 9].mean == 24.0  # nine languages
    assert cells[2, 1].mean == 20.0
    assert (2, 0) not in cells
    assert (2, 9) not in cells
    seventh = next(one for one in open_paper("x-moe").tables if one.number == "Table 7")
    assert seventh.trained_k


def test_a_column_of_one_k_takes_runs_that_trained_with_it(comparison: Path) -> None:
    for path in (comparison / "runs").rglob("finetune/xnli/*/evaluation.json"):
        record, config = json.loads(path.read_text()), json.loads((path.parent / "config.json").read_text())
        row = record["results"][0]
        record["results"] = [row, {**row, "top_k": 2, "value": 0.9}]
        dump(path, record)
        dump(path.parent / "config.json", config | {"train_top_k": "1" if "xmoe" in str(config) else "2"})
    seventh = next(one for one in paper_tables(comparison, "x-moe").tables if one.published.number == "Table 7")
    [cells] = seventh.ours.values()
    assert {place: len(cell.values) for place, cell in cells.items()} == {(0, 1): 2, (1, 0): 2}
    assert cells[0, 1].mean == 0.9


def test_claims_measure_nats_and_transfer(comparison: Path) -> None:
    for path in (comparison / "runs").rglob("evaluation.json"):
        record = json.loads(path.read_text())
        for row in record["results"]:
            row |= {"nats": 6.0, "transfer": row["value"] / 2}
        dump(path, record)
    read = read_comparison(comparison)
    assert Measure("nats", 1).of(read, "xmoe") == {0: 6.0, 1: 6.0}
    whole, away = (Measure(name, 1, task="panx").of(read, "xmoe") for name in ("accuracy", "transfer"))
    assert whole.keys() == {0, 1}
    assert away == pytest.approx({seed: value / 2 for seed, value in whole.items()})


def test_a_model_without_routers_has_one_figure_for_every_k(comparison: Path) -> None:
    plan = json.loads((comparison / "comparison.json").read_text())
    dump(comparison / "comparison.json", plan | {"routers": [*plan["routers"], "plain"]})
    run = comparison / "runs/plain/seed-0"
    write_run(run, "plain", 0, top_k=(8,), values={8: 3.0})
    record = json.loads((run / "evaluation.json").read_text())
    record["results"] = [row | {"nats": 2.5, "routers": {}} for row in record["results"]]
    dump(run / "evaluation.json", record | {"router_parameters": None})
    read = read_comparison(comparison)
    assert (Measure("nats", 1).of(read, "plain"), Measure("quality", 1).of(read, "plain")) == ({0: 2.5}, {0: 3.0})
    assert Measure("quality", 3).of(read, "xmoe") == {}
