"""Robustness to text attacks.

`attacks` changes texts, `attacked` evaluates models on them, `runs` saved runs, `compare` whole comparisons;
`text_attack` runs the recipes of the package TextAttack.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman_lab.robustness.compare import comparison_under_attack
    from pointsman_lab.robustness.runs import finetuned_under_attack, run_under_attack
    from pointsman_lab.robustness.text_attack import recipe_attack

_HOMES = {
    "comparison_under_attack": "compare",
    "finetuned_under_attack": "runs",
    "recipe_attack": "text_attack",
    "run_under_attack": "runs",
}
"""Name -> its module, imported when it is asked for: reports read `image_scores` without torch."""

__all__ = [
    "comparison_under_attack",
    "finetuned_under_attack",
    "recipe_attack",
    "run_under_attack",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
