"""Presets of image classifiers.

- `tiny-vit`: chosen here for two CPU cores, CIFAR-10 with 10,000 training images.
- `vmoe-SIZE-LAYOUT`: V-MoE's code for ImageNet-1K from scratch with S/32 (300 epochs of 99 % of the training images in
  batches of 8,192); the larger shapes have the same settings, for want of published ones. Ours crops images that are
  resized once to 224 pixels, not the originals. Image size and number of classes become the data's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "vmoe-b16-every2": {
        **_VMOE,
        "model": {
            **_EVERY_2, "patch": 16, "num_layers": 12, "dim": 768, "num_heads": 12, "hidden_dim": 3072,
            "representation": 768,
        },
    },
    "vmoe-l16-every2": {
        **_VMOE,
        "model": {
            **_EVERY_2, "patch": 16, "num_layers": 24, "dim": 1024, "num_heads": 16, "hidden_dim": 4096,
            "representation": 1024,
        },
    },
    "vmoe-h14-every2": {
        **_VMOE,
        "model": {
            **_EVERY_2, "patch": 14, "num_layers": 32, "dim": 1280, "num_heads": 16, "head_dim": 80,
            "hidden_dim": 5120, "representation": 1280,
        },
    },
}  # fmt: skip
