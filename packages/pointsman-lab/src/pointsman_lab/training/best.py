"""The weights with the best validation figure (`choose="best-valid"`), kept during a fine-tuning.

Which step is the best follows from the rows of metrics.jsonl; its weights are in every checkpoint as best.safetensors.
So a run that is killed and resumed chooses as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pointsman._errors import RunError
from pointsman.ranks import ALONE, Ranks
from pointsman.routers.frame.registry import has_one_k
from pointsman_lab.runs.checkpoints import Checkpoint
from pointsman_lab.training.checkpoint import checkpoint_tensors
from pointsman_lab.training.config import RunConfig
from pointsman_lab.training.task import Task

FILE = "best"


def best_step(rows: Iterable[Mapping[str, Any]], top_k: int) -> int | None:
    """The step with the largest validation figure at this k, the first of equals; None: nothing is validated yet."""
    found = [(row["value"], -row["step"]) for row in rows if row["kind"] == "valid" and row["top_k"] == top_k]
    return -max(found)[1] if found else None


def validated_k(config: RunConfig) -> int:
    """The k that weights are chosen by: that of training; of a baseline its number of experts."""
    return config.model.num_experts if has_one_k(config.model.router) else config.model.top_k


class Best:
    """The best weights so far."""

    def __init__(self, model: nn.Module, config: RunConfig, task: Task, ranks: Ranks = ALONE) -> None:
        if ranks.count > 1:
            raise RunError(f"choose={config.choose}: it is for runs of one process; allowed here is last")
        held_out = task.validation_split(config)
        if not task.may_choose or held_out in (None, task.reported_split(config)):
            raise RunError(
                f"choose={config.choose}: it is for fine-tuning on tasks with held-out rows; allowed here is last"
            )
        if not config.validate_every:
            raise RunError(f"choose={config.choose}: validate_every must be above 0")
        self.model = model
        self.top_k = validated_k(config)
        self.step: int | None = None
        self._weights: dict[str, Tensor] = {}

    def consider(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Keeps the model's weights if this step is the best of these rows."""
        if best_step(rows, self.top_k) == step:
            self.step = step
            self._weights = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def restore(self, checkpoint: Checkpoint, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Continues at a checkpoint of this step; a checkpoint is written before the validation of its step."""
        rows = list(rows)
        if (checkpoint.path / f"{FILE}.safetensors").is_file():
            self.step = int(checkpoint.state[FILE])
            self._weights = checkpoint_tensors(checkpoint, FILE)
        self.consider(rows, step)

    def files(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds of it."""
        return {FILE: self._weights} if self._weights else {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the best weights; afterwards its own."""
        own = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        with torch.no_grad():
            self.model.load_state_dict(self._weights)
            try:
                yield
            finally:
                self.model.load_state_dict(own)
