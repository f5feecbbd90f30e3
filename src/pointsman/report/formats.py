"""A comparison table as plain text, CSV, Markdown, LaTeX, and for a terminal."""

from __future__ import annotations

import csv as csv_module
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman._errors import RunError

if TYPE_CHECKING:
    from pointsman.report.tables import ComparisonTable

NONE = "-"


def text(table: ComparisonTable) -> str:
    """Plain aligned text, differences below."""
    parts = [table.caption, "", *aligned([table.header(), *table.cells()])]
    if len(table.rows) > 1 and table.top_k:
        header = ["router", *(f"k={k}" for k in table.top_k)]
        parts += ["", table.difference_caption, "", *aligned([header, *table.difference_cells()])]
    missing = [f"{row.router}: seeds {', '.join(map(str, row.missing))}" for row in table.rows if row.missing]
    if missing:
        parts += ["", "Missing: " + "; ".join(missing)]
    return "\n".join(parts) + "\n"


def csv(table: ComparisonTable) -> str:
    """Comma-separated, full precision, one line a router; '-' where a figure does not exist."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    per_k = [name for k in table.top_k for name in (f"k={k} mean", f"k={k} std", f"k={k} seeds")]
    tail = ["entropy mean", "entropy std", "router parameters", "step seconds", "seeds done", "seeds missing"]
    writer.writerow(["router", "metric", "split", *per_k, *tail])
    for row in table.rows:
        line: list[Any] = [row.router, table.metric.name, table.split]
        for k in table.top_k:
            cell = table.quality(row, k)
            line += [cell.mean, cell.std, len(cell.values)]
        line += [row.entropy.mean, row.entropy.std, row.router_parameters, row.step_seconds.mean]
        line += [" ".join(map(str, row.done)) or None, " ".join(map(str, row.missing)) or None]
        writer.writerow([NONE if value is None else value for value in line])
    return out.getvalue()


def markdown(table: ComparisonTable) -> str:
    """A Markdown table; the best of each column in bold."""
    lines = [table.header(), ["---", *["---:"] * (len(table.header()) - 1)]]
    for row, cells in zip(table.rows, table.cells(), strict=True):
        shown = [f"`{cells[0]}`", *cells[1:]]
        for column, k in enumerate(table.top_k, 1):
            if row.router in table.best(k):
                shown[column] = f"**{shown[column]}**"
        lines.append(shown)
    lines_out = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([*lines_out, "", table.caption]) + "\n"


def latex(table: ComparisonTable) -> str:
    """A LaTeX table for the booktabs package; the best of each column in bold."""
    lines = []
    for row, cells in zip(table.rows, table.cells(), strict=True):
        shown = [rf"\texttt{{{escape_latex(cells[0])}}}", *map(escape_latex, cells[1:])]
        for column, k in enumerate(table.top_k, 1):
            if row.router in table.best(k):
                shown[column] = rf"\textbf{{{shown[column]}}}"
        lines.append("    " + " & ".join(shown) + r" \\")
    header = ["Router", *(f"$k={k}$" for k in table.top_k), "Entropy", "Router params", "s/step", "Seeds"]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape_latex(table.caption)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"    \toprule",
            "    " + " & ".join(header) + r" \\",
            r"    \midrule",
            *lines,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def rich(table: ComparisonTable) -> Any:
    """The table for a terminal, as a `rich.table.Table`."""
    from rich.table import Table
    from rich.text import Text

    view = Table(title=f"{table.metric.label} ({table.metric.direction})", caption=None)
    for position, title in enumerate(table.header()):
        view.add_column(title, justify="right" if position else "left", no_wrap=True)
    for row, cells in zip(table.rows, table.cells(), strict=True):
        best = [False, *(row.router in table.best(k) for k in table.top_k)]
        best += [False] * (len(cells) - len(best))
        view.add_row(*(Text(cell, style="bold green" if win else "") for cell, win in zip(cells, best, strict=True)))
    return view


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text with the first column to the left and the others to the right, a rule below the first."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return [text[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *text[1:]]


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "|": r"\textbar{}", "<": r"\textless{}",
    ">": r"\textgreater{}",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """`text` with every character that LaTeX reads as a command escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def write_whole(path: Path, content: str) -> Path:
    """Writes a text file aside, then renames it, so that an interruption leaves the old one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(content, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise RunError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path
