"""The leaderboard: an entry is trained again; one that was tampered with is refused, its checksum made anew or not."""

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman._errors import RunError
from pointsman.routers.frame.registry import ROUTERS
from pointsman_lab._grid import Grid
from pointsman_lab.cli.main import main
from pointsman_lab.exam.entry import unlike_track
from pointsman_lab.runs import imports
from pointsman_lab.runs.sharing import digest, read_entry, signed
from tests.lab.cli.test_compare import SMALL, TEXT
from tools import leaderboard
from tools.leaderboard import (
    ROOT,
    called,
    check,
    compared,
    compared_exam,
    examined_again,
    follow,
    follow_exam,
    page,
    row_of,
)  # fmt: skip

ROUTER = """
import torch
from torch import nn

from pointsman.routers.frame.registry import register_router
from pointsman.routers.frame.stages import Scorer, Stages


class Scaled(Scorer):
    def __init__(self, dim, num_experts):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(num_experts, dim))

    def forward(self, hidden, context):
        return 3 * hidden @ self.weight.to(hidden.dtype).T


@register_router("of-a-stranger", paper="none")
def scaled(layer):
    '''The plain router, its scores times 3.'''
    return Stages(Scaled(layer.dim, layer.columns))
"""


@pytest.fixture(scope="session")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A track of its own with an entry."""
    folder = tmp_path_factory.mktemp("leaderboard")
    text, source, out = folder / "text.txt", folder / "stranger.py", folder / "run"
    text.write_text(TEXT)
    source.write_text(ROUTER)
    words = ["compare", "--routers", "of-a-stranger", "--import", str(source), "--data", str(text), "--steps", "6"]
    assert main([*words, *SMALL, "--eval-tokens", "512", "--jobs", "1", "--out", str(out)]) == 0
    entry = folder / "track" / "mine.json"
    entry.parent.mkdir()
    assert main(["submit", str(out), "--router", "of-a-stranger", "--name", "Mine", "--out", str(entry)]) == 0
    made = json.loads(entry.read_text())
    rules = {"title": "Small", "text": "A text.", "data": str(text), "seconds": 60.0, "seeds": 1, "eval_tokens": 512,
             "num_experts": made["settings"]["model"]["num_experts"], "tolerance": 0.01, "fingerprint": made["data"],
             "threads": made["runs"]["0"]["environment"]["threads"]}  # fmt: skip
    (entry.parent / "track.json").write_text(json.dumps(rules))
    (folder / "README.md").write_text("Rules.")
    return entry


def changed(submitted: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], anew: bool = True) -> Path:
    """A copy of the track whose entry was changed."""
    track = shutil.copytree(submitted.parent, tmp_path / "track")
    entry = json.loads(submitted.read_text())
    change(entry)
    entry["sha256"] = digest(entry) if anew else entry["sha256"]
    (track / submitted.name).write_text(json.dumps(entry))
    return track / submitted.name


def log_of(entry: dict[str, Any]) -> list[float]:
    found: list[float] = entry["runs"]["0"]["log"]["loss"]
    return found


def test_the_page_is_what_the_entries_give() -> None:
    assert (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8") == page(ROOT / "leaderboard")


def test_a_dense_entry_has_a_row_and_one_with_nan_is_refused(tmp_path: Path) -> None:
    file = ROOT / "leaderboard" / "enwik8" / "smoe.json"
    entry = json.loads(file.read_text())
    for run in entry["runs"].values():
        run["evaluation"]["results"] = run["evaluation"]["results"][:1]
    _, *bits, load, _, _ = row_of(entry)
    assert len(set(bits)) == 1
    assert "-" not in (*bits, load)
    log_of(entry)[3] = float("nan")
    (tmp_path / "nan.json").write_text(json.dumps(signed(entry)))
    with pytest.raises(RunError, match=r"nan\.json: a figure in it is no finite number"):
        read_entry(tmp_path / "nan.json")


def test_k_is_n_only_where_it_was_evaluated_and_a_missing_figure_is_refused() -> None:
    folder = ROOT / "leaderboard" / "enwik8"
    rules, text = json.loads((folder / "track.json").read_text()), (folder / "smoe.json").read_text()
    entry = json.loads(text)
    for run in entry["runs"].values():
        run["evaluation"]["results"] = [one for one in run["evaluation"]["results"] if one["top_k"] < 8]
    assert row_of(entry)[3] == "-"
    dense = one_k(json.loads(text), [1, 2])
    dense["router"] = "dense"
    assert float(row_of(dense)[5]) > float(row_of(json.loads(text))[5])
    entry["runs"]["0"]["evaluation"]["results"][0]["value"] = None
    with pytest.raises(RunError, match="seed 0: a figure of its evaluation is missing"):
        follow(entry, rules, "smoe")
    entry = json.loads(text)
    entry["runs"]["0"]["log"]["loss"].pop()
    with pytest.raises(RunError, match=r"its log has \d+ steps and \d+ losses"):
        follow(entry, rules, "smoe")


def one_k(entry: dict[str, Any], asked: list[int]) -> dict[str, Any]:
    """An entry whose runs have figures at k = 8 alone."""
    entry["settings"]["eval_top_k"] = asked
    for run in entry["runs"].values():
        run["evaluation"]["results"] = run["evaluation"]["results"][-1:]
    return entry


def test_a_row_evaluated_at_another_k_alone_is_refused() -> None:
    folder = ROOT / "leaderboard" / "enwik8"
    rules, text = json.loads((folder / "track.json").read_text()), (folder / "smoe.json").read_text()
    follow(one_k(json.loads(text), [1, 2, 4, 8]), rules, "a row with one k")
    with pytest.raises(RunError, match="evaluated at k = 8; the track asks for k = 2"):
        follow(one_k(json.loads(text), [8]), rules, "smoe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda run: run["evaluation"]["results"].pop(0),
            r"figures at k = \[2, 4, 8\], trained again at k = \[1, 2, 4",
        ),
        (lambda run: run.update(step_seconds=run["step_seconds"] / 20), "s a step, trained again"),
        (lambda run: even(run, 2), r"loads of squared variation 0.0 at k = 2, trained again 0\.\d"),
        (lambda run: run["evaluation"]["results"][1].pop("routers"), "loads of squared variation None at k = 2"),
    ],
)
def test_other_ks_and_loads_and_seconds_that_no_machine_has_are_found(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    ours = json.loads((ROOT / "leaderboard" / "enwik8" / "smoe.json").read_text())["runs"]["0"]
    theirs = copy.deepcopy(ours)
    assert compared(theirs, ours, 0.02, "smoe") == "the same bits"
    change(theirs)
    with pytest.raises(RunError, match=message):
        compared(theirs, ours, 0.02, "smoe")
    theirs["environment"]["commit"] = "another"
    with pytest.raises(RunError, match=message):
        compared(theirs, ours, 0.02, "smoe")


def even(run: dict[str, Any], k: int) -> None:
    """A run whose experts are said to have the same load at this k."""
    for result in run["evaluation"]["results"]:
        for layer in result["routers"].values():
            if result["top_k"] == k:
                layer["load"] = [1 / len(layer["load"])] * len(layer["load"])


@pytest.mark.slow
def test_an_entry_is_trained_again(submitted: Path) -> None:
    assert check(submitted) == "the same bits"
    shown = page(submitted.parents[1])
    assert shown.startswith("# Leaderboard\n\nRules.\n\n## Small\n\nA text.\n\n| entry | k = 1 | k = 2 | k = N |")
    assert "| Mine (`of-a-stranger`) | " in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: log_of(entry).__setitem__(3, 0.5), "the log has a loss of 0.5 at step 4"),
        (lambda entry: entry["runs"]["0"]["evaluation"]["results"][0].update(value=0.1), "0.1 at k = 1, trained again"),
        (
            lambda entry: entry["sources"].update(
                {name: of.replace("3 *", "5 *") for name, of in entry["sources"].items()}
            ),
            "the log has a loss of",
        ),
        (lambda entry: entry["settings"].update(learning_rate=0.5), "the log has a loss of"),
    ],
)
def test_what_was_made_up_is_found(
    submitted: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        check(changed(submitted, tmp_path, change))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "anew", "message"),
    [
        (lambda entry: log_of(entry).__setitem__(3, 0.5), False, "its SHA-256 differs"),
        (lambda entry: entry.update(data="other"), True, "trained on other data than the track's"),
        (lambda entry: entry["settings"].update(steps=10**6), True, "s of training; the track allows 60"),
        (lambda entry: entry["runs"].update({"1": entry["runs"]["0"]}), True, r"seeds \[0, 1\]; the track has 0 to 0"),
        (lambda entry: entry["runs"]["0"].pop("log"), True, "log"),
        (lambda entry: entry["settings"]["model"].update(num_experts=3), True, "3 experts; the track has"),
        (lambda entry: entry["runs"]["0"]["environment"].update(threads=99), True, "99 threads; the track has"),
        (
            lambda entry: [one.update(top_k=one["top_k"] + 2) for one in entry["runs"]["0"]["evaluation"]["results"]],
            True,
            "the track asks for k = 2",
        ),
    ],
)
def test_a_rule_that_is_broken_is_named(
    submitted: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], anew: bool, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        check(changed(submitted, tmp_path, change, anew))


@pytest.fixture(scope="session")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A track of the exam with one task, and the record's plain router as its entry."""
    folder = tmp_path_factory.mktemp("leaderboard-exam")
    assert main(["exam", "smoe", "--tasks", "clusters", "--jobs", "1", "--out", str(folder / "exam")]) == 0
    entry = folder / "track" / "smoe.json"
    assert main(["submit", str(folder / "exam"), "--router", "smoe", "--out", str(entry)]) == 0
    rules = {"title": "One task", "text": "Scores.", "tasks": ["clusters"], "seeds": 8, "tolerance": 0.1}
    (entry.parent / "track.json").write_text(json.dumps(rules))
    return entry


