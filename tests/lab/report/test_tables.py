"""The comparison table against figures worked out by hand."""

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman._errors import RunError
from pointsman_lab.cli.main import main
from pointsman_lab.report.cell import Cell, Paired, by_pretraining, metric, significantly_best, squared_variation
from pointsman_lab.report.language_table import LanguageTable
from pointsman_lab.report.results import tidy
from pointsman_lab.report.tables import ComparisonTable, cost_of
from pointsman_lab.report.task_table import TaskTable
from pointsman_lab.runs.comparison import Comparison, read, read_comparison, required_plan, save_plan, with_shown
from pointsman_lab.runs.paths import REPEAT
from pointsman_lab.runs.record import RunRecord
from tests.lab.report.fixtures import write_comparison, write_finetuning, write_run


def test_cell_statistics_by_hand() -> None:
    cell = Cell({0: 1.0, 1: 2.0, 2: 6.0})
    assert cell.mean == 3.0
    assert cell.std == pytest.approx(math.sqrt(7.0))  # (4 + 1 + 9) / 2
    assert Paired([*cell.values.values()]).half == pytest.approx(4.302653 * math.sqrt(7.0 / 3.0))
    assert cell.text(2) == "3.00 ± 2.65"
    assert Cell({4: 1.25}).text(1, sign=True) == "+1.2"
    assert (Cell({}).text(3), Cell({}).mean, Cell({4: 1.0}).std, Paired([1.0]).half) == ("-", None, None, None)
    assert [Cell({0: -0.0004}).text(3, sign=sign) for sign in (False, True)] == ["0.000", "+0.000"]  # no -0.000
    assert Paired([-0.004, -0.004]).text(2) == "+0.00"
    assert squared_variation({"load": [1.0, 3.0]}) == 0.25


def test_the_cost_of_a_token_of_a_fine_tuning_is_that_of_what_trains(tmp_path: Path) -> None:
    def cost(**more: Any) -> Mapping[str, int]:
        evaluation = {"results": [{}], "cost": {"flops": 5, "active": 20, "total": 30}, "parameters": 7, **more}
        return cost_of([RunRecord(tmp_path, "smoe", 0, {}, evaluation=evaluation)])

    assert cost()["total"] == 30
    assert cost(protocol={"frozen": []})["total"] == 7


def hand_made(path: Path) -> Path:
    """Two routers, two seeds; k=2 exists for the first only, and the second's seed 1 has no figure at k=1."""
    write_comparison(
        path,
        routers=("smoe", "hyper_x|a&b"),
        seeds=(0, 1),
        missing=[(r, s) for r in ("smoe", "hyper_x|a&b") for s in (0, 1)],
    )
    for router, seed, values in (
        ("smoe", 0, {1: 2.0, 2: 1.5}),
        ("smoe", 1, {1: 2.2, 2: 1.7}),
        ("hyper_x|a&b", 0, {1: 1.9}),
        ("hyper_x|a&b", 1, {1: float("nan")}),
    ):
        write_run(path / "runs" / re.sub(r"\W", "", router) / f"seed-{seed}", router, seed, values=values)
    return path


def test_mean_spread_and_missing_cells(tmp_path: Path) -> None:
    table = ComparisonTable.read(hand_made(tmp_path / "c"))
    assert table.top_k == [1, 2]
    assert table.grid().header == ["router", "k=1", "k=2", "entropy", "router params", "s/step", "seeds"]
    assert table.grid().rows == [
        ["smoe", "2.100 ± 0.141", "1.600 ± 0.141", "1.850 ± 0.000", "2,080", "0.0505", "2/2"],
        ["hyper_x|a&b", "1.900", "-", "1.850 ± 0.000", "2,080", "0.0505", "2/2"],
    ]
    assert table.best(1) == table.best(2) == set(), "one seed tells nothing apart"
    for shown in (table.text(), table.csv(), table.markdown(), table.latex()):
        assert "nan" not in shown
        assert "None" not in shown.replace("None has three", "")


