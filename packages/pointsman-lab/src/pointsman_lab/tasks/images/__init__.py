"""Image classification by vision transformers, judged by accuracy, also on shifted images."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pointsman_lab.registry import Setting, TaskEntry

_IMAGES = {
    "family": "vit", "memory_length": 0, "eval_memory_length": 0, "train_top_k": "2", "decay": "decoupled",
    "decay_on": "matrices", "clip_norm": 1.0,
}  # fmt: skip
_VMOE = {
    **_IMAGES, "data": "imagenet:size=224", "augment": "randaugment=2,10+inception+flip+mixup=0.2", "steps": 46_449,
    "batch_size": 8192, "learning_rate": 3e-3, "warmup_steps": 10_000, "lr_schedule": "linear",
    "final_learning_rate": 1e-5, "weight_decay": 0.1, "eval_batch_size": 256, "validate_every": 1000,
    "checkpoint_every": 1000, "log_every": 50,
}  # fmt: skip
_SHAPE = {"loss": "sigmoid", "representation": 512, "expert_dropout": 0.2, "equal_experts": True}
_EVERY_2 = {**_SHAPE, "num_experts": 32, "moe_layers": "every:2:1"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny-vit": {
        **_IMAGES, "data": "cifar10-10k", "augment": "crop=4+flip", "steps": 2400, "batch_size": 64,
        "learning_rate": 1e-3, "warmup_steps": 100, "weight_decay": 0.05, "label_smoothing": 0.1,
        "eval_batch_size": 100, "validate_every": 600, "checkpoint_every": 600,
        "model": {
            "image_size": 32, "patch": 4, "num_classes": 10, "num_layers": 4, "dim": 128, "num_heads": 4,
            "head_dim": 32, "hidden_dim": 256, "expert_hidden_dim": 128, "pooling": "mean", "init_std": 0.06,
        },
    },
    "vmoe-s32-last2": {**_VMOE, "model": _SHAPE},
    "vmoe-s32-every2": {**_VMOE, "model": _EVERY_2},
}  # fmt: skip
"""Presets of image classifiers.

- `tiny-vit`: chosen here for two CPU cores, CIFAR-10 with 10,000 training images.
- `vmoe-SIZE-LAYOUT`: V-MoE's code for ImageNet-1K from scratch with S/32 (300 epochs of 99 % of the training images in
  batches of 8,192). Crops are of the images as they lie on the disk. Image size and number of classes
  become the data's.
"""


EXAMPLE = "  pointsman evaluate runs/compare-cifar10 --robust c      # corrupted images\n"
SETTINGS = {"augment": Setting("", "what is done to training images: crop=4+flip")}


class Images(TaskEntry):
    name = "images"
    families = ("vit",)
    configs = ("pointsman_lab.tasks.images.vit:VisionTransformerConfig",)
    task = "pointsman_lab.tasks.images.task:ImageClassification"
    reader = "pointsman_lab.tasks.images.image_set:ClassNames.from_json"
    levels = ("class",)
    presets = PRESETS
    settings = SETTINGS
    unread = frozenset({"memory_length", "eval_memory_length", "segment_length", "eval_segment_length"})
    tabler = "pointsman_lab.tasks.images.robust_table:robust_tables"
    epilogs = MappingProxyType({"evaluate": EXAMPLE})

    def add_flags(self, command: str, flags: Any) -> None:
        if command == "evaluate":
            told = "of image runs: c (corruptions), a, r (other pictures of the classes), o (outliers), hard, pgd, fgsm"
            flags.add_argument("--robust", metavar="KIND[:PATH]", help=told)

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        if command != "evaluate" or not values.robust:
            return None
        from pointsman_lab.tasks.images.robust import evaluate_shifted

        return evaluate_shifted(values, device)

    def published(self, run: Any, column: Any, top_k: int | None) -> float | None:
        from pointsman_lab.tasks.images.robust_table import published

        return published(run, column, top_k)

    def data_of(self, run: Any) -> str:
        return str(run.config.get("data", "")).rpartition("/")[2].partition(":")[0]


TASK = Images()
