"""A pytest plugin: `pytest --pyargs pointsman.testing --router SPEC` runs the contract on a router.

pytest loads it in every project of an environment with pointsman, so it imports no torch and adds two options only.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --router and --import."""
    group = parser.getgroup("pointsman", "the contract of routers (pytest --pyargs pointsman.testing)")
    group.addoption("--router", action="append", default=[], metavar="SPEC", help="a router spec; may be repeated")
    group.addoption(
        "--import",
        action="append",
        default=[],
        dest="router_imports",
        metavar="MODULE|FILE.py",
        help="what registers the router; not needed for installed entry points of the group pointsman.routers",
    )