def test_differences_pair_seeds(tmp_path: Path) -> None:
    table = ComparisonTable.read(hand_made(tmp_path / "c"))
    assert table.differences()["hyper_x|a&b"][1].values == {0: pytest.approx(-0.1)}  # seed 1 has no partner
    assert table.difference_grid().rows == [["hyper_x|a&b", "-0.100", "-"]]
    flipped = ComparisonTable.read(tmp_path / "c", baseline="hyper_x|a&b")
    assert flipped.difference_grid().rows == [["smoe", "+0.100", "-"]]


def test_difference_spread_is_that_of_the_pairs_not_of_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_comparison(path, routers=("a", "b"), seeds=(0, 1), missing=[(r, s) for r in "ab" for s in (0, 1)])
    for router, seed, value in (("a", 0, 1.0), ("a", 1, 3.0), ("b", 0, 0.5), ("b", 1, 2.5)):
        write_run(path / "runs" / router / f"seed-{seed}", router, seed, values={1: value})
    table = ComparisonTable.read(path)
    cell = table.differences()["b"][1]
    assert (cell.mean, cell.std) == (-0.5, 0.0)
    assert not table.difference_grid().best, "two seeds"
    shares = replace(table, metric=metric("accuracy"))
    assert shares.paired()["b"][1].mean == -50.0


def test_unfinished_and_missing_seeds_are_counted(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", missing=[("hyperrouter", 2)], unfinished=[("smoe", 1)])
    table = ComparisonTable.read(path)
    assert [(row.done, row.missing) for row in table.rows] == [([0, 2], [1]), ([0, 1, 2], []), ([0, 1], [2])]
    assert "Missing: smoe: seeds 1; hyperrouter: seeds 2" in table.text()
    table = replace(table, names={"smoe": "Plain", "hyperrouter": "smoe"})
    assert "Missing: Plain: seeds 1; smoe: seeds 2" in table.text()


def test_nothing_done_prints_dashes(tmp_path: Path) -> None:
    path = write_comparison(
        tmp_path / "c", seeds=(0,), missing=[(r, 0) for r in ("smoe", "smoe-dropout", "hyperrouter")]
    )
    table = ComparisonTable.read(path)
    assert table.grid().rows[0] == ["smoe", "-", "-", "-", "0/1"]
    table.write(path)
    assert (path / "table.tex").read_text().count(r"\\") == 4


def test_baselines_have_no_router_parameters(tmp_path: Path) -> None:
    write_run(tmp_path / "r", "dense", values={8: 1.0})
    assert ComparisonTable.read(tmp_path / "r").rows[0].router_parameters is None


def test_a_dense_baseline_is_subtracted_at_every_k(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("dense", "smoe"), (0,), missing=[("dense", 0), ("smoe", 0)])
    for router, values in (("dense", {8: 3.0}), ("smoe", {1: 3.5, 2: 2.75})):
        write_run(path / "runs" / router / "seed-0", router, values=values)
    table = ComparisonTable.read(path)
    assert {k: cell.mean for k, cell in table.differences()["smoe"].items()} == {1: 0.5, 2: -0.25, 8: None}
    back = ComparisonTable.read(path, baseline="smoe")  # what a dense model has at k = N says nothing about less
    assert {cell.mean for cell in back.differences()["dense"].values()} == {None}


def test_csv_reads_back(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(ComparisonTable.read(hand_made(tmp_path / "c")).csv())))
    assert float(rows[0]["k=1 mean"]) == pytest.approx(2.1)
    assert (rows[1]["router"], rows[1]["k=1 std"], rows[1]["k=2 mean"], rows[1]["k=2 seeds"]) == (
        "hyper_x|a&b",
        "-",
        "-",
        "0",
    )


