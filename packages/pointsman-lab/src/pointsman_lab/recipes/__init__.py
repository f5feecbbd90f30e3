"""The papers' settings as functions that return a full RunConfig, and presets for runs of one's own."""

from __future__ import annotations

import inspect

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.recipes.hyperrouter import RECIPES
from pointsman_lab.recipes.presets import PRESETS, preset
from pointsman_lab.training.config import RunConfig

__all__ = ["PRESETS", "RECIPES", "list_recipes", "preset", "recipe"]


def list_recipes() -> dict[str, str]:
    """Every recipe with the first line of what its docstring says."""
    return {name: (inspect.getdoc(function) or "").splitlines()[0] for name, function in RECIPES.items()}


def recipe(name: str, *, router: str | None = None, seed: int | None = None) -> RunConfig:
    """The settings of a paper's run.

    Args:
        name: as `list_recipes` names it.
        router: another row of the paper's table than the recipe's own.
        seed: another than the paper's.

    Raises:
        RunError: an unknown recipe, with the nearest name.
    """
    if name not in RECIPES:
        raise RunError(f"unknown recipe {name!r}: {did_you_mean(name, RECIPES)}")
    given = {"router": router, "seed": seed}
    return RECIPES[name](**{key: value for key, value in given.items() if value is not None})
