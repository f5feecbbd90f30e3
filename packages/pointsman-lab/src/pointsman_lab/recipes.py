"""Presets for runs of one's own, and the papers' settings, as full settings of a run (`RunConfig`)."""

import inspect
from collections.abc import Callable
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.registry import entries, find_preset, preset_config
from pointsman_lab.training.config import RunConfig

VOCABULARY_UNKNOWN = 1_000_000
"""Stands for the vocabulary size until the data are known."""

OF_A_PRESET = ("family", "model", "router", "vocabulary")
"""What a preset holds besides settings of a run."""


def preset(
    name: str,
    *,
    router: str = "smoe",
    data: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> RunConfig:
    """The settings of a run: a preset's shape and training, with the given router and data.

    Args:
        name: one of `registry.presets`; the tasks' folders describe them.
        router: a router spec, `a|b`, "dense" or "dense-dropout".
        data: a corpus or images, as `--data` names them; None: the preset's, by default "stdlib".
        steps: instead of the preset's number of steps; validation and checkpoints come more often if it is smaller.
        seed: of weights, dropout and routing noise.
        settings: any others, as `RunConfig.with_overrides` takes them.

    Raises:
        RunError: an unknown preset or setting, with the nearest name; a value out of range.
    """
    found = {key: value for key, value in find_preset(name).items() if key not in OF_A_PRESET}
    values: dict[str, Any] = {"data": "stdlib", **found}
    if data is not None:
        values["data"] = data
    if steps is not None:
        values["steps"] = steps
        for often in ("validate_every", "checkpoint_every"):
            if values.get(often):
                values[often] = min(values[often], -(-steps // 4))
        if (kept := values.get("keep_checkpoints", 2)) > 2:  # all of them, evenly spaced
            values["checkpoint_every"] = -(-steps // (kept - 1))
        values["warmup_steps"] = min(values.get("warmup_steps", 0), steps // 10)
    model = preset_config(name, VOCABULARY_UNKNOWN, router=router)
    return RunConfig.of(model, seed=seed, preset=name, **values).with_overrides(settings)


def recipes() -> dict[str, Callable[..., RunConfig]]:
    """Every recipe: a function of router and seed."""
    return {name: function for entry in entries() for name, function in entry.recipes().items()}


def list_recipes() -> dict[str, str]:
    """Every recipe with the first line of what its docstring says."""
    return {name: (inspect.getdoc(function) or "").splitlines()[0] for name, function in recipes().items()}


def recipe(name: str, *, router: str | None = None, seed: int | None = None) -> RunConfig:
    """The settings of a paper's run.

    Args:
        name: as `list_recipes` names it.
        router: another row of the paper's table than the recipe's own.
        seed: another than the paper's.

    Raises:
        RunError: an unknown recipe, with the nearest name.
    """
    known = recipes()
    if name not in known:
        raise RunError(f"unknown recipe {name!r}: {did_you_mean(name, known)}")
    given = {"router": router, "seed": seed}
    return known[name](**{key: value for key, value in given.items() if value is not None})
