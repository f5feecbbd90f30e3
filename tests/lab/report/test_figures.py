"""Static figures: written in each format, the same bytes for the same data, clear when something is missing."""

import base64
import builtins
from pathlib import Path
from typing import Any

import pytest

from pointsman._errors import RunError
from pointsman_lab.report import figures
from pointsman_lab.report.figures import FORMATS, _audit, _heat, _new
from pointsman_lab.report.tables import ComparisonTable
from pointsman_lab.runs.comparison import read_comparison
from tests.lab.report.fixtures import write_comparison, write_run

HEADS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.slow
def test_every_format(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe", "dense"), (0, 1), unfinished=[("dense", 1)], layers=1)
    written = figures(path, ("png", "svg", "pdf"))
    names = {"quality", "loss", "entropy-by-layer", "loads-0", "loads-1"}
    assert {file.name for file in written} == {f"{name}.{ending}" for name in names for ending in HEADS}
    for file in written:
        assert file.parent == path / "figures"
        assert file.read_bytes().startswith(HEADS[file.suffix[1:]])


@pytest.mark.slow
def test_same_data_same_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", layers=1)
    first = [file.read_bytes() for file in figures(run, ("svg", "pdf"), tmp_path / "one")]
    second = [file.read_bytes() for file in figures(run, ("svg", "pdf"), tmp_path / "two" / "page.html")]
    assert first == second
    assert (tmp_path / "two" / "figures" / "loss.svg").exists()


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_is_no_figure_of_ours_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    run, site, nothing = write_run(tmp_path / "r"), tmp_path / "site", _new(1, 1)[0]
    monkeypatch.setitem(figures.__globals__, "drawn", lambda *_: {"loss": nothing})
    [file] = figures(run, (ending,), site / "index.html")
    assert figures(run, (ending,), site / "index.html") == [file]  # its own it replaces
    nothing.savefig(file)
    before = file.read_bytes()
    with pytest.raises(RunError, match=rf"loss\.{ending}: it exists and is no figure of `pointsman report`"):
        figures(run, (ending,), site / "index.html")
    assert file.read_bytes() == before


@pytest.mark.parametrize(("steps", "ends"), [([10.0, 20.0, 30.0], [5.0, 35.0]), ([4.0], [3.5, 4.5])])
def test_a_column_of_loads_stands_at_its_step(steps: list[float], ends: list[float]) -> None:
    load = base64.b64encode(bytes(2 * len(steps))).decode()
    layer = {"label": "layer 0", "experts": 2, "steps": steps, "load": load}
    axes = _heat({"router": "smoe", "seed": 0, "layers": [layer]}).axes[0]
    assert axes.images[0].get_extent()[:2] == ends


def test_what_has_no_data_is_left_out(tmp_path: Path) -> None:
    path = write_comparison(tmp_path / "c", ("smoe",), (0,), missing=[("smoe", 0)])
    assert figures(path, ("svg",)) == []
    run = write_run(tmp_path / "r", steps=4)
    (run / "audit.json").write_text("{}")
    (run / "evaluation.json").write_text((run / "evaluation.json").read_text().replace('"load"', '"else"'))
    comparison = read_comparison(run)
    assert _audit(comparison, [], ComparisonTable.of(comparison)) is None


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "r")
    with pytest.raises(RunError, match="figure format 'pgn': did you mean 'png'"):
        figures(run, ("pgn",))
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RunError, match=r"matplotlib: pip install 'pointsman\[report\]'"):
        figures(run)


@pytest.mark.slow
def test_a_folder_brings_no_style_and_a_name_no_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    run = write_run(tmp_path / "r", router="smoe$^$", layers=1)
    first = [file.read_bytes() for file in figures(run, ("svg",), tmp_path / "one")]
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)  # of a matplotlibrc: LaTeX would be started
    assert first == [file.read_bytes() for file in figures(run, ("svg",), tmp_path / "two")]
