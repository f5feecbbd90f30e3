"""The live display: every line fits into the terminal."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from pointsman_lab.cli import progress
from pointsman_lab.cli.progress import Display

FIGURES = {"loss": 5.4321, "bits": 7.8, "top_k": 8, "tokens_per_second": 12345.0}


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize(
    "title", ["", "3/8 hyperrouter, seed 0", "11/12 xmoe:gate=sigmoid+similarity:tau=0.1, seed 10"]
)
def test_a_line_fits_and_keeps_its_bar(width: int, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    display = Display()
    display.title = title
    display.phase("train", 20000)
    display.advance(9000, FIGURES)
    with console.capture() as captured:
        console.print(display._bar.get_renderable())
    text = captured.get().rstrip("\n")
    assert "\n" not in text
    assert cell_len(text) <= width
    assert "━━━━" in text
    assert "9000/20000" in text
    if width >= 80:
        assert "loss 5.432" in text
    if width == 160:
        assert "bits 7.800 k 8 12,345 tokens/s" in text


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No bar can be drawn there, and a training of hours told nothing."""
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with Display() as display:
        display.phase("train", 20000)
        display.advance(9000, FIGURES)
    assert "train 9000/20000  loss 5.432" in capsys.readouterr().err
