"""Markdown: a table, and prose of a width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

NONE = "-"
"""The cell of a figure that does not exist."""


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
        return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(part for line in markdown.split("\n") for part in lines(line))
