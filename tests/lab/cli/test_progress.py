"""The live display: every line fits into the terminal, and a narrower terminal keeps no rest of the line before."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from pointsman_lab.cli.progress import BAR, SHORTEST_BAR, _Lines

FIGURES = {"loss": 5.4321, "bits": 7.8, "top_k": 8, "tokens_per_second": 12345.0}


def lines(width: int, title: str, figures: dict[str, float] = FIGURES) -> tuple[_Lines, Console, int]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    bar = _Lines(console)
    task = bar.add_task("train", total=20000, completed=9000, title=title, figures=figures)
    return bar, console, task


def drawn(bar: _Lines, console: Console) -> str:
    with console.capture() as captured:
        console.print(bar.get_renderable())
    return captured.get().rstrip("\n")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize(
    "title", ["", "3/8 hyperrouter, seed 0", "11/12 xmoe:gate=sigmoid+similarity:tau=0.1, seed 10"]
)
def test_a_line_fits_and_keeps_its_bar(width: int, title: str) -> None:
    text = drawn(*lines(width, title)[:2])
    assert "\n" not in text
    assert cell_len(text) < width
    assert text.count("━") >= SHORTEST_BAR
    assert "9000/20000" in text or width == 40
    if width >= 80:
        assert "loss 5.432" in text
    if width == 160:
        assert text.count("━") == BAR
        assert "bits 7.800 k 8 12,345 tokens/s" in text


def test_a_narrower_terminal_has_its_wrapped_rows_erased() -> None:
    bar, console, _ = lines(100, "3/8 hyperrouter, seed 0")
    out = console.file
    assert isinstance(out, io.StringIO)
    with bar:
        bar.refresh()
        (wide,) = bar._row.drawn.values()
        console.width = 40
        before = len(out.getvalue())
        bar.refresh()
        written = out.getvalue()[before:]
    rows = -(-wide // 40)
    erased = re.match(r"(?:\x1b\[2K\x1b\[1A)+", written)
    assert rows > 1
    assert erased
    assert erased.group().count("\x1b[1A") == rows - 1
