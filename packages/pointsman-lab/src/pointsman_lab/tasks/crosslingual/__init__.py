"""XTREME's tasks: an encoder is fine-tuned on English and judged in every language with the same weights."""

from __future__ import annotations

from typing import Any

from pointsman_lab.registry import Setting, TaskEntry

SETTINGS = {"n_best": Setting(0, "of questions: answers to each that are kept beside the predictions", trains=False)}


class CrossLingual(TaskEntry):
    name = "crosslingual"
    takes = ("encoder",)
    settings = SETTINGS

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        from pointsman_lab.tasks.crosslingual import cli

        return cli.evaluate(values, device) if command == "evaluate" and cli.is_crosslingual_run(values.run) else None


TASK = CrossLingual()
