"""Tests for what lives in other packages: routers and trainers.

`check_router("mine:sharpness=2")` runs every check and raises AssertionError with the promise that the router breaks;
`check_trainer(step)` says what a training step does to the router of a tiny mixture of experts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.testing.case import Case
    from pointsman.testing.contract import CHECKS, check_router
    from pointsman.testing.trainers.check import check_trainer

__all__ = ["CHECKS", "Case", "check_router", "check_trainer"]
_FILES = {"Case": "case", "CHECKS": "contract", "check_router": "contract", "check_trainer": "trainers.check"}


def __getattr__(name: str) -> Any:
    # pytest imports this package with the plugin, in every project of the environment: without torch
    if name not in _FILES:
        raise AttributeError(f"module 'pointsman.testing' has no attribute {name!r}")
    return getattr(import_module(f"pointsman.testing.{_FILES[name]}"), name)