def cell_of(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = entry["cells"]["clusters"]
    return found


def test_an_entry_of_the_exam_is_trained_again(examined: Path) -> None:
    assert "trained again" in check(examined)
    (examined.parents[1] / "README.md").write_text("Rules.")
    assert "| entry | mean score | clusters | least |" in page(examined.parents[1])


@pytest.mark.parametrize(
    ("change", "anew", "message"),
    [
        (
            lambda entry: cell_of(entry)["runs"]["0"].update(value=1e-9),
            True,
            "the value 1e-09 is not that of its curve",
        ),
        (lambda entry: cell_of(entry)["chosen"].update(rate=1e-3), True, "what was tried chooses smoe at"),
        (lambda entry: cell_of(entry)["tried"].pop(0), True, "a choice was not tried"),
        (lambda entry: cell_of(entry)["tried"][0].__setitem__(3, "x"), True, r"tried has .*'x'\]; allowed is"),
        (lambda entry: cell_of(entry)["runs"]["0"].update(curve=[[40]]), True, r"its curve has \[40\]; allowed is"),
        (lambda entry: cell_of(entry)["runs"].pop("7"), True, "the track has 0 to 7"),
        (lambda entry: cell_of(entry)["runs"]["7"].update(value=None), True, "seed 7: it diverged"),
        (lambda entry: entry["cells"].update(zipf=cell_of(entry)), True, "the tasks clusters"),
        (lambda entry: cell_of(entry)["runs"]["0"]["curve"][0].__setitem__(1, 0.001), True, "its curve begins with"),
        (lambda entry: entry.update(name="other"), False, "its SHA-256 differs"),
        (lambda entry: entry.update(router="oracle"), True, "'oracle' is a row to compare with, and no router"),
    ],
)
def test_a_changed_entry_of_the_exam_is_refused(
    examined: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], anew: bool, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        check(changed(examined, tmp_path, change, anew))


def test_an_entry_of_the_exam_brings_its_router(
    examined: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else registers it; of each task seed 0 is trained again and one that the checksum picks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(imports, "_IMPORTED", {})
    monkeypatch.setitem(ROUTERS, "of-a-stranger", ROUTERS["smoe"])
    del ROUTERS["of-a-stranger"]
    monkeypatch.setattr(leaderboard, "examined", lambda task, spec, seed, rate: {"value": 0.1, "curve": [[40, 0.5]]})
    entry = json.loads(examined.read_text())
    cells = json.loads(json.dumps(entry["cells"]).replace('"smoe"', '"of-a-stranger"'))
    entry.update(router="of-a-stranger", cells=cells, sources={"stranger.py": ROUTER})
    follow_exam(entry, json.loads((examined.parent / "track.json").read_text()), "mine")
    picked = set()
    for digit in "0123":
        found = examined_again({**entry, "sha256": digit}, tmp_path, "mine")
        assert ("clusters", "0") in found
        picked |= {seed for _, seed in found}
    assert len(picked) > 2
    for module in [name for name in sys.modules if name.startswith("pointsman_import_")]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("seed", "change", "message"),
    [
        ("0", {"curve": []}, "seed 0: its curve begins with None"),
        ("5", {"curve": [[40, 0.001]]}, "seed 5: its curve begins with 0.001"),
        ("5", {"value": -1.0}, r"of 2 runs a mean score of 2\.\d+, trained again 0\."),
    ],
)
def test_made_up_runs_of_the_exam_are_found(examined: Path, seed: str, change: dict[str, Any], message: str) -> None:
    entry = json.loads(examined.read_text())
    ours = {("clusters", one): copy.deepcopy(cell_of(entry)["runs"][one]) for one in ("0", "5")}
    ours["clusters", "5"]["curve"] = ours["clusters", "0"]["curve"]
    assert compared_exam(entry, ours, 0.1, "mine").startswith("of 2 runs a mean score of 0.")
    cell_of(entry)["runs"][seed].update(change)
    with pytest.raises(RunError, match=message):
        compared_exam(entry, ours, 0.1, "mine")


def test_what_the_track_will_refuse_is_told_when_it_is_submitted(
    examined: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(examined.parents[1] / "exam"), "--router", "smoe", "--out", str(tmp_path / "a")]) == 0
    assert "will refuse this entry: it lacks many, fine, " in capsys.readouterr().err
    track = json.loads((ROOT / "leaderboard" / "exam" / "track.json").read_text())
    cells = {task: {"runs": {str(seed): {} for seed in range(track["seeds"])}} for task in track["tasks"]}
    assert unlike_track({"cells": cells}) == ""
    cells["zipf"]["runs"]["8"] = {}
    assert unlike_track({"cells": cells}) == "9 seeds, not 8"
    cells["zipf"]["runs"] = {**cells["ids"]["runs"], "3": {"value": None}}
    assert unlike_track({"cells": cells}) == "zipf, seed 3, diverged"


