"""The commands that make runs again, from what is recorded of them, and what differs from a preset or recipe."""

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from pointsman_lab._values import written
from pointsman_lab.registry import OLDEST, presets
from pointsman_lab.report.task_table import pretrained_of
from pointsman_lab.runs.comparison import Comparison
from pointsman_lab.runs.imports import imports_of
from pointsman_lab.runs.paths import CONFIG, FINETUNE
from pointsman_lab.runs.record import RunRecord, read_object
from pointsman_lab.training.settings import derived, flat


def command(comparison: Comparison) -> str:
    """The recorded command of a comparison or an audit; of other runs one made from the settings."""
    runs = comparison.runs.values()
    made = (run.config.get("command") or _finetune_command(run) or _train_command(run) for run in runs)
    return comparison.command or "\n".join(map(str, made))


def _finetune_command(run: RunRecord) -> str:
    """`pointsman finetune` with what differs from the task's defaults; "" for a run that was not fine-tuned.

    Where the pre-trained run is not around it, that is called RUN, and settings that only it explains are left out.
    """
    if not (about := read_object(run.path / FINETUNE)):
        return ""
    with suppress(AttributeError, LookupError, TypeError, ValueError):  # of a stranger's file
        return _of_finetuning(run, about)
    return "the command is not recorded"


def _of_finetuning(run: RunRecord, about: Mapping[str, Any]) -> str:
    from pointsman_lab.finetuning.settings import Finetuning  # torch, which few pages need
    from pointsman_lab.training.config import RunConfig

    before, k, length = pretrained_of(run.path), run.config.get("train_top_k"), run.config.get("segment_length")
    preset = "" if run.config.get("preset") == "finetune" else str(run.config.get("preset", ""))
    usual = Finetuning(about["task"], steps=run.steps, train_top_k=k, length=length, preset=preset)
    usual, asked = usual.for_router(run.router), "" if run.router == "dense-matched" else k
    known = read_object(before / CONFIG)
    differing = [
        ("task-preset", preset, ""), ("balance", about["balance"], usual.balance),
        ("freeze", ",".join(about["freeze"]) or "none", ",".join(usual.freeze) or "none"),
        ("task-top-k", asked, usual.defaults.train_top_k or known.get("train_top_k")),
        ("length", length, usual.defaults.length), ("pooling", about["pooling"], usual.pooled),
    ]  # fmt: skip
    told = {"task": about["task"], "steps": run.steps, "seeds": run.seed + 1}
    told |= {name: value for name, value, default in differing if value not in (default, "", None)}
    words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    words += ["--from-scratch"] if about["from_scratch"] else []
    if known:
        name = os.path.basename(os.path.abspath(usual.kind.path(usual.task))).partition(":")[0]
        expected = usual.config(RunConfig.from_dict(known), SimpleNamespace(name=name), run.seed)
        changed = deviations(run.config, flat(expected.to_dict()))
        words += [word for key, value in changed.items() for word in ("--set", f"{key}={written(value)}")]
    return shlex.join(["pointsman", "finetune", before.name if known else "RUN", *words])


def _train_command(run: RunRecord) -> str:
    """`pointsman train` with all settings that differ from the preset or recipe."""
    from pointsman_lab.recipes import recipes

    name = str(run.config.get("preset"))
    given = {key: run.config[key] for key in ("data", "steps", "seed") if key in run.config}
    expected = named(name, router=run.router, **given)
    words = ["pointsman", "train", *([name] if name in recipes() else []), "--router", run.router]
    words += _flags(run.config, (*(() if name in recipes() else ("preset",)), *given))
    words += [word for one in imports_of(run.config) for word in ("--import", one)]
    if expected is None:  # an unknown preset, or a router of another package
        words += _flags(run.config, ("train_top_k", "k_schedule"))
    else:
        told = (*given, "preset", "model.router", "imports")
        other = {key: value for key, value in deviations(run.config, expected).items() if key not in told}
        words += [word for key, value in other.items() for word in ("--set", f"{key}={written(value)}")]
    return shlex.join([*words, "--out", run.path.name])


def _flags(settings: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    words: list[str] = []
    for name in names:
        value = settings.get(name, settings.get(f"eval_{name}"))
        if value not in (None, ""):
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words += ["--" + name.replace("_", "-"), text]
    return words


def named(name: str, **given: Any) -> dict[str, Any] | None:
    """The settings of a preset or recipe, those of the model as "model.…".

    None where there is none of that name, or where it refuses the arguments, such as a router of another package.
    """
    from pointsman_lab.recipes import preset, recipe, recipes

    with suppress(ValueError):
        if name in presets():
            return flat(preset(name, **given).to_dict())
        if name in recipes():
            own = {key: value for key, value in given.items() if key in ("router", "seed")}
            return flat(recipe(name, **own).to_dict())
    return None


def deviations(config: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of config.json that differ from `expected`, without those that follow from the data and the seed."""
    own = config.get("model", {}).get("family")
    fixed = derived(str(own or OLDEST)) | derived(str(expected.get("model.family") or OLDEST))
    known = {key: value for key, value in flat(config).items() if key in expected and key not in fixed}
    return {key: value for key, value in known.items() if value != expected[key]}
