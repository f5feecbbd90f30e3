"""The page as a document: complete, escaped, and loading nothing from outside."""

import builtins
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pointsman._errors import RunError
from pointsman_lab._grid import Grid
from pointsman_lab.report import write_report
from pointsman_lab.report.cell import Cell
from pointsman_lab.report.page import asset, renamed
from pointsman_lab.report.protocol import lines, pairing, settings
from pointsman_lab.report.series import binned, cell_point, loss, over_seeds, short_layer, validation
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import read_comparison
from tests.lab.report.fixtures import write_comparison, write_finetuning, write_run

LOADING = {"src", "href", "srcset", "data", "poster", "action", "background", "xlink:href"}


class Page(HTMLParser):
    """Collects what a browser would load, the elements' ids and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.data: Any = None
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._inside = values.get("id", tag) if tag == "script" else tag
        self.ids += [values["id"]] if "id" in values else []
        for name, value in values.items():
            if (name in LOADING and tag != "a") or (name == "style" and "url(" in value):
                self.loads.append(value)

    def handle_data(self, data: str) -> None:
        if self._inside == "report-data":
            self.data = json.loads(data)
        elif self._inside == "style":
            self.loads += re.findall(r"url\(|@import", data)
        elif self._inside != "script":
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def page(path: Path) -> Page:
    return Page(write_report(path).read_text())


def test_loads_nothing_from_outside(tmp_path: Path) -> None:
    text = write_report(write_comparison(tmp_path / "c")).read_text()
    assert Page(text).loads == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|importScripts|WebSocket|EventSource)\b", text)


def test_comparison_page_holds_the_figures(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", missing=[("hyperrouter", 2)], unfinished=[("smoe", 1)])
    found = page(path)
    assert len(found.ids) == len(set(found.ids))
    assert {"summary", "quality", "differences", "loss", "validation", "missing", "command"} <= set(found.ids)
    assert "smoe, seed 1: stopped at step 200 of 400" in found.text
    assert "hyperrouter, seed 2: not begun" in found.text
    assert found.text.count("Bars: mean ± sample standard deviation over seeds") == 2
    quality = {series["name"]: series["points"] for series in found.data["quality"]}
    assert [point["x"] for point in quality["smoe"]] == [1, 2, 4, 8]
    assert quality["smoe-dropout"][0]["y"] == pytest.approx(1.5 + 1.2 + 0.01 + 0.003 * 12 / 3)
    assert "nan" not in json.dumps(found.data).lower()


def test_run_page(tmp_path: Path) -> None:
    found = page(write_run(tmp_path / "r", "hyperrouter"))
    assert found.data["routers"] == ["hyperrouter"]
    assert "differences" not in found.ids
    assert "Bars:" not in found.text
    assert "pointsman train --router hyperrouter --preset tiny --data stdlib --steps 400 --seed 0" in found.text
    assert "--set learning_rate=0.001" in found.text  # the preset has another
    assert "--set clip_norm" not in found.text


def test_the_page_calls_no_validation_text_test_text(tmp_path: Path) -> None:
    out = write_comparison(tmp_path / "mine", ["smoe"], [0], explorer=True)
    file = out / "runs" / "r0" / "seed-0" / "explorer.json"
    file.write_text(file.read_text().replace('"split": "test"', '"split": "valid"'))  # as of masked language models
    text = page(out).text
    assert "Evaluated text, coloured by expert" in text
    assert "test text" not in text.lower()


def test_the_command_of_a_run_with_a_router_of_its_own_imports_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", "elsewhere")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "imports": ["my_routers"]}))
    assert "pointsman train --router elsewhere" in page(run).text
    assert "--import my_routers" in page(run).text
    (run / "environment.json").write_text('{"origin": {"my_routers.py": "d694"}}')
    assert "origin · my_routers.py" in page(run).text


def test_page_of_a_comparison_that_has_not_begun(tmp_path: Path) -> None:
    found = page(write_comparison(tmp_path / "c", ("smoe",), (0,), missing=[("smoe", 0)]))
    assert "smoe, seed 0: not begun" in found.text
    assert found.data["loss"]["series"] == []


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a", "smoe"), write_run(tmp_path / "b", "hyperrouter")]
    out = write_report(paths, tmp_path / "both.html")
    assert out == tmp_path / "both.html"
    assert Page(out.read_text()).data["routers"] == ["smoe", "hyperrouter"]
    assert write_report(paths, out) == out  # its own page it replaces
    (tmp_path / "site").mkdir()
    for place, page in ((out, out), (tmp_path / "site", tmp_path / "site" / "report.html")):
        page.write_text("<title>My site</title>")
        with pytest.raises(RunError, match=rf"{page.name}: it exists and is no page of `pointsman report`"):
            write_report(paths, place, samples=True)
        assert page.read_text() == "<title>My site</title>"


def test_names_of_rows_are_no_words_of_the_text(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("s", "smoe"), (0, 1), missing=[("s", 1)], explorer=True, steps=20)
    plan = json.loads((path / "comparison.json").read_text())
    (path / "comparison.json").write_text(json.dumps(plan | {"shown": {"names": {"s": "Plain"}}}))
    found = page(path)
    assert "Plain, seed 1: not begun" in found.text
    data, explorer = found.data, found.data["inside"]["explorer"]
    assert data["routers"] == [one["name"] for one in explorer["routers"]] == ["Plain", "smoe"]
    for words in (explorer["texts"][0], explorer["routers"][0]["map"]["tokens"]):
        assert "Plain" not in words
        assert "s" in words


@pytest.mark.parametrize(
    ("row", "end"), [("smoe", " in points"), ("xmoe:gate=sigmoid", ", seed by seed"), ("smoe+a", " x")]
)
def test_captions_call_rows_by_their_names(row: str, end: str) -> None:
    names = {"smoe": "xmoe", "xmoe:gate=sigmoid": "smoe"}
    found = renamed([Grid(["router"], [[row]], caption=f"Paired differences to {row}{end}")], names)[0]
    assert (found.rows, found.caption) == ([[names.get(row, row)]], f"Paired differences to {names.get(row, row)}{end}")


def test_hostile_names_are_text(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "</script><img src=x onerror=alert(1)>"), (0,))
    found = page(path)
    assert found.loads == ["data:,"]
    assert "</script><img src=x onerror=alert(1)>" in found.text
    assert found.data["routers"][1].startswith("</script>")


def test_page_size_does_not_grow_with_the_run(tmp_path: Path) -> None:
    sizes = [write_report(write_run(tmp_path / str(steps), steps=steps)).stat().st_size for steps in (2_000, 20_000)]
    assert sizes[1] < 1.05 * sizes[0]


def test_bins_average_and_resumed_steps_count_once() -> None:
    assert binned([(1, 5.0), (2, 7.0), (2, 9.0)], 2) == {1: 5.0, 2: 9.0}
    curve = binned([(step, float(step)) for step in range(1, 101)], 100, bins=4)
    assert curve == {12.5: 13.0, 37.5: 38.0, 62.5: 63.0, 87.5: 88.0}
    assert over_seeds([{1.0: 2.0, 2.0: 4.0}, {1.0: 3.0}]) == [[1.0, 2.5, 2.0, 3.0], [2.0, 4.0]]


def test_a_point_is_its_mean_and_spread_in_printed_units(tmp_path: Path) -> None:
    point = cell_point(2, Cell({0: 1.0, 1: 3.0}), 10.0)
    assert point == pytest.approx({"x": 2, "y": 20, "std": 14.142, "low": 5.857864, "high": 34.14214}, abs=1e-4)
    assert cell_point(2, Cell({0: 1.0}), 10.0) == {"x": 2, "y": 10}
    comparison = read_comparison(write_comparison(tmp_path / "c", ("smoe",), (0,), steps=20))
    bits, nats = (loss(comparison, bits=unit)["series"][0]["points"] for unit in (True, False))
    assert [one[1] * math.log(2) for one in bits] == pytest.approx([one[1] for one in nats], rel=1e-4)
    once, twice = (validation(comparison, scale)["of"]["1"][0]["points"] for scale in (1.0, 2.0))
    assert [one[1] for one in twice] == pytest.approx([2 * one[1] for one in once], rel=1e-4)


def test_seeds_of_unequal_length_are_averaged_at_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_lab.report.inside.COLUMNS", 12)
    path = write_comparison(tmp_path / "c", ("smoe",), (0, 1), unfinished=[("smoe", 1)], steps=300)
    points = loss(read_comparison(path), bits=False)["series"][0]["points"]
    assert [len(point) for point in points] == [4] * 80 + [2] * 80
    found = page(path).data["inside"]["entropy"]["of"]["blocks.0.moe"][0]["points"]
    assert [len(point) for point in found] == [4] * 6 + [2] * 6


def test_layers_of_encoder_and_decoder_have_names_of_their_own() -> None:
    names = ["encoder.layers.1.moe", "model.decoder.layers.1.ffn", "blocks.1.moe", "a.1.b.2"]
    assert list(map(short_layer, names)) == ["encoder layer 1", "decoder layer 1", "layer 1", "a.1.b.2"]


def test_rows_that_cannot_be_paired_are_named(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "thor", "switch:jitter=0.01", "dense"), (0,))
    notes = pairing(read_comparison(path))
    assert len(notes) == 3
    assert notes[1].startswith("thor, switch:jitter=0.01: draws random numbers")
    assert notes[2].startswith("dense: no experts")
    other = write_comparison(tmp_path / "d", ("smoe", "hyperrouter"), (0,))
    assert len(pairing(read_comparison(other))) == 1
    run = read_comparison(other).runs["hyperrouter", 0].path / "evaluation.json"
    run.write_text(run.read_text().replace('"tokens": 1000, "segment_length"', '"tokens": 1500, "segment_length"'))
    [line] = lines(read_comparison(other))
    assert line.endswith("; tokens: 1,000"), "those that were scored"
    assert "1500" not in line
    run.write_text(run.read_text().replace('"segment_length": 128', '"segment_length": 64'))
    place = run.with_name("environment.json")
    place.write_text(place.read_text().replace('"cpu"', '"cuda"'))
    notes = pairing(read_comparison(other))
    assert len(notes) == 3
    assert "evaluated with different protocols" in notes[1]
    assert "(device)" in notes[2]
    plan = json.loads((other / "comparison.json").read_text())
    (other / "comparison.json").write_text(json.dumps(plan | {"shown": {"names": {"hyperrouter": "Ours"}}}))
    assert lines(read_comparison(other))[1].startswith("Ours (seed 0): ")


def test_rows_with_settings_of_their_own_are_told(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "xmoe", "thor"), (0, 1))
    for config in path.glob("runs/r1/*/config.json"):
        config.write_text(config.read_text().replace('"learning_rate": 0.001', '"learning_rate": 0.02'))
    rates = "learning rate: 0.001 (smoe, thor), 0.02 (xmoe)"
    assert pairing(read_comparison(path))[-1] == (
        f"These runs differ in {rates}: their differences are not those of the router alone."
    )
    plan = json.loads((path / "comparison.json").read_text())
    plan["settings"]["learning_rate"] = 0.001
    chosen = (("smoe", "1e-3", "1"), ("xmoe", "2e-2", "4"))
    plan["tuned"] = {row: {"row": row, "learning_rate": rate, "router_lr_scale": own} for row, rate, own in chosen}
    (path / "comparison.json").write_text(json.dumps(plan))
    comparison = read_comparison(path)
    assert pairing(comparison)[-2:] == [
        "--tune chose settings of single rows, on seeds of its own. learning rate: 1e-3 (smoe), 2e-2 (xmoe); "
        "router lr scale: 1 (smoe), 4 (xmoe).",
        "thor: not tuned, among rows that are: a difference to them may be one of the settings alone.",
    ]
    assert pairing(comparison)[0].startswith("Apart from what the settings named below change, rows of one seed see")
    assert "same seed and data order;" in ComparisonTable.of(comparison).text()
    (path / "comparison.json").write_text(json.dumps(plan | {"shown": {"names": {"xmoe": "Ours", "thor": "Drawn"}}}))
    notes = pairing(read_comparison(path))
    assert notes[1].startswith("Drawn: draws random numbers")
    assert notes[-2].endswith("1e-3 (smoe), 2e-2 (Ours); router lr scale: 1 (smoe), 4 (Ours).")
    assert notes[-1].startswith("Drawn: not tuned")
    assert dict(settings(read_comparison(path)))["learning rate"] == "0.001 (smoe, Drawn), 0.02 (Ours)"
    plan["tuned"]["xmoe"]["model.dim"] = "32"
    (path / "comparison.json").write_text(json.dumps(plan))
    for config in path.glob("runs/r1/*/config.json"):
        config.write_text(config.read_text().replace('"dim": 64', '"dim": 32'))
    told = " ".join(pairing(read_comparison(path)))
    assert "These runs differ in model · dim: 64 (smoe, thor), 32 (xmoe): their differences are not those" in told
    assert "agree" not in told
    assert dict(settings(comparison))["learning rate"] == "0.001 (smoe, thor), 0.02 (xmoe)"
    assert dict(settings(comparison))["steps"] == "400"


def test_missing_jinja_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RunError, match=r"jinja2: pip install 'pointsman\[report\]'"):
        write_report(write_run(tmp_path / "r"))


def test_unwritable_place_is_one_line(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"report\.html was not written"):
        write_report(path, tmp_path / "file" / "report.html")


def test_tasks_stand_on_the_page(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "thor", "hyperrouter"), (0, 1))
    assert "tasks" not in page(path).ids
    for place, router in enumerate(("smoe", "thor")):  # the third row has none
        for seed in (0, 1):
            run = path / "runs" / f"r{place}" / f"seed-{seed}"
            write_finetuning(run, "sst2", router, seed, metric=0.6 + 0.1 * place + 0.02 * seed)
            write_finetuning(run, "sst2,from-scratch", router, seed, metric=0.55 + 0.01 * seed, scratch=True)
    found = page(path)
    assert len(found.ids) == len(set(found.ids))
    assert {"tasks", "task-sst2", "task-sst2,from-scratch"} <= set(found.ids)
    assert "72.00 ± 1.41" in found.text  # thor at k = 8
    assert "0.250" in found.text
    assert "cut: train 0, test 3" in found.text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_labels_of_an_axis_tell_its_ticks_apart() -> None:
    ticks = [[274.86, 274.87, 274.88], [0, 0.5, 1], [12340.5, 12341, 12341.5], [7, 7]]
    script = f"globalThis.addEventListener = () => {{}};{asset('charts.js')}"
    script += f"console.log(JSON.stringify({json.dumps(ticks)}.map(tickLabels)))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        ["274.86", "274.87", "274.88"], ["0", "0.5", "1"], ["12.3405k", "12.341k", "12.3415k"], ["7", "7"],
    ]  # fmt: skip


def test_an_audit_has_no_seeds_and_no_costs(tmp_path: Path) -> None:
    (write_run(tmp_path / "run", seed=0, steps=4) / "audit.json").write_text("{}")
    table = ComparisonTable.read(tmp_path / "run")
    assert table.grid().header == ["router", "k=1", "k=2", "k=4", "k=8", "entropy"]
    assert "Seeds" not in table.latex()
    text = page(tmp_path / "run").text
    assert "seeds 0" not in text
    assert "runs done" not in text
