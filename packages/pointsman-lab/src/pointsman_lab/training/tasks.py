"""The task that a run's settings name: by the family of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pointsman.parallel.layout import Layout
from pointsman.parallel.shard import check_layers
from pointsman.ranks import Ranks
from pointsman_lab.data.download import DataProgress
from pointsman_lab.models.config import build_model
from pointsman_lab.registry import trains
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.state import check_ranks
from pointsman_lab.training.task import Task


def pretraining_task(config: RunConfig, progress: DataProgress | None = None, vocabulary: Any = None) -> Task:
    """The task of these settings, by the family of their model, with its data.

    Args:
        progress: called as progress(what, done, total).
        vocabulary: that of a trained run; None: built from the data.

    Raises:
        RunError: what reading the data raises.
    """
    task: Task = trains(config.model.family).open(config, progress, vocabulary)
    return task


def check_models(configs: Sequence[RunConfig], task: Task, layout: Layout) -> None:
    """Refuses settings whose model cannot be built or divided, before anything is trained."""
    for config in configs:
        prepared = task.prepared(config)
        with torch.device("meta"):
            model = build_model(prepared.model) if config.own.get("start_from") else task.build_model(prepared)
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
