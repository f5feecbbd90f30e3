"""Translation by encoder-decoders, judged by BLEU."""

from pointsman_lab.registry import Setting, TaskEntry

PRESETS = {
    "tiny-mt": {
        "family": "encoder-decoder", "data": "multi30k:from=de+fr+cs:to=en", "pieces": 4096, "steps": 4000,
        "batch_size": 64, "segment_length": 64, "memory_length": 0, "eval_segment_length": 64, "eval_memory_length": 0,
        "eval_batch_size": 100, "train_top_k": "2", "learning_rate": 2e-3, "lr_schedule": "inverse-sqrt",
        "warmup_steps": 400, "betas": (0.9, 0.98), "weight_decay": 1e-4, "label_smoothing": 0.1, "clip_norm": 1.0,
        "beam": 5, "valid_tokens": 4000, "validate_every": 1000, "checkpoint_every": 1000,
        "model": {
            "num_layers": 3, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 256, "expert_hidden_dim": 128,
            "num_experts": 8, "dropout": 0.1, "init_std": 0.06, "max_length": 128,
        },
    },
}  # fmt: skip
"""Translation of Multi30k into English, chosen here for two CPU cores; its betas, schedule, decay and smoothing are
those of fairseq's IWSLT recipe, because X-MoE says nothing of the model of its Table 4."""

SETTINGS = {
    "pieces": Setting(8192, "how many pieces of words are learned from the text", least=1),
    "language_exponent": Setting(0.7, "a language with share q is drawn with probability ~ q^exponent", most=1),
    "beam": Setting(1, "hypotheses of the search in the final evaluation; 1 = greedy", least=1, trains=False),
}


class Translation(TaskEntry):
    name = "translation"
    families = ("encoder-decoder",)
    configs = ("pointsman_lab.tasks.translation.model:TranslationConfig",)
    task = "pointsman_lab.tasks.translation.task:Translation"
    presets = PRESETS
    settings = SETTINGS
    unread = frozenset({"memory_length", "eval_memory_length", "eval_segment_length"})


TASK = Translation()
