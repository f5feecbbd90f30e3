"""Which step's weights are evaluated (`choose="best-valid"`): it follows from the rows of metrics.jsonl.

A checkpoint is written where a validation is due, before it, and that of the best step is kept. So a run that is killed
and resumed chooses as if nothing had happened.
"""

from __future__ import annotations

from pointsman._errors import RunError
from pointsman.ranks import Ranks
from pointsman.routers.frame.registry import has_one_k
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.directory import RunDirectory
from pointsman_lab.training.task import Task


def chosen_step(directory: RunDirectory, config: RunConfig, last: int) -> int:
    """Of a run saved at step `last`: that step, or the one with the largest validation figure, the first of equals."""
    if config.choose == "last":
        return last
    k = validated_k(config)
    rows = [row for row in directory.metrics("valid") if row["top_k"] == k and row["step"] <= last]
    return max(rows, key=lambda row: (row["value"], -row["step"]))["step"] if rows else last


def validated_k(config: RunConfig) -> int:
    """The k that weights are chosen by: that of training; of a baseline its number of experts."""
    return config.model.num_experts if has_one_k(config.model.router) else config.model.top_k


def check_choice(config: RunConfig, task: Task, ranks: Ranks) -> None:
    """Refuses `choose="best-valid"` for runs that have nothing to choose by."""
    if config.choose == "last":
        return
    if ranks.count > 1:
        raise RunError(f"choose={config.choose}: it is for runs of one process; allowed here is last")
    held_out = task.validation_split(config)
    if not task.may_choose or held_out in (None, task.reported_split(config)):
        raise RunError(
            f"choose={config.choose}: it is for fine-tuning on tasks with held-out rows; allowed here is last"
        )
    if not config.validate_every:
        raise RunError(f"choose={config.choose}: validate_every must be above 0")
