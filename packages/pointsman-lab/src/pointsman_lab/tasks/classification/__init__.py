"""Classification of texts: a pre-trained language model with a head, judged by accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pointsman._errors import RunError
from pointsman_lab.registry import TaskEntry


class ClassificationEntry(TaskEntry):
    name = "classification"
    takes = ("transformer-xl", "decoder")
    learns_files = True

    @property
    def learns(self) -> Sequence[str]:
        from pointsman_lab.tasks.classification.data import TASKS

        return tuple(TASKS)

    def fine_tuning(self) -> Any:
        from pointsman_lab.tasks.classification.task import Classification

        return Classification

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        if command != "evaluate" or not (values.run / "finetune.json").is_file():
            return None
        if values.set:
            raise RunError("pointsman evaluate: --set has no effect on fine-tuned runs; leave it out")
        from pointsman_lab.tasks.attacks.cli import run_attacks

        return run_attacks(values, device)


TASK = ClassificationEntry()