def test_what_is_no_row_of_an_exam_is_not_submitted(examined: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(examined.parents[1] / "exam"), "--router", "smoee"]) == 2
    assert "did you mean 'smoe'" in capsys.readouterr().err
    assert main(["submit", str(examined.parents[1] / "exam"), "--router", "oracle"]) == 2
    assert "has no router 'oracle': allowed: hash, smoe, thor" in capsys.readouterr().err


def test_a_name_is_a_name_on_the_page() -> None:
    entry = {"name": "<img src=x onerror=alert(1)> [a](javascript:b) **c** |\n\u202e", "router": "smoe`<b>"}
    cell = Grid(["entry"], [[called(entry)]], code=False).markdown().splitlines()[-1]
    assert not [one for one in ("<img", "[a]", "javascript:", "**", "\u202e") if one in cell]
    assert cell.endswith("(`smoe'<b>`) |")
    assert called({"name": "Mine, tuned (2)", "router": "mine"}) == "Mine, tuned (2) (`mine`)"


def test_submit_tells_what_a_track_compares(
    submitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submitted.parents[1]
    words = [
        "--router",
        "of-a-stranger",
        "--import",
        str(folder / "stranger.py"),
        "--out",
        str(tmp_path / "entry.json"),
    ]
    assert main(["submit", str(folder / "run"), *words]) == 0
    assert "seeds 1, eval_tokens 512, " in capsys.readouterr().err
