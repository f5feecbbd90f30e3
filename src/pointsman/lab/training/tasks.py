"""The task that a run's settings name: by the family of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pointsman._errors import RunError
from pointsman.lab.data.download import DataProgress
from pointsman.lab.training.config import RunConfig
from pointsman.lab.training.image_classification import ImageClassification
from pointsman.lab.training.language_modelling import LanguageModelling
from pointsman.lab.training.masked_language_modelling import MaskedLanguageModelling
from pointsman.lab.training.task import Task
from pointsman.lab.training.translation import Translation

TASKS: Mapping[str, Callable[[RunConfig, DataProgress | None, Any], Task]] = MappingProxyType(
    {
        "transformer-xl": LanguageModelling.open,
        "decoder": LanguageModelling.open,
        "encoder": MaskedLanguageModelling.open,
        "encoder-decoder": Translation.open,
        "vit": ImageClassification.open,
    }
)
"""Family -> what opens the task that its models are pre-trained on."""


def pretraining_task(config: RunConfig, progress: DataProgress | None = None, vocabulary: Any = None) -> Task:
    """The task of these settings, with its data.

    Args:
        progress: called as progress(what, done, total).
        vocabulary: that of a trained run; None: built from the data.

    Raises:
        RunError: models of this family have no pre-training task, or what its data raise.
    """
    name = config.model.family
    if name not in TASKS:
        raise RunError(f"models of the family {name!r} are not pre-trained by `train`: allowed are {', '.join(TASKS)}")
    for setting in ("tokenizer", "start_from") if TASKS[name] != LanguageModelling.open else ():
        if value := getattr(config, setting):
            raise RunError(f"{setting}={value!r} has no effect on models of the family {name!r}")
    return TASKS[name](config, progress, vocabulary)
