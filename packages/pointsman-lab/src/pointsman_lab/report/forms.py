"""What tables and pages are written as: four forms of a table, and templates filled without anything from outside."""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pointsman._errors import needing
from pointsman_lab._files import write_whole
from pointsman_lab._grid import Grid, one_line, wrapped


class Forms(ABC):
    """A table in four forms: by default its grids, each below its caption."""

    name: str

    @property
    def file(self) -> str:
        """The name of its files, without ending."""
        return self.name

    @abstractmethod
    def csv(self) -> str:
        """Comma-separated, full precision; '-' where a figure does not exist."""

    @property
    def head(self) -> str:
        """What stands above the grids."""
        return ""

    @abstractmethod
    def shown_grids(self) -> Sequence[Grid]:
        """The grids in order; those after the first are left out where they have no rows."""

    def text(self) -> str:
        """Plain aligned text."""
        return joined(self.head, *captioned(self.shown_grids(), Grid.text))

    def markdown(self) -> str:
        """Markdown; the best of each column in bold."""
        return joined(self.head, *captioned(self.shown_grids(), Grid.markdown))

    def latex(self) -> str:
        """LaTeX for the booktabs package; the best of each column in bold. What stands above the grids is a comment."""
        first, *others = self.shown_grids()
        head = [f"% {one_line(self.head)}"] if self.head else []
        tables = [first.latex(self.file), *(grid.latex(within=self.file) for grid in others if grid.rows)]
        return "\n".join([*head, *tables])

    def write(self, directory: Path) -> list[Path]:
        """Writes FILE.txt, .csv, .md and .tex, each whole or not at all; returns their paths."""
        forms = {"txt": self.text(), "csv": self.csv(), "md": wrapped(self.markdown()), "tex": self.latex()}
        return [write_whole(directory / f"{self.file}.{ending}", form) for ending, form in forms.items()]


def joined(*blocks: str) -> str:
    """Blocks of text with an empty line between them; empty blocks are left out."""
    return "\n\n".join(block for block in blocks if block) + "\n"


def unlike(protocols: Sequence[Mapping[str, Any]]) -> str:
    """What to say of records whose protocols differ; "" where none does."""
    keys = sorted({key for one in protocols for key in {*one, *protocols[0]} if one.get(key) != protocols[0].get(key)})
    return f"; rows differ in {', '.join(map(_words, keys))}: their figures are not comparable" if keys else ""


def protocol_line(protocol: Mapping[str, Any]) -> str:
    """A protocol in one line."""
    shown = {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in protocol.items()}
    return "; ".join(f"{_words(key)}: {value}" for key, value in shown.items())


def _words(key: str) -> str:
    return key.replace("_", " ")


def captioned(grids: Sequence[Grid], form: Callable[[Grid], str]) -> list[str]:
    """Caption and table of each grid; those after the first only where they have rows."""
    return [block for place, grid in enumerate(grids) if grid.rows or not place for block in (grid.caption, form(grid))]


ASSETS = "pointsman_lab.report.assets"
THEME = """\
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";\
"""


def check_jinja() -> None:
    """RunError if jinja2 is not installed."""
    with needing("the report page needs jinja2", "report"):
        import jinja2  # noqa: F401


def fill(template: str, *, javascript: str = "", json: str = "", **values: Any) -> str:
    """A template of the page, filled; style sheet, scripts and data are inserted unescaped.

    The page's policy has the hashes of these scripts: a browser runs no other.
    """
    check_jinja()
    import jinja2
    from markupsafe import Markup

    loader = jinja2.FunctionLoader(lambda name: asset(*reversed(name.rpartition("/")[::2])))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.trim_blocks = environment.lstrip_blocks = True
    digests = [hashlib.sha256(one.encode()).digest() for one in (THEME, javascript) if one]
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    raw = {"css": asset("style.css"), "theme": THEME, "javascript": javascript, "json": json, "scripts": scripts}
    values |= {name: Markup(text) for name, text in raw.items()}
    return environment.get_template(f"{ASSETS}/{template}").render(version=version("pointsman"), **values)


def embed(data: Mapping[str, Any]) -> str:
    """JSON for a script element: without '<' and nan."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def asset(name: str, package: str = ASSETS) -> str:
    """A file of the page."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
