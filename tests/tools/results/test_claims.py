"""Intervals against known quantiles, and the page of claims on invented grids."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from pointsman._errors import RunError
from pointsman_lab.intervals import student_cdf, student_quantile
from pointsman_lab.report.cell import Paired
from pointsman_lab.report.results import COLUMNS, load_comparison, write_results
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import read_comparison
from pointsman_lab.tasks.images.robust_table import robust_tables
from tests.lab.report.fixtures import write_comparison, write_finetuning, write_run
from tools.results import claims
from tools.results.claims import Page
from tools.results.claims_file import CLAIMS
from tools.results.inference import Prior
from tools.results.measures import DIAGNOSED, Measure


@pytest.mark.parametrize(
    ("probability", "df", "expected"),  # tables of Student's t
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.975, 30, 2.04227), (0.995, 2, 9.92484),
     (0.9995, 3, 12.92398), (0.5, 5, 0.0)],
)  # fmt: skip
def test_quantiles(probability: float, df: int, expected: float) -> None:
    assert student_quantile(probability, df) == pytest.approx(expected, abs=1e-4)
    assert student_cdf(-expected, df) == pytest.approx(1 - probability, abs=1e-6)


def test_intervals_are_corrected_for_the_number_of_comparisons() -> None:
    values = [1.0, 1.2, 1.4]
    one, ten = Paired(values), Paired(values, 10)
    assert one.half == pytest.approx(4.30265 * 0.2 / math.sqrt(3), rel=1e-4)
    assert ten.half == pytest.approx(student_quantile(0.9975, 2) * 0.2 / math.sqrt(3))
    assert ten.half_of(1) == one.half
    assert (one.sign, ten.sign, Paired([-1.0, -1.2, -1.4]).sign) == (1, 0, -1)
    assert (Paired([1.0]).half, Paired([]).mean, Paired([]).sign) == (None, None, None)


PAGE = """
[grids.tiny]
command = "pointsman compare --data stdlib"
after = ["pointsman evaluate GRID --robust c"]

[grids.more]
command = "pointsman compare --data images"
family = "images"