def test_markdown_and_latex_escape(tmp_path: Path) -> None:
    table = ComparisonTable.read(hand_made(tmp_path / "c"))
    lines = table.grid().markdown().splitlines()
    assert lines[3].startswith(r"| `hyper_x\|a&b` | 1.900 | - |")
    unescaped = [len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]]
    assert len(set(unescaped)) == 1
    latex = table.latex()
    assert r"\texttt{hyper\_x\textbar{}a\&b} & 1.900 & -" in latex
    assert r"$\pm$" in latex
    assert latex.count("{") == latex.count("}")


def test_text_is_aligned(tmp_path: Path) -> None:
    lines = ComparisonTable.read(write_comparison(tmp_path / "c")).text().splitlines()
    assert len({len(line) for line in lines[2:7]}) == 1


def test_higher_is_better_for_accuracy(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", metric="accuracy")
    table = ComparisonTable.read(path)
    best = max(table.rows, key=lambda row: row.quality[1].mean or 0).router
    assert table.best(1) == {best}


@pytest.mark.parametrize("damage", ["{", "[1]", "\x00"])
def test_damaged_files_are_named(tmp_path: Path, damage: str) -> None:
    path = write_comparison(tmp_path / "c")
    (path / "runs" / "r1" / "seed-0" / "evaluation.json").write_text(damage)
    with pytest.raises(RunError, match=r"r1/seed-0/evaluation\.json"):
        ComparisonTable.read(path)


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such directory"):
        ComparisonTable.read(tmp_path / "nowhere")
    with pytest.raises(RunError, match="neither a run directory"):
        ComparisonTable.read(tmp_path)
    path = write_comparison(tmp_path / "c")
    with pytest.raises(RunError, match="did you mean 'hyperrouter'"):
        ComparisonTable.read(path, baseline="hyperouter")
    evaluation = path / "runs" / "r1" / "seed-0" / "evaluation.json"
    other = json.loads(evaluation.read_text())
    other["results"][0]["metric"] = "perplexity"
    evaluation.write_text(json.dumps(other))
    with pytest.raises(RunError, match="different metrics: bits_per_character, perplexity"):
        ComparisonTable.read(path)


def test_several_runs_of_one_kind_are_refused(tmp_path: Path) -> None:
    from pointsman_lab.runs.comparison import gather
    from pointsman_lab.runs.record import read_run

    runs = [read_run(write_run(tmp_path / name, "smoe", 0)) for name in ("a", "b")]
    with pytest.raises(RunError, match="two runs with router 'smoe' and seed 0"):
        gather(runs)


def test_a_comparison_beside_another_one_is_told_with_its_runs(tmp_path: Path) -> None:
    first, second = (write_comparison(tmp_path / name, ("smoe",), (0, 1)) for name in ("a", "b"))
    runs = ", ".join(str(first / "runs" / "r0" / f"seed-{seed}") for seed in (0, 1))
    told = f"{first} is a comparison: name it alone, or of its runs those to report: {runs}"
    with pytest.raises(RunError, match=f"^{re.escape(told)}$"):
        read([first, second])


def test_attacks_at_other_values_of_k_stay_in_their_columns(tmp_path: Path) -> None:
    from pointsman_lab.runs.comparison import read_comparison
    from pointsman_lab.tasks.attacks.table import AttackTable

    comparison = read_comparison(write_comparison(tmp_path / "c", ("smoe",), (0,), top_k=(1, 2)))
    row = {"split": "test", "metric": "bits_per_character", "tokens": 9}
    attack = {"kind": "word", "rate": 0.1, "seed": 0, "word": "AAA"}
    results = [
        *({**row, "top_k": k, "value": float(k)} for k in (1, 2)),
        {**row, "top_k": 2, "value": 7.0, "attack": attack},
    ]
    [run] = comparison.runs.values()
    record = {"results": results, "protocol": {"tokens": 9}, "routing": []}
    lines = list(csv.DictReader(AttackTable.of(comparison, "a", [(run, record)]).csv().splitlines()))
    assert [(line["k=1 mean"], line["k=2 mean"]) for line in lines] == [("1.0", "2.0"), ("-", "7.0")]
    less = {**attack, "rate": 0.05}
    record["results"].append({**row, "top_k": 2, "value": 5.0, "attack": less})
    record["routing"] = [{"attack": attack, "layers": {"a": {"top1": 0.4}}},
                         {"attack": less, "layers": {"a": {"top1": 0.1}, "b": {"top1": 0.3}}}]  # fmt: skip
    table = AttackTable.of(comparison, "a", [(run, record)])
    assert [one.rate for one in table.conditions] == [0.0, 0.05, 0.1]
    assert table.further()[0].rows == [["smoe", "0.200", "0.400"]]


def test_the_best_is_bold_only_where_its_intervals_say_so(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_comparison(path, routers=("a", "b", "c"), missing=[(router, seed) for router in "abc" for seed in range(3)])
    far, near = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 1.02, "c": 3.0}
    for place, router in enumerate("abc"):
        for seed in range(3):
            wobble = 0.05 * seed + 0.01 * ((seed + place) % 2)
            values = {1: far[router] + wobble, 2: near[router] + wobble}
            write_run(path / "runs" / router / f"seed-{seed}", router, seed, top_k=(1, 2), values=values)
    table = ComparisonTable.read(path)
    assert table.best(1) == {"a"}
    assert table.best(2) == set()
    assert "**1.0" in table.markdown()
    two = {"a": Cell({0: 1.0, 1: 1.1}), "b": Cell({0: 1.2, 1: 1.301})}
    assert significantly_best(two, lower_is_better=True) == set(), "two seeds"
    gap = {"a": Cell(dict.fromkeys(range(3), 0.0)), "b": Cell({0: 0.65, 1: 1.0, 2: 1.35})}  # t = 4.9
    assert significantly_best(gap, lower_is_better=True) == {"a"}  # beyond 4.3
    more = {**gap, "c": Cell(dict.fromkeys(range(3), 9.0))}
    assert significantly_best(more, lower_is_better=True) == set(), "within 6.2, that of two comparisons"
    assert "corrected for the 4 intervals of" in table.difference_grid().caption
    repeated = replace(table, repeats=True, rows=[
        replace(row, quality={1: Cell({seed * REPEAT: value for seed, value in row.quality[1].values.items()})})
        for row in table.rows
    ])  # fmt: skip
    assert repeated.best(1) == set(), "three fine-tunings of one run"


def test_fine_tunings_of_a_run_count_once(tmp_path: Path) -> None:
    assert by_pretraining({0: 1.0, REPEAT: 3.0, 1: 5.0, 2 + REPEAT: 7.0}) == {0: 2.0, 1: 5.0, 2: 7.0}
    path = write_comparison(tmp_path / "c", ("smoe", "xmoe"), (0, 1))
    comparison = read_comparison(path)
    loads = iter([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.1, 0.4, 0.5]])
    for (router, seed), run in sorted(comparison.runs.items()):
        for own in (seed, seed + REPEAT, seed + 2 * REPEAT, 5):  # of 5 another seed was pre-trained
            gain = 0.1 * (router == "xmoe") + 0.02 * (own // REPEAT) + 0.01 * seed + 0.5 * (own == 5)
            file = write_finetuning(run.path, "sst2", router, own, metric=gain) / "evaluation.json"
            record = json.loads(file.read_text())
            shares = next(loads) if router == "smoe" and own < 2 * REPEAT and own != 5 else None
            record["results"] = [{**row, "top_k": 2} for row in record["results"][:1]]
            record["results"][0]["routers"] = {"a": {"load": shares}} if shares else {}
            file.write_text(json.dumps(record))
    table = TaskTable.of(read_comparison(path), "sst2")
    assert [row.done for row in table.table.rows] == [[0, 1, 1000, 1001, 2000, 2001]] * 2
    [cells] = table.table.paired().values()
    assert cells[2].values == pytest.approx([10.0, 10.0]), "a run's three fine-tunings are one value, in points"
    assert "fine-tunings of one pre-trained run count as one, their mean; mean" in table.text()
    assert "count as one" not in ComparisonTable.read(path).text()
    by_hand = [np.corrcoef(one, two)[0, 1] for one, two in (([5, 3, 2], [6, 3, 1]), ([2, 3, 5], [1, 4, 5]))]
    assert table.routing["smoe"]["consistency"] == pytest.approx(np.mean(by_hand))
    for file in path.glob("runs/*/*/finetune/sst2/*/evaluation.json"):
        record = json.loads(file.read_text())
        record["protocol"]["from_scratch"] = True
        file.write_text(json.dumps(record))
    assert TaskTable.of(read_comparison(path), "sst2").routing["smoe"]["consistency"] is None


def test_fine_tunings_of_one_run_in_a_comparison_of_one_seed_are_one_value(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "xmoe"), (0,))
    for (router, _), run in read_comparison(path).runs.items():
        for own in range(3):  # as `finetune RUN --seeds 3` makes them
            write_finetuning(run.path, "sst2", router, own, metric=0.7 + 0.1 * (router == "xmoe") + 0.001 * own)
    table = TaskTable.of(read_comparison(path), "sst2")
    assert "not comparable" not in table.note
    [cells] = table.table.paired().values()
    assert all(one.half is None and len(one.values) == 1 for one in cells.values() if one.values)
    assert not any(table.table.best(k) for k in table.table.top_k)
    file = next(path.glob("runs/*/*/finetune/sst2/*/evaluation.json"))
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "protocol": {**record["protocol"], "steps": 7}}))
    assert TaskTable.of(read_comparison(path), "sst2").note.endswith(
        "; rows differ in steps: their figures are not comparable"
    )


