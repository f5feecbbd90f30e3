"""Image classification by vision transformers, judged by accuracy, also on shifted images."""

from __future__ import annotations

from typing import Any

from pointsman_lab.registry import Setting, TaskEntry
from pointsman_lab.tasks.images.presets import PRESETS

EXAMPLES = {
    "evaluate": "  pointsman evaluate runs/compare-cifar10 --robust c      # corrupted images\n",
    "finetune": "\nImages:\n  pointsman finetune runs/vit --task cifar10-10k:size=64 --epochs 2\n",
}
SETTINGS = {"augment": Setting("", "what is done to training images: crop=4+flip")}


class Images(TaskEntry):
    name = "images"
    families = ("vit",)
    levels = ("class",)
    presets = PRESETS
    settings = SETTINGS
    records = ("robust-*.json",)

    def config(self, family: str) -> Any:
        from pointsman_lab.tasks.images.vit import VisionTransformerConfig

        return VisionTransformerConfig

    def open(self, config: Any, progress: Any = None, vocabulary: Any = None) -> Any:
        from pointsman_lab.tasks.images.task import ImageClassification

        return ImageClassification.open(config, progress, vocabulary)

    def vocabulary(self, text: str) -> Any:
        from pointsman_lab.tasks.images.image_set import ClassNames

        return ClassNames.from_json(text)

    def epilog(self, command: str) -> str:
        return EXAMPLES.get(command, "")

    def add_flags(self, command: str, flags: Any) -> None:
        if command == "evaluate":
            told = "of image runs: c (corruptions), a, r (other pictures of the classes), o (outliers), hard, pgd, fgsm"
            flags.add_argument("--robust", metavar="KIND[:PATH]", help=told)

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        from pointsman_lab.tasks.images import cli

        if command == "evaluate" and values.robust:
            return cli.evaluate(values, device)
        return cli.finetune(flags, values, device) if command == "finetune" else None

    def published(self, run: Any, column: Any, top_k: int | None) -> float | None:
        from pointsman_lab.tasks.images.sections import published

        return published(run, column, top_k)

    def data_of(self, run: Any) -> str:
        return str(run.config.get("data", "")).rpartition("/")[2].partition(":")[0]

    def sections(self, comparison: Any) -> Any:
        from pointsman_lab.tasks.images.sections import sections

        return sections(comparison)


TASK = Images()
