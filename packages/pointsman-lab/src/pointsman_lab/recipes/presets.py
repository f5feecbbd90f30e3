"""Presets: a model's shape with the training settings that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman_lab.models.families import MODEL_PRESETS, preset_config
from pointsman_lab.training.config import RunConfig

VOCABULARY_UNKNOWN = 1_000_000
"""Stands for the vocabulary size until the data are known."""

_PAPER = {"batch_size": 22, "segment_length": 512, "memory_length": 512, "learning_rate": 2.5e-4, "clip_norm": 0.25}
_PAPER_EVALUATION = {"eval_batch_size": 10, "eval_segment_length": 128, "eval_memory_length": 896}
_PAPER_SCHEDULE = {"train_top_k": "2:N", "validate_every": 4000, "checkpoint_every": 4000, "log_every": 50}
_HYPERROUTER = {**_PAPER, **_PAPER_EVALUATION, **_PAPER_SCHEDULE}
_MUTUAL = {
    "batch_size": 48, "segment_length": 512, "memory_length": 1024, "learning_rate": 7e-4, "warmup_steps": 4000,
    "lr_schedule": "constant", "clip_norm": 0.0, "train_top_k": "2",
    "eval_batch_size": 48, "eval_segment_length": 512, "eval_memory_length": 1024,
    "validate_every": 1000, "checkpoint_every": 1000, "log_every": 50,
}  # fmt: skip

_TINY = {
    "steps": 1600, "batch_size": 16, "segment_length": 64, "memory_length": 64, "learning_rate": 4e-3,
    "warmup_steps": 100, "clip_norm": 1.0, "train_top_k": "2",
    "eval_batch_size": 32, "eval_segment_length": 64, "eval_memory_length": 128, "eval_tokens": 200_000,
    "valid_tokens": 20_000, "validate_every": 400, "checkpoint_every": 400,
}  # fmt: skip

_LARGE = {
    "steps": 1000, "batch_size": 64, "accumulation": 64, "segment_length": 4096, "memory_length": 0,
    "learning_rate": 4e-4, "warmup_steps": 100, "clip_norm": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.1,
    "decay": "decoupled", "train_top_k": "8", "precision": "bfloat16", "eval_top_k": (8,), "eval_batch_size": 1,
    "eval_segment_length": 4096, "eval_memory_length": 0, "valid_tokens": 100_000,
}  # fmt: skip

_MASKED = {
    "memory_length": 0, "eval_memory_length": 0, "train_top_k": "1", "betas": (0.9, 0.98), "lr_schedule": "linear",
    "weight_decay": 0.01, "decay": "decoupled", "decay_on": "matrices",
}  # fmt: skip
_TINY_MASKED = {
    **_MASKED, "data": "xtreme-text:languages=de+en+es+fr", "steps": 2400, "batch_size": 32, "segment_length": 128,
    "learning_rate": 3e-3, "warmup_steps": 240, "clip_norm": 1.0, "mask_rate": 0.3, "eval_batch_size": 32,
    "eval_segment_length": 128, "valid_tokens": 20_000, "validate_every": 600, "checkpoint_every": 300,
    "keep_checkpoints": 9,
}  # fmt: skip
_XMOE = {
    **_MASKED, "data": "xtreme-text", "pieces": 16_384, "steps": 125_000, "batch_size": 2048, "accumulation": 64,
    "segment_length": 512, "learning_rate": 5e-4, "warmup_steps": 10_000, "adam_eps": 1e-6, "clip_norm": 2.0,
    "eval_batch_size": 32, "eval_segment_length": 512, "validate_every": 5000, "checkpoint_every": 12_500,
    "keep_checkpoints": 10, "log_every": 50,
}  # fmt: skip
_IMAGES = {"memory_length": 0, "eval_memory_length": 0, "train_top_k": "2", "decay": "decoupled", "clip_norm": 1.0}
_TINY_VIT = {
    **_IMAGES, "data": "cifar10-10k", "augment": "crop=4+flip", "steps": 2400, "batch_size": 64,
    "learning_rate": 1e-3, "warmup_steps": 100, "weight_decay": 0.05, "decay_on": "matrices", "label_smoothing": 0.1,
    "eval_batch_size": 100, "validate_every": 600, "checkpoint_every": 600,
}  # fmt: skip
_VMOE = {
    **_IMAGES, "data": "imagenet:size=224", "augment": "randaugment=2,10+inception+flip+mixup=0.2", "steps": 46_449,
    "batch_size": 8192, "learning_rate": 3e-3, "warmup_steps": 10_000, "lr_schedule": "linear",
    "final_learning_rate": 1e-5, "weight_decay": 0.1, "decay_on": "matrices", "eval_batch_size": 256,
    "validate_every": 1000, "checkpoint_every": 1000, "log_every": 50,
}  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _TINY,
    "tiny-decoder": _TINY,
    "olmoe-1b-7b": _LARGE,
    "qwen3-30b-a3b": _LARGE,
    "deepseek-like": _LARGE,
    "tiny-mlm": _TINY_MASKED,
    "tiny-mt": {
        "data": "multi30k:from=de+fr+cs:to=en", "pieces": 4096, "steps": 4000, "batch_size": 64, "segment_length": 64,
        "memory_length": 0, "eval_segment_length": 64, "eval_memory_length": 0, "eval_batch_size": 100,
        "train_top_k": "2", "learning_rate": 2e-3, "lr_schedule": "inverse-sqrt", "warmup_steps": 400,
        "betas": (0.9, 0.98), "weight_decay": 1e-4, "label_smoothing": 0.1, "clip_norm": 1.0, "beam": 5,
        "valid_tokens": 4000, "validate_every": 1000, "checkpoint_every": 1000,
    },
    "xmoe-base": _XMOE,
    "xmoe-torchscale": {**_XMOE, "train_top_k": "2", "mask_token_share": 1.0, "random_share": 0.0},
    "small": {"steps": 400_000, **_HYPERROUTER},
    "medium": {"steps": 400_000, **_HYPERROUTER},
    "large": {"steps": 100_000, **_HYPERROUTER},
    "mutual-medium": {"steps": 60_000, **_MUTUAL},
    "mutual-large": {
        "steps": 80_000, **_MUTUAL, "batch_size": 24, "segment_length": 1024, "memory_length": 2048,
        "warmup_steps": 5000, "eval_batch_size": 24, "eval_segment_length": 1024, "eval_memory_length": 2048,
    },
    "mutual-glam": {
        "steps": 80_000, **_MUTUAL, "memory_length": 2048, "eval_memory_length": 2048, "learning_rate": 7e-5,
    },
    "mutual-glam-code": {
        "steps": 80_000, **_MUTUAL, "memory_length": 2048, "eval_memory_length": 2048, "learning_rate": 7e-5,
    },
    "tiny-glam": _TINY,
    "tiny-vit": _TINY_VIT,
    **dict.fromkeys(("vmoe-s32-last2", "vmoe-s32-every2", "vmoe-b16-every2", "vmoe-l16-every2", "vmoe-h14-every2"),
                    _VMOE),
}  # fmt: skip
"""Training settings by preset.

