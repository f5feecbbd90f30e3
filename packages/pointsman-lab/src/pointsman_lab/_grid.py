"""A table, rendered once for every form: plain text, CSV, Markdown, LaTeX, and a terminal."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pointsman_lab._values import printable

NONE = "-"
"""The cell of a figure that does not exist."""

_NUMBER = re.compile(r"[+-]?[0-9][0-9.,e±() +-]*")
_SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z])")

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "|": r"\textbar{}", "<": r"\textless{}",
    ">": r"\textgreater{}",
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A table of text cells.

    Attributes:
        header: column titles.
        rows: the cells, row by row; for CSV also numbers, and None where there is no figure.
        best: (row, column) of the best cells, set in bold.
        caption: what the cells hold.
        code: whether the first column is code, as router specs are.
        labels: columns that name the row, left-aligned in Markdown.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    best: Collection[tuple[int, int]] = frozenset()
    caption: str = ""
    code: bool = True
    labels: int = 1

    def without_empty_columns(self, keep: int = 1) -> Grid:
        """The grid without the columns that hold no figure; the first `keep` stay."""
        filled = [i for i in range(len(self.header)) if i < keep or any(row[i] != NONE for row in self.rows)]
        return self._columns(filled)

    def only(self, columns: Sequence[str]) -> Grid:
        """The first column and these, in this order, by their titles."""
        return self._columns([0, *(list(self.header).index(name) for name in columns)])

    def _columns(self, at: Sequence[int]) -> Grid:
        rows = [[row[i] for i in at] for row in self.rows]
        best = {(row, at.index(column)) for row, column in self.best if column in at}
        return replace(self, header=[self.header[i] for i in at], rows=rows, best=best)

    def named(self, names: Mapping[str, str]) -> Grid:
        """The grid with other names in its first column, also before a k ("smoe k=2")."""

        def called(cell: str) -> str:
            name, *k = [cell] if cell in names else cell.rsplit(" k=", 1)
            return " k=".join([names.get(name, name), *k])

        return replace(self, rows=[[called(row[0]), *row[1:]] for row in self.rows])

    def text(self, *, rule: bool = True) -> str:
        """Aligned columns, the first to the left and the others to the right; a rule below the header."""
        from rich.cells import cell_len

        lines = [[printable(cell) for cell in line] for line in (self.header, *self.rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        spaces = [[" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True)] for line in lines]
        shown = [
            "  ".join([line[0] + space[0], *map(str.__add__, space[1:], line[1:])]).rstrip()
            for line, space in zip(lines, spaces, strict=True)
        ]
        return "\n".join([shown[0], *(["-" * (sum(widths) + 2 * (len(widths) - 1))] if rule else []), *shown[1:]])

    def csv(self) -> str:
        """Comma-separated; '-' for None; texts are `inert`."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(map(inert, self.header))
        writer.writerows([NONE if cell is None else inert(cell) for cell in row] for row in self.rows)
        return out.getvalue()

    def markdown(self) -> str:
        """A Markdown table, in which a stranger's name ends no cell and no code."""

        def escape(cell: str) -> str:
            return one_line(cell.replace("`", "'") if self.code else cell)

        return markdown_table([*map(one_line, self.header)], self._marked("`{}`", "**{}**", escape), self.labels)

    def latex(self, label: str = "", within: str = "") -> str:
        """A LaTeX table for the booktabs package. Its caption is the first sentence, the others are a comment.

        Args:
            label: what follows "tab:" in its label; by default the caption's first words, after `within`.
        """
        first, *others = _SENTENCE.split(" ".join(self.caption.split()))
        label = label or "-".join([*filter(None, [within]), *re.findall(r"[a-z0-9]+", first.lower())[:4]])
        lines = [
            r"\toprule",
            " & ".join(map(escape_latex, self.header)) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in self._marked(r"\texttt{{{}}}", r"\textbf{{{}}}", escape_latex)),
            r"\bottomrule",
        ]
        return "\n".join(
            [
                "% needs \\usepackage{booktabs}",
                r"\begin{table}",
                r"  \centering",
                rf"  \caption{{{escape_latex(first)}}}",
                *([rf"  \label{{tab:{label}}}"] if label else []),
                *(f"  % {sentence}" for sentence in others),
                rf"  \begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                *(f"    {line}" for line in lines),
                r"  \end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def _marked(self, code: str, bold: str, escape: Any) -> list[list[str]]:
        """The cells with the marks for code and for the best of a column."""
        rows = []
        for i, row in enumerate(self.rows):
            cells = [escape(cell) for cell in row]
            cells[0] = code.format(cells[0]) if self.code else cells[0]
            rows.append([bold.format(cell) if (i, j) in self.best else cell for j, cell in enumerate(cells)])
        return rows


def formatted(figure: float | None, form: str = ".3f") -> str:
    """A figure as a cell, 0 without a sign; `NONE` where there is none."""
    return NONE if figure is None else format(figure, f"z{form}" if form.startswith(".") else form)


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def inert(cell: Any) -> Any:
    """A cell of a CSV file: a text is `printable`; one that a spreadsheet would compute gets an apostrophe in front."""
    if not isinstance(cell, str):
        return cell
    formula = cell != NONE and cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    return printable(f"'{cell}" if formula and not _NUMBER.fullmatch(cell) else cell)


def escape_latex(text: str) -> str:
    """`text` in one line, with every character that LaTeX reads as a command escaped."""
    return "".join(_LATEX.get(character, character) for character in one_line(text))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """A Markdown table; the first `labels` columns name the row, and are aligned to the left."""
    rule = ["---" if column < labels else "---:" for column in range(len(header))]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def wrapped(markdown: str, width: int = 120) -> str:
    """Markdown whose lines of prose have at most `width` characters; tables, headings and indented code stay."""

    def lines(line: str) -> list[str]:
        if len(line) <= width or line.startswith(("|", "#", "    ")):
            return [line]
        indent = "  " if line.startswith("- ") else ""
        line = re.sub(rf"\S{{{width},}}", lambda word: word[0].replace(",", ", "), line)  # names of files in braces
        return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(part for line in markdown.split("\n") for part in lines(line))
