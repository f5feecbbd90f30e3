"""The task that a run's settings name: by the family of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from pointsman._errors import RunError
from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import check_layers
from pointsman.ranks import Ranks
from pointsman_lab.data.download import DataProgress
from pointsman_lab.models.families import build_model
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.image_classification import ImageClassification
from pointsman_lab.training.language_modelling import LanguageModelling
from pointsman_lab.training.masked_language_modelling import MaskedLanguageModelling
from pointsman_lab.training.state import check_ranks
from pointsman_lab.training.task import Task
from pointsman_lab.training.translation import Translation

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


def check_models(configs: Sequence[RunConfig], task: Task, layout: Layout) -> None:
    """Refuses settings whose model cannot be built or divided, before anything is trained."""
    for config in configs:
        prepared = task.prepared(config)
        with torch.device("meta"):
            model = build_model(prepared.model) if config.start_from else task.build_model(prepared)
        if layout.world > 1:
            check_layers(model, layout)


def check_on_ranks(
    configs: Sequence[RunConfig], count: int, layout: Layout, progress: DataProgress | None = None
) -> None:
    """Reads the data and checks all that ranks will train, before one of them starts: settings of the same data.

    Raises:
        RunError: what every rank would raise.
    """
    for config in configs:
        check_ranks(config, Ranks(count=count))
    task = pretraining_task(configs[0], progress)
    task.check(configs[0])
    check_models(configs, task, layout)