- `tiny`, `tiny-decoder`, `tiny-glam` (four layers, every second sparse): chosen here for two CPU cores
  (docs/training.md says how).
- `olmoe-1b-7b`, `qwen3-30b-a3b`, `deepseek-like`: shapes for costs and plans, or for `train --from`. Their training
  settings are placeholders of ours, not the published ones.
- `tiny-mlm`: masked language modelling in four languages, chosen here for two CPU cores; 30 % of the pieces are masked
  in training and 15 % in evaluation. Its checkpoints stay, for curves of the routing along training.
- `tiny-mt`: translation of Multi30k into English, chosen here for two CPU cores; its betas, schedule, decay and
  smoothing are those of fairseq's IWSLT recipe, because X-MoE says nothing of the model of its Table 4.
- `xmoe-base`: X-MoE (Chi et al. 2022): steps, batch and betas as in its text; learning rate, warm-up, schedule, eps and
  clipping of torchscale's recipe and the decay of infoxlm's, because its appendices are not at hand. Pieces are learned
  from the text at hand; the paper's 250,002 are XLM-R's. `xmoe-torchscale`: torchscale's own masking and layers.
- `small`, `medium`, `large`: HyperRouter's text (Sections 4.1 and 4.2, Appendix C, Table A1): input length 512, batch
  22, Adam at 2.5e-4, 400,000 steps (`large`: 100,000), k from 2 to N. What the text leaves open (memory 512, cosine
  to 0, clipping at 0.25, evaluation with segments of 128 and memory 896) is as in its released code.
- `mutual-*`: Mutual-Inform's shapes; its text gives epochs (60, GLaM 80), its code base 1,000 steps an epoch, batch,
  lengths and learning rate (CompeteSMoE's WikiText-103 scripts, for `mutual-large` MomentumSMoE's). Deviations:
  our Transformer-XL stands for its span attention, with the attention span as memory length.
- `tiny-vit`: chosen here for two CPU cores, CIFAR-10 with 10,000 training images.
- `vmoe-*`: V-MoE's code for ImageNet-1K from scratch with S/32 (300 epochs of 99 % of the training images in batches of
  8,192); the larger shapes have the same settings, for want of published ones. Ours crops images that are resized once
  to 224 pixels, not the originals.
"""


def preset(
    name: str,
    *,
    router: str = "smoe",
    data: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> RunConfig:
    """The settings of a run: a preset's shape and training, with the given router and data.

    Args:
        name: one of `PRESETS`.
        router: a router spec, `a|b`, "dense" or "dense-dropout".
        data: a corpus or images, as `--data` names them; None: the preset's, by default "stdlib".
        steps: instead of the preset's number of steps; validation and checkpoints come more often if it is smaller.
        seed: of weights, dropout and routing noise.
        settings: any others, as `RunConfig.with_overrides` takes them.

    Raises:
        RunError: an unknown preset or setting, with the nearest name; a value out of range.
    """
    if name not in PRESETS:
        raise RunError(f"unknown preset {name!r}: {did_you_mean(name, PRESETS)}")
    assert PRESETS.keys() == MODEL_PRESETS.keys()
    values = {"data": "stdlib", **PRESETS[name]}
    if data is not None:
        values["data"] = data
    if steps is not None:
        values["steps"] = steps
        for often in ("validate_every", "checkpoint_every"):
            values[often] = min(values[often], -(-steps // 4))
        if (kept := values.get("keep_checkpoints", 2)) > 2:  # all of them, evenly spaced
            values["checkpoint_every"] = -(-steps // (kept - 1))
        values["warmup_steps"] = min(values.get("warmup_steps", 0), steps // 10)
    model = preset_config(name, VOCABULARY_UNKNOWN, router=router)
    config = RunConfig(model=model, seed=seed, preset=name, **values)
    return config.with_overrides(settings)
