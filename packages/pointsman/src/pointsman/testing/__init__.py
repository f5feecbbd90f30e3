"""The contract of a router as a library: tests for routers that live in other packages.

`check_router("mine:sharpness=2")` runs every check and raises AssertionError with the promise that the router breaks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.testing.case import Case
    from pointsman.testing.contract import CHECKS, check_router

__all__ = ["CHECKS", "Case", "check_router"]


def __getattr__(name: str) -> Any:
    # pytest imports this package with the plugin, in every project of the environment: without torch
    if name == "Case":
        from pointsman.testing.case import Case

        return Case
    if name in ("CHECKS", "check_router"):
        from pointsman.testing import contract

        return getattr(contract, name)
    raise AttributeError(f"module 'pointsman.testing' has no attribute {name!r}")