def test_a_strangers_name_ends_no_line(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "xmoe"), (0,))
    plan = json.loads((path / "comparison.json").read_text())
    name = "X. A\n\\input{/etc/passwd}\n` # "
    (path / "comparison.json").write_text(json.dumps({**plan, "shown": {"names": {"smoe": name}}}))
    table = ComparisonTable.read(path)
    assert not re.search(r"^\\input", table.latex(), re.MULTILINE)
    assert not re.search(r"^ *`? *#", table.markdown(), re.MULTILINE)


def test_experts_a_token_are_a_column_where_they_are_not_k(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", routers=("smoe", "top-p"), seeds=(0, 1))
    assert "experts/token" not in ComparisonTable.read(path).text()
    for file in path.glob("runs/r1/*/evaluation.json"):
        record = json.loads(file.read_text())
        for result in record["results"]:
            for layer in result["routers"].values():
                layer["experts_per_token"] = 0.5 * result["top_k"]
        file.write_text(json.dumps(record))
    table = ComparisonTable.read(path)
    assert [row[table.grid().header.index("experts/token")] for row in table.grid().rows] == ["-", "4.00 ± 0.00"]
    assert [row["experts_per_token"] for row in tidy(read_comparison(path)) if row["k"] == 8] == [8, 8, 4, 4]
    for file in path.glob("runs/*/*/evaluation.json"):  # all experts at every k, beside k
        record = json.loads(file.read_text())
        for result in record["results"]:
            for layer in result["routers"].values():
                layer["experts_per_token"] = 8.0 if "r1" in file.parts else result["top_k"]
                layer["entropy"] = float(result["top_k"])
        file.write_text(json.dumps(record))
    table = ComparisonTable.read(path)
    each = " / ".join(["8.00 ± 0.00"] * 4)
    assert [row[table.grid().header.index("experts/token")] for row in table.grid().rows] == ["8.00 ± 0.00", each]
    assert [row.entropy.mean for row in table.rows] == [8.0, 8.0], "at the largest k"
    exact = [{k: Cell({0: float(k)}) for k in ks} for ks in ((1, 2), (1, 8))]
    rows = [replace(row, experts=each) for row, each in zip(table.rows, exact, strict=True)]
    assert replace(table, rows=rows).varies, "the first row's largest k is not that of the table"
    for file in path.glob("runs/*/*/evaluation.json"):  # k at every k, beside a dense row's larger one
        record = json.loads(file.read_text())
        for result in record["results"]:
            result["top_k"] = result["top_k"] if "r0" in file.parts else 16
            result["routers"] = {"a": {"experts_per_token": result["top_k"]}} if "r0" in file.parts else {}
        file.write_text(json.dumps(record))
    assert "experts/token" not in ComparisonTable.read(path).text()


def test_names_baseline_and_columns_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_comparison(tmp_path / "mine", ["smoe", "xmoe:gate=sigmoid", "hyperrouter"], [0, 1, 2])
    base = ["compare", "--out", str(tmp_path / "mine")]
    assert main([*base, "--names", "smoe=Plain,xmoe:gate=sigmoid=X & Co", "--baseline", "hyperrouter"]) == 0
    said = capsys.readouterr().out
    assert "Plain" in said
    assert "smoe" not in said
    assert "Paired differences to hyperrouter" in said
    assert main([*base, "--columns", "k=8,seeds"]) == 0
    table = ComparisonTable.read(tmp_path / "mine")
    assert table.baseline == "hyperrouter"
    assert list(table.grid().header) == ["router", "k=8", "seeds"]
    assert "over seeds. Bold:" in table.caption, "no column that needs a word is shown"
    assert [row[0] for row in table.grid().rows] == ["Plain", "X & Co", "hyperrouter"]
    latex = (tmp_path / "mine" / "table.tex").read_text()
    assert r"\label{tab:table}" in latex
    assert r"\texttt{X \& Co}" in latex
    caption = next(line for line in latex.splitlines() if r"\caption" in line)
    assert caption.count(". ") == 0
    assert "router & k=8 & seeds" in latex
    assert "smoe,0,1" in (tmp_path / "mine" / "results.csv").read_text()  # the figures keep the specs
    page = (tmp_path / "mine" / "report.html").read_text("utf-8")
    assert "X &amp; Co" in page
    assert '"Plain"' in page
    assert main([*base, "--columns", "all"]) == 0
    assert len(ComparisonTable.read(tmp_path / "mine").grid().header) > 3
    assert main([*base, "--baseline", "smoe", "--columns", "k=8,s/step,entropy"]) == 0
    assert "at the largest k; s/step: median training step. Bold" in ComparisonTable.read(tmp_path / "mine").caption
    assert "Paired differences to Plain" in (tmp_path / "mine" / "report.html").read_text("utf-8")
    for words, says in [
        (["--names", "smo=Plain"], "allowed is ROW=TEXT: did you mean 'smoe'"),
        (["--names", "hyperrouter=Plain"], "two rows would have the same name"),
        (["--baseline", "smoo"], "did you mean 'smoe'"),
        (["--columns", "k=9"], "did you mean 'k=8'"),
        (["--columns", "k=8", "--steps", "3"], "--steps has no effect"),
        (["--columns", "k=8", "--top-k", "1"], "--top-k has no effect"),
        (["--columns", "k=8", "--freeze", "router"], "--freeze has no effect"),
    ]:
        before = (tmp_path / "mine" / "comparison.json").read_bytes()
        assert main([*base, *words]) == 2
        assert says in capsys.readouterr().err
        assert (tmp_path / "mine" / "comparison.json").read_bytes() == before
    assert main([*base, "--names", "smoe="]) == 0
    assert "smoe" in capsys.readouterr().out


def test_rows_and_columns_that_nobody_gets_are_told_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["compare", "--routers", "smoe,xmoe", "--data", "stdlib", "--out", str(tmp_path / "new")]
    assert main([*base, "--baseline", "smoo"]) == 2
    assert "did you mean 'smoe'" in capsys.readouterr().err
    assert main([*base, "--names", "xmo=X-MoE"]) == 2
    assert "did you mean 'xmoe'" in capsys.readouterr().err
    for title, meant in (("entrpy", "entropy"), ("k=16", "k=1")):
        assert main([*base, "--columns", f"k=8,experts/token,{title}"]) == 2
        assert f"--columns {title}: did you mean '{meant}'" in capsys.readouterr().err
    tune = ["--tune", "router_lr_scale=1,4", "--train-top-k", "2"]
    assert main([*base, *tune, "--baseline", "smoo"]) == 2
    assert "did you mean 'smoe'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_rows_that_tuning_renamed_are_known_by_both_names() -> None:
    tuned = {"smoe:lr_scale=4": {"row": "smoe", "router_lr_scale": "4"}, "xmoe": {"row": "xmoe"}}
    plan = {"routers": ["xmoe", "smoe:lr_scale=4"], "tuned": tuned}
    said = {"names": {"smoe:lr_scale=4": "Plain"}, "baseline": "smoe:lr_scale=4"}
    for row in ("smoe", "smoe:lr_scale=4"):
        assert with_shown(plan, [f"{row}=Plain"], row, [])["shown"] == said
    both = {**plan, "routers": ["smoe", *plan["routers"]]}
    assert with_shown(both, ["smoe=Plain"], "smoe", [])["shown"] == {"names": {"smoe": "Plain"}, "baseline": "smoe"}


def test_columns_of_other_rows_are_known_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_comparison(tmp_path / "mine", ["smoe"], [0], top_k=[3])
    monkeypatch.setattr("pointsman_lab.training.compare.compare", lambda *_, **__: None)
    words = ["compare", "--routers", "smoe", "--top-k", "1", "--columns", "k=3,s/step", "--out", str(out)]
    assert main(words) == 0
    assert list(ComparisonTable.read(out).grid().header) == ["router", "k=3", "s/step"]


def test_a_kept_column_that_is_gone_is_left_out(tmp_path: Path) -> None:
    write_comparison(tmp_path / "mine", ["smoe"], [0], top_k=[1, 2])
    save_plan(tmp_path / "mine", {**required_plan(tmp_path / "mine"), "shown": {"columns": ["k=2", "k=8"]}})
    assert list(ComparisonTable.read(tmp_path / "mine").columns) == ["k=2"]


def test_figures_of_two_parts_are_in_no_table(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "mine", ["smoe", "xmoe"], [0])
    file = out / "runs" / "r1" / "seed-0" / "evaluation.json"
    file.write_text(file.read_text().replace('"test"', '"valid"'))
    with pytest.raises(RunError, match="evaluated on different parts: test, valid"):
        ComparisonTable.read(out)


def test_a_router_at_one_k_is_no_base_at_every_k() -> None:
    def run(router: str, ks: list[int], routed: bool) -> RunRecord:
        results = [
            {"split": "test", "top_k": k, "metric": "accuracy", "value": k / 10, "languages": {"en": {"value": k / 10}},
             "routers": {"a": {}} if routed else {}} for k in ks
        ]  # fmt: skip
        return RunRecord(Path(router), router, 0, {}, evaluation={"results": results})

    for routed, rows in ((True, ["xmoe k=2"]), (False, ["xmoe k=1", "xmoe k=2"])):
        table = LanguageTable.of([run("smoe", [2], routed), run("xmoe", [1, 2], True)], "mine")
        assert table is not None
        assert [row[0] for row in table.difference_grid().rows] == rows


def test_a_row_that_is_added_while_names_are_given_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mine"
    write_comparison(out, ["smoe"], [0])
    make = ComparisonTable.of

    def another_adds(comparison: Comparison) -> ComparisonTable:
        monkeypatch.setattr(ComparisonTable, "of", make)
        save_plan(out, {**required_plan(out), "routers": ["smoe", "xmoe"]})
        return make(comparison)

    monkeypatch.setattr(ComparisonTable, "of", another_adds)
    assert main(["compare", "--out", str(out), "--names", "smoe=Plain"]) == 0
    assert required_plan(out)["routers"] == ["smoe", "xmoe"]
    assert required_plan(out)["shown"]["names"] == {"smoe": "Plain"}
