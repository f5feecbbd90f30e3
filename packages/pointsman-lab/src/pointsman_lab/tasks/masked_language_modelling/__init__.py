"""Masked language modelling on multilingual text, judged by perplexity: X-MoE's pre-training."""

from collections.abc import Mapping
from typing import Any

from pointsman_lab.registry import Setting, TaskEntry

_MASKED = {
    "family": "encoder", "memory_length": 0, "eval_memory_length": 0, "train_top_k": "1", "betas": (0.9, 0.98),
    "lr_schedule": "linear", "weight_decay": 0.01, "decay": "decoupled", "decay_on": "matrices",
}  # fmt: skip
_XMOE = {
    **_MASKED, "data": "xtreme-text", "pieces": 16_384, "steps": 125_000, "batch_size": 2048, "accumulation": 64,
    "segment_length": 512, "learning_rate": 5e-4, "warmup_steps": 10_000, "adam_eps": 1e-6, "clip_norm": 2.0,
    "eval_batch_size": 32, "eval_segment_length": 512, "validate_every": 5000, "checkpoint_every": 12_500,
    "keep_checkpoints": 10, "log_every": 50,
}  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny-mlm": {
        **_MASKED, "data": "xtreme-text:languages=de+en+es+fr", "steps": 2400, "batch_size": 32, "segment_length": 128,
        "learning_rate": 3e-3, "warmup_steps": 240, "clip_norm": 1.0, "mask_rate": 0.3, "eval_batch_size": 32,
        "eval_segment_length": 128, "valid_tokens": 20_000, "validate_every": 600, "checkpoint_every": 300,
        "keep_checkpoints": 9,
        "model": {
            "num_layers": 4, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 256, "num_experts": 8,
            "moe_layers": "after:2", "norm": "pre", "dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.06,
        },
    },
    "xmoe-base": {**_XMOE, "model": {}},
    "xmoe-torchscale": {
        **_XMOE, "train_top_k": "2", "mask_token_share": 1.0, "random_share": 0.0,
        "model": {"num_experts": 64, "top_k": 2, "moe_layers": "every:2:1", "experts": "ffn", "positions": "t5"},
    },
}  # fmt: skip
"""Presets of masked language models.

- `tiny-mlm`: `xmoe-base` for two CPU cores, in four languages; 30 % of the pieces are masked in training and 15 % in
  evaluation. Its checkpoints stay, for curves of the routing along training.
- `xmoe-base`: X-MoE (Chi et al. 2022): sizes (4.1), steps, batch and betas as in its text; learning rate, warm-up,
  schedule, eps and clipping of torchscale's recipe and the decay of infoxlm's, because its appendices are not at hand.
  Pieces are learned from the text at hand; the paper's 250,002 are XLM-R's.
- `xmoe-torchscale`: the sizes, masking and layers of torchscale's released recipe (without deepnorm).
"""


SETTINGS = {
    "tokenizer": Setting(
        "", "a SentencePiece model in XLM-R's order, or a folder with one; empty: learned from the text"
    ),
    "start_from": Setting("", "folder of XLM-R in the form of transformers, whose weights the training starts from"),
    "pieces": Setting(8192, "how many pieces of words are learned from the text", least=1),
    "language_exponent": Setting(0.7, "a language with share q is drawn with probability ~ q^exponent", most=1),
    "mask_rate": Setting(0.15, "the share of the places that are predicted", most=1),
    "mask_token_share": Setting(0.8, "of these, the share that becomes <mask>", most=1),
    "random_share": Setting(0.1, "of these, the share that becomes a random piece", most=1),
}


class MaskedLanguageModelling(TaskEntry):
    name = "masked_language_modelling"
    families = ("encoder",)
    configs = ("pointsman_lab.models.encoder:EncoderConfig",)
    task = "pointsman_lab.tasks.masked_language_modelling.task:MaskedLanguageModelling"
    reader = "pointsman_lab.data.pieces:Pieces.from_json"
    starter = "pointsman_lab.tasks.masked_language_modelling.start:start_config"
    levels = ("piece",)
    presets = PRESETS
    settings = SETTINGS
    unread = frozenset({"memory_length", "eval_memory_length", "eval_segment_length", "eval_split"})

    def sentences(self, spec: str) -> Any:
        if spec.partition(":")[0] not in ("xtreme-text", "multilingual"):
            return None
        from pointsman_lab.data.catalog import data_folder
        from pointsman_lab.tasks.masked_language_modelling.text import read_text

        return read_text(spec, data_folder())

    def data_of(self, run: Any) -> str:
        return str(run.config.get("data", "")).rpartition("/")[2].partition(":")[0]


TASK = MaskedLanguageModelling()
