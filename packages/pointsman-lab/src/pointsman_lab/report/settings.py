"""A run's settings against those of the preset or recipe that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman._errors import RunError


def named(name: str, **given: Any) -> dict[str, Any] | None:
    """The settings of a preset or recipe, those of the model as "model.…".

    None where there is none of that name, or where it refuses the arguments, such as a router of another package.

    Args:
        given: further arguments of `recipes.preset`; a recipe takes router and seed only.
    """
    from pointsman_lab.recipes import preset, recipe, recipes
    from pointsman_lab.registry import presets
    from pointsman_lab.training.config import flat

    try:
        if name in presets():
            return flat(preset(name, **given).to_dict())
        if name in recipes():
            own = {key: value for key, value in given.items() if key in ("router", "seed")}
            return flat(recipe(name, **own).to_dict())
    except (ValueError, RunError):
        return None
    return None


def deviations(config: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of config.json that differ from `expected`, without those that follow from the data and the seed."""
    from pointsman_lab.registry import OLDEST
    from pointsman_lab.training.config import derived, flat

    own = config.get("model", {}).get("family")
    fixed = derived(str(own or OLDEST)) | derived(str(expected.get("model.family") or OLDEST))

    return {
        key: value
        for key, value in flat(config).items()
        if key in expected and key not in fixed and value != expected[key]
    }
