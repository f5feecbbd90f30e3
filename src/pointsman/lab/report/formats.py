"""A comparison table as plain text, CSV, Markdown, LaTeX, and for a terminal."""

from __future__ import annotations

import csv as csv_module
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pointsman._files import write_whole

if TYPE_CHECKING:
    from pointsman.lab.report.tables import ComparisonTable
    from pointsman.lab.runs.comparison import Comparison

NONE = "-"


def page_path(out: Path | None, comparison: Comparison) -> Path:
    """Where the page goes: `out` itself if it is called .html, else `report.html` in it, or in the directory."""
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        return out
    return (out or comparison.path) / "report.html"


class Printed(Protocol):
    """What has all four forms."""

    def text(self) -> str: ...

    def csv(self) -> str: ...

    def markdown(self) -> str: ...

    def latex(self) -> str: ...


def write_forms(directory: Path, name: str, table: Printed) -> list[Path]:
    """Writes NAME.txt, .csv, .md and .tex, each whole or not at all; returns their paths."""
    forms = {"txt": table.text, "csv": table.csv, "md": table.markdown, "tex": table.latex}
    return [write_whole(directory / f"{name}.{ending}", form()) for ending, form in forms.items()]


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
    rows = [["---:" if position else "---" for position in range(len(table.header()))]]
    for cells, best in zip(table.cells(), _best(table), strict=True):
        rows.append(
            [f"**{cell}**" if win else cell for cell, win in zip([f"`{cells[0]}`", *cells[1:]], best, strict=True)]
        )
    return "\n".join([*map(markdown_line, [table.header(), *rows]), "", table.caption]) + "\n"


def markdown_lines(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines as a Markdown table: the first is its header, the first column is set as code."""
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return [*map(markdown_line, [lines[0], rule, *([f"`{line[0]}`", *line[1:]] for line in lines[1:])])]


def markdown_line(cells: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _best(table: ComparisonTable) -> list[list[bool]]:
    """Which cells of `table.cells()` hold the best mean of their column."""
    return [
        [
            False,
            *(row.router in table.best(k) for k in table.top_k),
            *[False] * (len(table.header()) - 1 - len(table.top_k)),
        ]
        for row in table.rows
    ]


def latex(table: ComparisonTable) -> str:
    """A LaTeX table for the booktabs package; the best of each column in bold."""
    rows = []
    for cells, best in zip(table.cells(), _best(table), strict=True):
        shown = [rf"\texttt{{{escape_latex(cells[0])}}}", *map(escape_latex, cells[1:])]
        rows.append([rf"\textbf{{{cell}}}" if win else cell for cell, win in zip(shown, best, strict=True)])
    header = ["Router", *(f"$k={k}$" for k in table.top_k), "Entropy", "Router params", "s/step", "Seeds"]
    return latex_table(table.caption, header, rows)


def latex_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A LaTeX table for the booktabs package; header and cells are LaTeX already."""
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape_latex(caption)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"    \toprule",
            "    " + " & ".join(header) + r" \\",
            r"    \midrule",
            *("    " + " & ".join(row) + r" \\" for row in rows),
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
    for cells, best in zip(table.cells(), _best(table), strict=True):
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
