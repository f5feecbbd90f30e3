"""Prints the lowest versions that the packages allow, as pip constraints: torch>=2.10 becomes torch==2.10.*."""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("report", "hf", "track")

lists: list[list[str]] = []
for package in ("pointsman", "pointsman-lab"):
    file = Path(__file__).parents[1] / "packages" / package / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    lists += [project["dependencies"], *(project["optional-dependencies"].get(extra, []) for extra in EXTRAS)]
for requirement in sorted(
    {requirement for one in lists for requirement in one if not requirement.startswith("pointsman")}
):
    found = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement)
    if found is None:
        sys.exit(f"pyproject.toml: {requirement!r}: allowed is name>=version")
    name, version = found.groups()
    print(f"{name}=={version}" if version.count(".") >= 2 else f"{name}=={version}.*")
