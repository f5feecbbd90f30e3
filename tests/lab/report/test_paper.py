"""Published figures, and ours beside them: each cell only where data, split, k and router agree."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.recipes import preset as make_preset
from pointsman_lab.recipes import recipe, recipes
from pointsman_lab.registry import presets
from pointsman_lab.report.cells import canonical, changed_settings
from pointsman_lab.report.paper import PaperComparison, paper_tables
from pointsman_lab.report.published import papers
from pointsman_lab.runs.record import read_run
from tests.lab.report.fixtures import dump, write_comparison, write_run

FINETUNED = {
    "format": 1, "task": "sst2", "classes": ["bad", "good"], "freeze": [], "balance": None, "pooling": "mean",
    "head_dropout": 0.1, "from_scratch": False,
}  # fmt: skip


def table(paths: list[Path] | Path, paper: str, number: str) -> PaperComparison:
    return next(one for one in paper_tables(paths, paper).tables if one.published.number == number)


def enwik8_run(path: Path, router: str, seed: int, values: dict[int, float], preset: str, steps: int) -> Path:
    write_run(path, router, seed, values=values, top_k=(1, 2, 4, 8, 16), experts=16, steps=10)
    about = {"router": router, "data": "enwik8:newlines=drop", "steps": steps, "seed": seed}
    if preset in presets():
        dump(path / "config.json", make_preset(preset, **about).to_dict())
    elif preset in recipes():
        dump(path / "config.json", recipe(preset, router=router, seed=seed).with_overrides({"steps": steps}).to_dict())
    else:
        config = json.loads((path / "config.json").read_text())
        dump(path / "config.json", {**config, "data": about["data"], "preset": preset, "steps": steps})
    return path


def published(paper: str, number: str) -> dict[str, tuple[float | None, ...]]:
    return {line.label: line.values for line in next(t for t in papers()[paper].tables if t.number == number).lines}


def test_figures_that_the_papers_state_in_their_text() -> None:
    """Numbers that the running text quotes, and averages that tables print: a second source for the transcription."""
    enwik8 = published("hyperrouter", "Table 1 (enwik8)")
    assert (enwik8["SMoE-Dropout"][0], enwik8["HyperRouter"][0]) == (3.02, 1.48)
    words = published("hyperrouter", "Table 1 (WikiText-103)")
    assert (words["SMoE-Dropout"][0], words["HyperRouter"][0]) == (560.93, 65.17)
    for values in published("x-moe", "Table 1").values():
        pos, ner, xq, xq_em, ml, ml_em, ty, ty_em, xnli, paws, average = (value or 0.0 for value in values)
        tasks = [pos, ner, (xq + xq_em) / 2, (ml + ml_em) / 2, (ty + ty_em) / 2, xnli, paws]
        assert sum(tasks) / 7 == pytest.approx(average, abs=0.1)
    for values in published("x-moe", "Table 4").values():
        *directions, average = (value or 0.0 for value in values)
        assert sum(directions) / 9 == pytest.approx(average, abs=0.1)
    eight = published("mutual-inform", "Table 6 (K=16)")
    assert eight["SMoE (M=8)"][1] - eight["Attention-inform SMoE (M=8)"][1] == pytest.approx(1.64)  # type: ignore[operator]
    thirty_two = published("mutual-inform", "Table 6 (K=32)")
    assert thirty_two["SMoE"][1] - thirty_two["Attention-inform SMoE"][1] == pytest.approx(1.56)  # type: ignore[operator]


SUMS = {
    "hyperrouter": (31.70, 2165.71, 22.312, 18.718, 2082.22, 23.3072, 99.02, 40_124_300),
    "mutual-inform": (963.80, 490.86, 495.58, 0, 1333.83, 582.69, 387.225, 448.70, 426.64, 12.498, 584.00),
    "x-moe": (3349.7, 99.96, 1084.0, 889.6, 904.5, 545.03, 290.6),
}
"""The sum of all figures of each table, as they were typed from the papers."""


@pytest.mark.parametrize("name", SUMS)
def test_no_published_figure_has_changed(name: str) -> None:
    tables = papers()[name].tables
    found = [sum(value for line in one.lines for value in line.values if value is not None) for one in tables]
    assert found == pytest.approx(SUMS[name], abs=1e-6)


def test_tables_that_repeat_each_other_agree() -> None:
    one, three, eight = (published("mutual-inform", f"Table {n}") for n in (1, 3, 8))
    for label in ("SMoE (M=2)", "Similarity-inform SMoE (M=2)", "Attention-inform SMoE (M=2)"):
        assert one[label] == three[label]
    assert eight["Similarity, tau=1.0"] == one["Similarity-inform SMoE (M=2)"][:2]
    assert eight["Attention, sigma=1.0"] == one["Attention-inform SMoE (M=2)"][:2]
    assert published("x-moe", "Table 5")["N/2"] == published("x-moe", "Table 3")["yes / yes / yes"]


def test_ours_stand_in_their_cells_by_setting(tmp_path: Path) -> None:
    paths = [
        enwik8_run(tmp_path / "a", "hyperrouter", 0, {1: 1.5, 16: 1.2}, "hyperrouter-enwik8-small", 400_000),
        enwik8_run(tmp_path / "b", "hyperrouter", 1, {1: 1.7, 16: 1.2}, "hyperrouter-enwik8-small", 400_000),
        enwik8_run(tmp_path / "c", "hyperrouter", 0, {2: 2.0}, "tiny", 2_000),
    ]
    beside = table(paths, "hyperrouter", "Table 1 (enwik8)")
    rows = {(row[0], row[1]): row[2:] for row in beside.grid().rows}
    assert rows["HyperRouter", "published"] == ["1.48", "1.25", "1.19", "1.17", "1.16"]
    ours = rows["", "ours: hyperrouter-enwik8-small, 400,000 steps"]
    assert ours == [
        "1.600 ± 0.141",
        "-",
        "-",
        "-",
        "1.200 ± 0.000",
    ]
    assert rows["", "ours: tiny, 2,000 steps (not the paper's setting)"] == ["-", "2.000", "-", "-", "-"]
    medium = table(paths, "hyperrouter", "Table 2 (medium)")
    assert all("not the paper's setting" in name for name in medium.ours)


def test_other_data_routers_splits_and_k_stay_out(tmp_path: Path) -> None:
    write_comparison(tmp_path / "c", ("hyperrouter", "frozen-scaled"))  # on stdlib
    paper = paper_tables(tmp_path / "c", "hyperrouter")
    assert all(set(beside.ours) <= {"counted from the model"} for beside in paper.tables)
    run = enwik8_run(tmp_path / "r", "hyperrouter:share=true", 0, {1: 1.5}, "small", 400_000)
    assert not table(run, "hyperrouter", "Table 1 (enwik8)").ours
    run = enwik8_run(tmp_path / "v", "smoe", 0, {1: 1.5}, "small", 400_000)
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["results"][0]["split"] = "valid"
    dump(run / "evaluation.json", evaluation)
    assert not table(run, "hyperrouter", "Table 1 (enwik8)").ours


def test_fine_tuned_runs_and_attacked_text(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_comparison(path, ("hyperrouter",), (0,), top_k=(1, 8, 16), experts=16)
    run = next((path / "runs").glob("*/seed-0"))
    for variant, about, accuracy in (
        ("sst2", {"freeze": [], "balance": None}, 0.8),
        ("sst2,freeze=router", {"freeze": ["router"], "balance": None}, 0.1),
        ("sst2,from-scratch", {"freeze": [], "balance": None, "from_scratch": True}, 0.2),
    ):
        tuned = write_run(
            run / "finetune" / variant / "seed-0", "hyperrouter", metric="accuracy", values={8: accuracy, 16: accuracy}
        )
        config = json.loads((tuned / "config.json").read_text())
        dump(tuned / "config.json", {**config, "data": "sst2"})
        dump(tuned / "finetune.json", {**FINETUNED, **about})
    beside = table(path, "hyperrouter", "Table 3")
    assert list(beside.ours) == ["sst2, 400 steps (not the paper's setting)"]
    rows = {(row[0], row[1]): row[2:] for row in beside.grid().rows}
    assert rows["", "ours: sst2, 400 steps (not the paper's setting)"] == ["80.00", "-", "-", "-"]
    assert beside._printed(1.2345) == "1.2345"
    assert (beside._printed(2.0), beside._printed(None)) == ("2.00", "-")
    lines = list(csv.DictReader(io.StringIO(paper_tables(path, "hyperrouter").csv())))
    third = [line for line in lines if line["table"] == "Table 3" and line["seeds"] == "1"]
    assert {(line["ours"], line["std"]) for line in third} == {("80.0", "-")}

    words = write_run(tmp_path / "w", "smoe", values={2: 40.0}, metric="perplexity")
    config = json.loads((words / "config.json").read_text())
    dump(words / "config.json", {**config, "data": "wikitext-103"})
    attacked = {"split": "test", "top_k": 2, "metric": "perplexity"}
    results = [
        {**attacked, "value": 99.0, "attack": {"kind": "word", "rate": 0.1}},
        {**attacked, "value": 45.0, "attack": {"kind": "word", "rate": 0.01}},
        {**attacked, "value": 50.0, "attack": {"kind": "word", "rate": 0.025}},
    ]
    dump(words / "attacks-word-wikitext-103-test.json", {"results": results})
    valid = {"split": "valid", "top_k": 2, "metric": "perplexity", "value": 39.0}
    dump(words / "evaluation-wikitext-103-valid.json", {"results": [valid]})
    rows = table(words, "mutual-inform", "Table 3").grid().rows
    assert rows[1][2:] == ["39.00", "40.00", "-", "50.00"]


def test_each_fine_tuning_counts_once(tmp_path: Path) -> None:
    write_comparison(tmp_path / "c", ("hyperrouter",), (0, 1, 2), top_k=(8, 16), experts=16)
    for seed, accuracies in ((0, (0.8, 0.8)), (1, (0.6, 0.6)), (2, (0.7, 0.7))):
        run = next((tmp_path / "c" / "runs").glob(f"*/seed-{seed}"))
        for task_seed, accuracy in zip((seed, 1000 + seed), accuracies, strict=True):
            values = {8: accuracy, 16: accuracy}
            folder = run / "finetune" / "sst2" / f"seed-{task_seed}"
            tuned = write_run(folder, "hyperrouter", task_seed, metric="accuracy", values=values)
            config = json.loads((tuned / "config.json").read_text())
            dump(tuned / "config.json", {**config, "data": "sst2"})
            dump(tuned / "finetune.json", FINETUNED)
    [cells] = table(tmp_path / "c", "hyperrouter", "Table 3").ours.values()
    assert cells
    assert all(len(cell.values) == 6 and cell.mean == pytest.approx(0.7) for cell in cells.values())


def test_a_preset_with_other_settings_is_not_the_papers(tmp_path: Path) -> None:
    for change, told in (
        ({}, "small, 400,000 steps"),
        ({"batch_size": 1}, "small, 400,000 steps, batch_size=1 (not the paper's setting)"),
    ):
        run = enwik8_run(tmp_path / told, "smoe", 0, {16: 1.5}, "small", 400_000)
        config = json.loads((run / "config.json").read_text())
        dump(run / "config.json", {**config, **change, "eval_batch_size": 3})
        assert list(table(run, "hyperrouter", "Table 1 (enwik8)").ours) == [told]


def test_runs_of_other_settings_share_no_cell(tmp_path: Path) -> None:
    runs = [enwik8_run(tmp_path / name, "smoe", 0, {16: value}, "small", 400) for name, value in (("a", 1.5), ("b", 2))]
    config = json.loads((runs[1] / "config.json").read_text())
    with pytest.raises(RunError, match=r"a and .*b: both are seed 0 of small, 400 steps"):
        table(runs, "hyperrouter", "Table 1 (enwik8)")
    dump(runs[1] / "config.json", {**config, "learning_rate": 0.5})
    ours = table(runs, "hyperrouter", "Table 1 (enwik8)").ours
    assert [[cell.mean for cell in cells.values()] for cells in ours.values()] == [[1.5], [2.0]]


@pytest.mark.parametrize("router", ["smoe", "hyperrouter", "dense"])
def test_rows_of_a_recipe_are_the_papers_whatever_the_router(tmp_path: Path, router: str) -> None:
    config = recipe("hyperrouter-enwik8-small-code", router=router)
    run = enwik8_run(tmp_path / "r", router, 0, {16: 1.5}, "hyperrouter-enwik8-small-code", config.steps)
    assert changed_settings(read_run(run), "hyperrouter-enwik8-small-code") == {}


def test_presets_of_tables_exist() -> None:
    for each_paper in papers().values():
        for each in each_paper.tables:
            assert set(each.presets) <= presets().keys() | recipes().keys(), each.number


def test_entropy_by_router(tmp_path: Path) -> None:
    run = enwik8_run(tmp_path / "r", "smoe", 0, {16: 1.5}, "small", 400_000)
    rows = table(run, "hyperrouter", "Tables 4 and A5").grid().rows
    assert rows[1][2:] == ["2.0000", "1.9000", "1.8000", "1.7000"]


def test_routers_of_one_line_have_a_row_each(tmp_path: Path) -> None:
    for router, value in {"vmoe": 0.5, "vmoe+similarity": 0.6, "vmoe+similarity:source=input:tau=1.0": 0.7}.items():
        run = write_run(tmp_path / router, router, metric="accuracy", top_k=(2,), values={2: value}, layers=2)
        config = json.loads((run / "config.json").read_text())
        config["model"]["family"], config["data"] = "vit", "cifar10-10k"
        dump(run / "config.json", config)
        evaluation = json.loads((run / "evaluation.json").read_text())
        evaluation["results"][0]["routers"]["blocks.1.moe"]["load"] = [0.25, 0.75, *[0.0] * 6]
        dump(run / "evaluation.json", evaluation)
    paths = sorted(tmp_path.iterdir())
    rows = table(paths, "mutual-inform", "Table 2").grid().rows
    ours = {row[1].partition("model.dim=64")[2]: row[2] for row in rows if "tiny" in row[1]}
    assert ours == {
        " (not the paper's setting)": "50.00",
        " (not the paper's setting), vmoe+similarity": "60.00",
        " (not the paper's setting), vmoe+similarity:source=input:tau=1.0": "70.00",
    }
    loads = table(paths, "mutual-inform", "Figure 4").grid().rows
    assert loads[0] == ["V-MoE", "published", "-", "-", "-"]
    assert loads[1][2:] == ["2.000", "0.000", "4.000"]


def test_lines_of_glam_fill_at_any_size(tmp_path: Path) -> None:
    for router, value in {"smoe": 60.0, "smoe+similarity": 50.0, "smoe+attention:sigma=1": 55.0}.items():
        run = write_run(tmp_path / router, router, metric="perplexity", top_k=(2,), values={2: value})
        dump(run / "config.json", make_preset("tiny-glam", router=router, data="wikitext-103").to_dict())
    rows = table(sorted(tmp_path.iterdir()), "mutual-inform", "Table 1 (GLaM)").grid().rows
    assert [row[3] for row in rows if row[1].startswith("ours: tiny-glam")] == ["60.00", "50.00", "55.00"]


def test_counted_figures_are_those_of_the_model() -> None:
    flops = table([], "hyperrouter", "Table A3").grid().rows
    assert flops[-1][2:] == ["3.735", "4.004", "4.541", "5.614", "7.762"]
    assert flops[1][2:] == ["-", "-", "-", "-", "7.758"]
    assert table([], "hyperrouter", "Table A4").grid().rows[-1][2:] == ["1,024", "1,122,576", "19,505,356"]


def test_specs_are_compared_by_meaning() -> None:
    assert canonical("xmoe:tau0=0.30:gate=sigmoid") == canonical("xmoe:gate=sigmoid:tau0=0.3")
    assert canonical("smoe+similarity:tau=1") == canonical("smoe+similarity:tau=1.0")
    assert canonical("smoe+similarity:tau=1") != canonical("smoe+similarity:tau=2")


def test_every_spec_is_one_that_can_be_asked_for() -> None:
    from pointsman.routers.frame.registry import list_mixers, list_routers, parse_spec

    for each_paper in papers().values():
        for one in each_paper.tables:
            for spec in {spec for line in one.lines for spec in line.routers}:
                head, _, mixer = spec.partition("+")
                if (not mixer or mixer.partition(":")[0] in list_mixers()) and "switch:gate" not in spec:
                    assert head.partition(":")[0] in [*list_routers(), "dense", "dense-dropout", "plain"]
                    parse_spec(spec)


@pytest.mark.parametrize("name", list(papers()))
def test_written_in_every_format(tmp_path: Path, name: str) -> None:
    paths = paper_tables([], name).write(tmp_path)
    assert [path.name for path in paths] == [f"paper-{name}.{end}" for end in ("txt", "csv", "md", "tex")]
    for path in paths:
        assert not re.search(r"\bnan\b|None", path.read_text())
    rows = list(csv.DictReader(io.StringIO(paths[1].read_text())))
    assert len(rows) >= sum(len(one.lines) * len(one.columns) for one in papers()[name].tables)


def test_unknown_paper() -> None:
    with pytest.raises(RunError, match="did you mean 'hyperrouter'"):
        paper_tables([], "hyper-router")
