"""A pytest plugin: `pytest --pyargs pointsman.testing --pointsman-router SPEC` runs the contract on a router.

pytest loads it in every project of an environment with pointsman, so it imports no torch and adds two options only,
under names that no project has by chance.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --pointsman-router and --pointsman-import."""
    group = parser.getgroup("pointsman", "the contract of routers (pytest --pyargs pointsman.testing)")
    many: dict[str, Any] = {"action": "append", "default": []}
    group.addoption("--pointsman-router", metavar="SPEC", help="a router spec; may be repeated", **many)
    group.addoption(
        "--pointsman-import",
        metavar="MODULE|FILE.py",
        help="what registers the router; not needed for installed entry points of the group pointsman.routers",
        **many,
    )
