"""XTREME's tasks: an encoder is fine-tuned on English and judged in every language with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pointsman_lab.registry import TaskEntry


class CrossLingualEntry(TaskEntry):
    name = "crosslingual"
    takes = ("encoder",)
    together = ("udpos", "panx", "xquad", "mlqa", "tydiqa", "xnli", "pawsx")

    @property
    def learns(self) -> Sequence[str]:
        from pointsman_lab.tasks.crosslingual.xtreme import XTREME

        return tuple(XTREME)

    def fine_tuning(self) -> Any:
        from pointsman_lab.tasks.crosslingual.task import CrossLingual

        return CrossLingual

    def tables(self, comparison: Any) -> Sequence[Any]:
        from pointsman_lab.tasks.crosslingual.table import XtremeTable

        return XtremeTable.all(comparison)

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        from pointsman_lab.tasks.crosslingual import cli

        return cli.evaluate(values, device) if command == "evaluate" and cli.is_crosslingual_run(values.run) else None


TASK = CrossLingualEntry()
