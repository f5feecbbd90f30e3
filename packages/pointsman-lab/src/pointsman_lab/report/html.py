"""Filling the pages' templates: everything is inserted, nothing is loaded from outside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import version
from typing import Any

from pointsman._errors import needing

ASSETS = "pointsman_lab.report.assets"
THEME = """\
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";\
"""


def fill(template: str, *, javascript: str = "", json: str = "", **values: Any) -> str:
    """A template of the page, filled; style sheet, scripts and data are inserted unescaped.

    The page's policy has the hashes of these scripts: a browser runs no other.
    """
    with needing("the report page needs jinja2", "report"):
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