[grids.none]
command = "pointsman compare --data elsewhere"
"""


def claim(row: str, expected: str = "less", grid: str = "tiny", **more: object) -> str:
    fields = {"aspect": "quality", "claim": f"{row} {expected}", "where": "Table 1", "grid": grid, "measure": "quality",
              "k": 1, "row": row, "base": "smoe", "expected": expected, **more}  # fmt: skip
    lines = [f"{key} = {value if isinstance(value, int | float) else repr(value)}" for key, value in fields.items()]
    return "\n[[claims]]\n" + "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return invented(tmp_path)


def invented(tmp_path: Path) -> Path:
    """A folder with the grid `tiny`: rows that are ahead, behind and the same, and one of two seeds."""
    routers = {"smoe": 3.0, "ahead": 2.0, "behind": 4.0, "same": 3.0, "few": 1.0}
    skipped = [(router, seed) for router in routers for seed in range(3)]
    write_comparison(tmp_path / "tiny", routers=list(routers), missing=skipped)
    for place, (router, value) in enumerate(routers.items()):
        for seed in range(2 if router == "few" else 3):
            off = 0.1 * seed + 0.001 * ((seed + place) % 3) + (0.3 * (seed - 1) if router == "same" else 0)
            write_run(
                tmp_path / "tiny" / "runs" / router / f"seed-{seed}", router, seed, top_k=(1,), values={1: value + off}
            )
    return tmp_path


def test_every_verdict(folder: Path) -> None:
    rows = [("ahead", "less"), ("ahead", "more"), ("behind", "less"), ("same", "less"), ("few", "less")]
    text = PAGE + "".join(claim(*row) for row in rows) + claim("ahead", grid="none") + claim("ahead", control="behind")
    text += claim("same", "equal", margin=9.0)
    text += "\n[[claims]]\naspect = 'scale'\nclaim = 'it scales'\nwhere = 'Table 2'\ntest = 'pointsman compare'\n"
    (folder / CLAIMS).write_text(text)
    page = Page.read(folder)
    assert [one.verdict for one in page.tested] == [
        "holds", "does not hold", "does not hold", "undecided", "not run (2 of 3 seeds)", "not run", "holds", "holds",
        "not run",
    ]  # fmt: skip
    assert page.tested[6].against_control.startswith("-2.0")
    assert page.tested[6].against_control.endswith("against `behind`")
    judged = page.tested[3].judged
    assert judged is not None
    assert page.tested[3].verdict_text.startswith(f"undecided: sees {judged.smallest:.3f}; needs ")
    assert judged.alpha == pytest.approx(0.05 / 6), "six with all their seeds; the control is no claim"
    shown = page.write(folder).read_text()
    assert "| it scales | Table 2 | `pointsman compare` | - | - | - | - | not run |" in shown
    assert "| language (exploratory) | 9 | 3 | 2 | 0 | 1 | 3 |" in shown
    commands = page.shown_commands("tiny")
    assert commands[0].endswith("--routers smoe,ahead,behind,same,few \\\n    --seeds 3 --out records/tiny")
    assert commands[1:] == ["pointsman evaluate records/tiny --robust c"]
    assert all(len(line) <= 120 for line in shown.splitlines() if not line.startswith("|"))


def test_a_primary_verdict_says_what_a_plain_t_test_would(folder: Path) -> None:
    rows = ("ahead", "behind", "same")
    text = PAGE + '[families.main]\nkind = "primary"\nseeds = 3\n' + "".join(claim(row, family="main") for row in rows)
    (folder / CLAIMS).write_text(text)
    one, *others = Page.read(folder).tested
    assert one.judged is not None
    assert one.plain is not None
    assert one.plain.spread == (pytest.approx(statistics.stdev(one.values)), 2), "its own, and not moderated"
    assert one.judged.spread != one.plain.spread
    every = [one, *others]
    assert one.judged.prior == Prior.of([statistics.variance(each.values) for each in every], [2] * 3)
    assert all(other.plain is not None for other in others)
    assert replace(one, plain=replace(one.plain, p=0.01)).verdict_text == "**holds**"
    assert replace(one, plain=replace(one.plain, p=0.2)).verdict_text == "**holds**; by a plain t-test undecided"


def test_a_base_at_another_k(folder: Path) -> None:
    (folder / CLAIMS).write_text(PAGE + claim("ahead", base_k=8))
    (one,) = Page.read(folder).tested
    assert one.verdict == "not run", "nothing was evaluated at k = 8"
    assert one.test == "`tiny`: `ahead` against `smoe` at k = 8, quality, k = 1"


def test_families_have_their_own_correction_and_seeds(folder: Path) -> None:
    rows = claim("ahead") + claim("behind", "more", family="main") + claim("same", family="main", margin=5.0)
    text = PAGE + '[families.main]\nkind = "primary"\nseeds = 3\n' + rows
    (folder / CLAIMS).write_text(text)
    page = Page.read(folder)
    assert {name: family.kind for name, family in page.families.items()} == {
        "main": "primary", "language": "exploratory",
    }  # fmt: skip
    assert [one.verdict for one in page.tested] == ["holds", "holds", "equivalent"]
    assert page.tested[2].verdict_text == "**equivalent** within 5"
    assert [one.judged.alpha for one in page.tested if one.judged] == pytest.approx([0.05, 0.025, 0.025])
    (folder / CLAIMS).write_text(text + claim("few", family="main"))
    alphas = [one.judged.alpha for one in Page.read(folder).tested if one.judged]
    assert alphas == pytest.approx([0.05, 0.05 / 3, 0.05 / 3]), "a claim without its seeds counts in its family"
    (folder / CLAIMS).write_text(text.replace("seeds = 3", "seeds = 12"))
    assert Page.read(folder).tested[1].verdict == "not run (3 of 12 seeds)"


def test_a_gain_over_a_cheaper_dense_row_needs_a_control(tmp_path: Path) -> None:
    million = {"plain": 4, "smoe": 6, "smoe+uniform": 6, "dense-matched": 6, "dense": 9, "xmoe+uniform": 6}
    write_comparison(tmp_path / "tiny", routers=list(million))
    for file in (tmp_path / "tiny" / "runs").rglob("evaluation.json"):
        router = json.loads(file.with_name("config.json").read_text())["model"]["router"]
        record = json.loads(file.read_text())
        record["cost"] = {"top_k": 2, "flops": million[router] * 10**6, "active": 1, "total": 1}
        if router in ("plain", "dense", "dense-matched"):
            record["results"] = [{key: row[key] for key in row if key != "routers"} for row in record["results"]]
        file.write_text(json.dumps(record))
    for base, control in (("plain", ""), ("plain", "dense"), ("plain", "xmoe+uniform")):
        (tmp_path / CLAIMS).write_text(PAGE + claim("smoe", base=base, control=control))
        with pytest.raises(RunError, match="plain costs 4 MFLOP a token, smoe 6: name a control"):
            Page.read(tmp_path)
    for base, control in (("plain", "smoe+uniform"), ("plain", "dense-matched"), ("dense", ""), ("smoe+uniform", "")):
        (tmp_path / CLAIMS).write_text(PAGE + claim("smoe", base=base, control=control))
        assert len(Page.read(tmp_path).tested) == 1


def test_claims_about_time_compare_turns(folder: Path) -> None:
    timed = claim("ahead", measure="", grid="", timings="time.json", limit=1.07, test="bench")
    (folder / CLAIMS).write_text(PAGE + timed)
    assert [one.verdict for one in Page.read(folder).tested] == ["not run"]
    (folder / "time.json").write_text(json.dumps({"seconds": {"smoe": [1.0, 2.0, 1.0], "ahead": [1.01, 2.04, 1.03]}}))
    page = Page.read(folder)
    assert page.tested[0].values == pytest.approx([-0.06, -0.05, -0.04])
    assert list(page.families) == ["time"]
    shown = "| `bench`: `ahead` over `smoe`, against 1.07 | -0.050 ± 0.025 of the time | 3 turns | 0.013 | - | holds |"
    assert shown in page.markdown()
    (folder / CLAIMS).write_text(PAGE + timed.replace("'smoe'", "'smo'"))
    with pytest.raises(RunError, match="no row 'smo'"):
        Page.read(folder)
    (folder / CLAIMS).write_text(PAGE + timed)
    for turns in ([1.0, 2.0], [1.0, 0.0, 1.0]):
        (folder / "time.json").write_text(json.dumps({"seconds": {"smoe": turns, "ahead": [1.0, 2.0, 3.0]}}))
        with pytest.raises(RunError, match="a time above 0 is expected for every turn"):
            Page.read(folder)


def test_claims_about_a_programs_figures_compare_losses(folder: Path) -> None:
    told = claim("ahead", measure="", grid="", losses="bits.json", test="python -m tools.routes", family="routes")
    (folder / CLAIMS).write_text(PAGE + told)
    assert [one.verdict for one in Page.read(folder).tested] == ["not run"]
    (folder / "bits.json").write_text(json.dumps({"bits": {"smoe": [1.0, 2.0, 1.0], "ahead": [0.9, 1.89, 0.91]}}))
    page = Page.read(folder)
    assert page.tested[0].values == pytest.approx([-0.1, -0.11, -0.09])
    assert "| `python -m tools.routes`: `ahead` against `smoe` | -0.100 ± 0.025 bits | 3 |" in page.markdown()
    (folder / "bits.json").write_text(json.dumps({"bits": {"smoe": [1.0, 2.0, 1.0], "ahead": [0.9, 1.89]}}))
    with pytest.raises(RunError, match="a figure is expected for every seed of both"):
        Page.read(folder)
    (folder / CLAIMS).write_text(PAGE + told.replace("family = 'routes'\n", ""))
    with pytest.raises(RunError, match="names its family"):
        Page.read(folder)


def test_claims_about_the_exam_compare_scores_of_its_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"oracle": 0.0, "plain": 1.0, "smoe": 0.5, "xmoe": 0.2}
    cells = {("norms", row): {"runs": {str(s): {"value": value + 0.01 * s * (row == "xmoe")} for s in range(8)}}
             for row, value in values.items()}  # fmt: skip
    monkeypatch.setattr(claims, "record", lambda: cells)
    one = claim("xmoe", measure="", grid="", exam="norms", expected="more", control="thor", margin=0.05)
    (folder / CLAIMS).write_text(PAGE + one + one.replace("'norms'", "'many'"))
    page = Page.read(folder)
    held, missing = page.tested
    assert held.values == pytest.approx([0.3 - 0.01 * seed for seed in range(8)])
    assert (held.verdict, held.against_control, missing.verdict) == ("holds", "`thor`: not run", "not run")
    assert "| [exam](../exam/index.md), norms: `xmoe` against `smoe` | +0.265 ± " in page.markdown()
    assert list(page.families) == ["exam"]
    (folder / CLAIMS).write_text(PAGE + one.replace("'norms'", "'norm'"))
    with pytest.raises(RunError, match="unknown task 'norm' of the exam"):
        Page.read(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[claims]", "not TOML"),
        (PAGE + claim("a", colour="red"), "claim 1: colour: allowed"),
        (PAGE + claim("a", expected="fewer"), "claim 1: expected='fewer': allowed are less, more and equal"),
        (PAGE + "[families.main]\nkind = 'primry'\n", "family 'main': kind='primry': .*did you mean 'primary'"),
        (PAGE + claim("a", k="'many'"), "claim 1: k=.*allowed is a whole number"),
        (PAGE + "[[claims]]\naspect = 'quality'\n", "claim 1: claim is missing"),
        (PAGE.replace("command", "comand"), "an object with 'command'"),
        (
            PAGE + "[[trends]]\nname = 'n'\ntitle = 't'\nmeasure = 'quality'\nx = 'k'\ngrids = [[1]]\nrows = ['a']",
            "trend 1: grids",
        ),
        (PAGE + claim("a", measure="qualiti"), "did you mean 'quality'"),
        (PAGE + claim("a", k=0), "claim 1: measure='quality' needs a k"),
        (PAGE + claim("a", grid="tinny"), "did you mean 'tiny'"),
    ],
)
def test_a_wrong_claim_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / CLAIMS).write_text(text)
    with pytest.raises(RunError, match=message):
        Page.read(tmp_path)


def test_results_are_one_line_a_router_seed_and_k(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    path = write_comparison(tmp_path / "c", routers=("smoe", "xmoe"), seeds=(0, 1), top_k=(1, 8))
    lines = write_results(path).read_text().splitlines()
    table = load_comparison(path)
    assert lines[0] == ",".join(COLUMNS)
    assert len(lines) - 1 == len(table) == 2 * 2 * 2
    assert list(table.columns) == list(COLUMNS)
    assert set(table[table.router == "xmoe"].k) == {1, 8}


def test_paired_differences_have_intervals_from_three_seeds_on(folder: Path) -> None:
    table = ComparisonTable.read(folder / "tiny")
    caption = table.difference_grid().caption
    assert "corrected for the 3 intervals" in caption, "one row has two seeds"
    files = {file.suffix: file.read_text() for file in table.write(folder)}
    assert "| `ahead` | **-1.0" in files[".md"]
    assert r"\textbf{-1.0" in files[".tex"]


def test_differences_of_one_seed_have_no_interval(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "tiny", routers=["smoe", "xmoe"], seeds=[0])
    caption = ComparisonTable.read(path).difference_grid().caption
    assert caption.endswith("mean. None has three seeds, so none has an interval.")


def test_figures_of_a_diagnosis(folder: Path) -> None:
    layer = {
        "num_experts": 8, "collapse": {"value": 2.0, "classes": 8}, "mixing": {"own_mean": 0.25, "effective_mean": 3.0},
        "load": {"effective": 6.0, "cv": 1.0, "dead": []},
        "specialisation": {"mutual_information": 0.75, "corrected": 0.5},
    }  # fmt: skip
    history = [
        {
            "checkpoint": "step-5",
            "layers": {
                "a": {
                    "fluctuation": {"top1": value, "sets": 2 * value},
                    "collapse": {"value": 7 * value},
                }
            },
        }
        for value in (0.5, 0.125)
    ]
    found = {
        "layers": {"a": layer, "b": {"num_experts": 8, "collapse": {"value": 4.0, "classes": 8}}},
        "history": history,
    }
    (folder / "tiny/runs/ahead/seed-1/diagnostics.json").write_text(json.dumps(found))
    comparison = read_comparison(folder / "tiny")
    figures = {name: Measure(name).of(comparison, "ahead") for name in DIAGNOSED}
    assert figures == {
        "collapse": {1: 3.0}, "collapse change": {1: -1.5}, "fluctuation": {1: 0.125}, "set fluctuation": {1: 0.25},
        "neighbours": {1: 3.0},
        "own weight": {1: 0.25}, "effective experts": {1: 6.0}, "information": {1: 0.5},
    }  # fmt: skip
    assert Measure("collapse").of(comparison, "smoe") == {}, "a run that was not diagnosed has no figure"


def test_consistency_is_over_the_fine_tunings_of_one_run(folder: Path) -> None:
    loads = {1: [[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], 2: [[0.5, 0.3, 0.2], [0.6, 0.2, 0.2]]}  # opposite, nearly equal
    for seed, of in loads.items():
        for repeat, load in enumerate(of):
            run = folder / f"tiny/runs/ahead/seed-{seed}"
            path = write_finetuning(run, "xnli", "ahead", seed + 1000 * repeat, metric=0.5) / "evaluation.json"
            record = json.loads(path.read_text())
            for row in record["results"]:
                row["routers"] = {"a": {"load": load if row["top_k"] == 1 else [0.5, 0.5, 0.0]}}
            path.write_text(json.dumps(record))
    found = Measure("consistency", 1, task="xnli").of(read_comparison(folder / "tiny"), "ahead")
    assert found == {1: pytest.approx(-23 / 31), 2: pytest.approx(5 / math.sqrt(28))}


def test_figures_of_shifted_images(folder: Path) -> None:
    layers = {"a": {"top1": 0.1, "sets": 0.25}, "b": {"top1": 0.1, "sets": 0.75}}
    rows = [
        {"corruption": "fog", "severity": severity, "top_k": 2, "value": 0.5 - 0.1 * severity} for severity in (1, 3)
    ]
    corrupted = {
        "kind": "c",
        "clean": [{"top_k": 2, "value": 0.5}],
        "results": rows,
        "routing": [{"top_k": 2, "layers": layers}],
    }
    outliers = {"kind": "o", "results": [{"top_k": 2, "aupr": 0.625}]}
    for name, record in (("c", corrupted), ("o", outliers)):
        file = folder / f"tiny/runs/ahead/seed-2/robust-{name}.json"
        file.write_text(json.dumps({**record, "protocol": {"top_k": [2]}}))
    comparison = read_comparison(folder / "tiny")

    def of(name: str) -> dict[int, float]:
        return Measure(name, 2).of(comparison, "ahead")

    assert of("drop") == {2: pytest.approx(20.0)}, "the clean accuracy minus the mean of the corrupted ones, in points"
    assert of("moved") == {2: pytest.approx(0.5)}
    assert of("outliers") == {2: pytest.approx(62.5)}
    assert Measure("moved", 1).of(comparison, "ahead") == of("moved"), "recorded at the k of training alone"
    assert Measure("outliers", 1).of(comparison, "ahead") == {}, "it has routers: its figures hold at their own k"
    assert Measure("mixed entropy").of(comparison, "ahead") == Measure("entropy").of(comparison, "ahead")
    file = folder / "tiny/runs/ahead/seed-2/evaluation.json"
    record = json.loads(file.read_text())
    record["results"][0]["routers"] = {
        name: {"entropy": 2.0, "mixed_entropy": value} for name, value in zip("ab", (1, 2), strict=True)
    }
    file.write_text(json.dumps(record))
    assert Measure("mixed entropy").of(read_comparison(folder / "tiny"), "ahead")[2] == 1.5
    twice = {**outliers, "results": [{"top_k": k, "aupr": k / 10} for k in (1, 4)], "protocol": {"top_k": [1, 4]}}
    (folder / "tiny/runs/ahead/seed-2/robust-o.json").write_text(json.dumps(twice))
    assert Measure("outliers").of(read_comparison(folder / "tiny"), "ahead") == {2: 40.0}, "at the largest k"


def test_an_attack_is_what_it_adds_to_the_clean_figure(folder: Path) -> None:
    row = {"split": "test", "metric": "bits_per_character", "top_k": 1}
    attack = {"kind": "word", "rate": 0.1, "seed": 0, "word": "AAA"}
    results = [{**row, "value": 2.0}, {**row, "value": 2.75, "attack": attack}]
    file = folder / "tiny/runs/ahead/seed-1/attacks-word-enwik8-test.json"
    file.write_text(json.dumps({"protocol": {}, "results": results}))
    comparison = read_comparison(folder / "tiny")
    assert Measure("attack", 1).of(comparison, "ahead") == {1: 0.75}
    assert Measure("attacked", 1).of(comparison, "ahead") == {1: 2.75}
    assert Measure("attack", 1, rate=0.2).of(comparison, "ahead") == {}


@pytest.mark.parametrize("kind", ["c", "o", "pgd", "hard"])
def test_shifted_images_of_a_strangers_file_without_figures(folder: Path, kind: str) -> None:
    rows = [{"top_k": 1, "value": 7.0}, {"top_k": 1, "corruption": "fog", "value": None}]
    record = {"kind": kind, "protocol": {"top_k": [1], "images": 0}, "results": rows, "clean": [{"top_k": 1}],
              "routing": [{}]}  # fmt: skip
    for seed in range(3):
        for router in ("smoe", "ahead"):
            file = folder / f"tiny/runs/{router}/seed-{seed}/robust-{kind}.json"
            file.write_text(json.dumps(record))
    [table] = robust_tables(read_comparison(folder / "tiny"))
    named = {"c": "corrupted", "hard": "accuracy"}.get(kind, "")
    shown = [f"{named} {figure}" for figure in ("mean", "std", "seeds") if named]
    assert table.csv().splitlines()[0] == ",".join(["k", "router", *shown]), "no mCE, no clean"
    file.write_text(json.dumps({**record, "results": [{"top_k": 1, "value": "high"}]}))
    with pytest.raises(RunError, match=r"results.*value: a number"):
        robust_tables(read_comparison(folder / "tiny"))


def test_shifted_images_have_a_best_row_only_where_intervals_say_so(folder: Path) -> None:
    for router, aupr in (("ahead", 0.75), ("behind", 0.5)):
        for seed in range(3):
            row = {"aupr": aupr + 0.01 * seed + 0.001 * (seed % 2) * len(router), "auroc": 0.5 + 0.1 * seed}
            ks = [{"top_k": 1, "fpr95": 0.5, **row}, {"top_k": 2, **row}]
            record = {"kind": "o", "protocol": {"top_k": [1, 2]}, "results": ks, "outlier_data": "o", "base_rate": 0.5}
            (folder / f"tiny/runs/{router}/seed-{seed}/robust-o.json").write_text(json.dumps(record))
    [table] = robust_tables(read_comparison(folder / "tiny"))
    assert [grid.header for grid in table.grids] == [["k=1", "AUPR", "AUROC", "FPR95"], ["k=2", "AUPR", "AUROC"]]
    assert [grid.best for grid in table.grids] == [{(0, 1)}] * 2, "AUROC: equal at every seed"
    lines = table.csv().splitlines()
    shown = [f"{name} {figure}" for name in ("AUPR", "AUROC", "FPR95") for figure in ("mean", "std", "seeds")]
    assert lines[0] == ",".join(["k", "router", *shown])
    assert lines[-1].startswith("2,behind,")
    assert lines[-1].endswith(",-,-,0")
