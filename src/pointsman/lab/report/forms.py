"""The base of the report's tables: four forms, written as four files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from pointsman._files import write_whole
from pointsman._grid import wrapped


class Forms(ABC):
    """A table in four forms."""

    @property
    @abstractmethod
    def file(self) -> str:
        """The name of its files, without ending."""

    @abstractmethod
    def text(self) -> str:
        """Plain aligned text."""

    @abstractmethod
    def csv(self) -> str:
        """Comma-separated, full precision; '-' where a figure does not exist."""

    @abstractmethod
    def markdown(self) -> str:
        """Markdown; the best of each column in bold."""

    @abstractmethod
    def latex(self) -> str:
        """LaTeX for the booktabs package; the best of each column in bold."""

    def write(self, directory: Path) -> list[Path]:
        """Writes FILE.txt, .csv, .md and .tex, each whole or not at all; returns their paths."""
        forms = {"txt": self.text(), "csv": self.csv(), "md": wrapped(self.markdown()), "tex": self.latex()}
        return [write_whole(directory / f"{self.file}.{ending}", form) for ending, form in forms.items()]


def joined(*blocks: str) -> str:
    """Blocks of text with an empty line between them; empty blocks are left out."""
    return "\n\n".join(block for block in blocks if block) + "\n"
