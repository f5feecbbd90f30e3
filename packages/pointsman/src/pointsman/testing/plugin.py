"""A pytest plugin: `pytest --pyargs pointsman.testing --pointsman-router SPEC` runs the contract on a router.

pytest loads it in every project of an environment with pointsman, so it imports no torch and adds two options only,
under names that no project has by chance.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --pointsman-router and --pointsman-import."""
    group = parser.getgroup("pointsman", "the contract of routers (pytest --pyargs pointsman.testing)")
    router, imported = "a router spec; may be repeated", "what registers it; not needed for installed entry points"
    group.addoption("--pointsman-router", action="append", default=[], metavar="SPEC", help=router)
    group.addoption("--pointsman-import", action="append", default=[], metavar="MODULE|FILE.py", help=imported)
