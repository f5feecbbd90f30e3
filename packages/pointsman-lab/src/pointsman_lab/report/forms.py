"""The base of the report's tables: four forms, written as four files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from pointsman._files import write_whole
from pointsman._grid import Grid, wrapped


class Forms(ABC):
    """A table in four forms: by default its grids, each below its caption."""

    @property
    @abstractmethod
    def file(self) -> str:
        """The name of its files, without ending."""

    @abstractmethod
    def csv(self) -> str:
        """Comma-separated, full precision; '-' where a figure does not exist."""

    @property
    def head(self) -> str:
        """What stands above the grids in the plain text."""
        return ""

    def shown_grids(self) -> Sequence[Grid]:
        """The grids in order; those after the first are left out where they have no rows."""
        raise NotImplementedError

    def text(self) -> str:
        """Plain aligned text."""
        return joined(self.head, *captioned(self.shown_grids(), Grid.text))

    def markdown(self) -> str:
        """Markdown; the best of each column in bold."""
        return joined(*captioned(self.shown_grids(), Grid.markdown))

    def latex(self) -> str:
        """LaTeX for the booktabs package, of the first grid; the best of each column in bold."""
        return self.shown_grids()[0].latex(label=self.file)

    def write(self, directory: Path) -> list[Path]:
        """Writes FILE.txt, .csv, .md and .tex, each whole or not at all; returns their paths."""
        forms = {"txt": self.text(), "csv": self.csv(), "md": wrapped(self.markdown()), "tex": self.latex()}
        return [write_whole(directory / f"{self.file}.{ending}", form) for ending, form in forms.items()]


def joined(*blocks: str) -> str:
    """Blocks of text with an empty line between them; empty blocks are left out."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def captioned(grids: Sequence[Grid], form: Callable[[Grid], str]) -> list[str]:
    """Caption and table of each grid; those after the first only where they have rows."""
    return [block for place, grid in enumerate(grids) if grid.rows or not place for block in (grid.caption, form(grid))]
