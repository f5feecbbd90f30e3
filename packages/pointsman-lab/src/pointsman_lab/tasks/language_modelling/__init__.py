"""Language modelling: predicting the next token of a corpus, judged by bits per character or perplexity."""

from collections.abc import Mapping
from typing import Any

from pointsman_lab.registry import Setting, TaskEntry

_TINY = {
    "steps": 1600, "batch_size": 16, "segment_length": 64, "memory_length": 64, "learning_rate": 4e-3,
    "warmup_steps": 100, "clip_norm": 1.0, "train_top_k": "2",
    "eval_batch_size": 32, "eval_segment_length": 64, "eval_memory_length": 128, "eval_tokens": 200_000,
    "valid_tokens": 20_000, "validate_every": 400, "checkpoint_every": 400,
}  # fmt: skip
_TINY_MODEL = {
    "num_layers": 2, "dim": 128, "num_heads": 4, "head_dim": 32, "hidden_dim": 128, "num_experts": 8, "dropout": 0.0,
    "pre_norm": True, "init_std": 0.06,
}  # fmt: skip
_LARGE = {
    "family": "decoder", "steps": 1000, "batch_size": 64, "accumulation": 64, "segment_length": 4096,
    "memory_length": 0, "learning_rate": 4e-4, "warmup_steps": 100, "clip_norm": 1.0, "betas": (0.9, 0.95),
    "weight_decay": 0.1, "decay": "decoupled", "train_top_k": "8", "precision": "bfloat16", "eval_top_k": (8,),
    "eval_batch_size": 1, "eval_segment_length": 4096, "eval_memory_length": 0, "valid_tokens": 100_000,
}  # fmt: skip
_HYPERROUTER = {
    "steps": 400_000, "batch_size": 22, "segment_length": 512, "memory_length": 512, "learning_rate": 2.5e-4,
    "clip_norm": 0.25, "eval_batch_size": 10, "eval_segment_length": 128, "eval_memory_length": 896,
    "train_top_k": "2:N", "validate_every": 4000, "checkpoint_every": 4000, "log_every": 50,
}  # fmt: skip
_MUTUAL = {
    "steps": 60_000, "batch_size": 48, "segment_length": 512, "memory_length": 1024, "learning_rate": 7e-4,
    "warmup_steps": 4000, "lr_schedule": "constant", "clip_norm": 0.0, "train_top_k": "2",
    "eval_batch_size": 48, "eval_segment_length": 512, "eval_memory_length": 1024,
    "validate_every": 1000, "checkpoint_every": 1000, "log_every": 50,
}  # fmt: skip
_GLAM = {**_MUTUAL, "steps": 80_000, "memory_length": 2048, "eval_memory_length": 2048, "learning_rate": 7e-5}
_MUTUAL_MEDIUM = {"num_layers": 6, "dim": 352, "num_heads": 8, "head_dim": 44, "hidden_dim": 352}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {**_TINY, "model": _TINY_MODEL},
    "tiny-decoder": {
        **_TINY, "family": "decoder",
        "model": {
            "num_layers": 2, "dim": 128, "num_heads": 4, "kv_heads": 2, "head_dim": 32, "hidden_dim": 88,
            "num_experts": 8, "qk_norm": "head", "init_std": 0.06,
        },
    },
    "olmoe-1b-7b": {
        **_LARGE, "router": "smoe:bias=false:renormalize=false", "vocabulary": 50_304,
        "model": {
            "num_layers": 16, "dim": 2048, "num_heads": 16, "head_dim": 128, "hidden_dim": 1024, "num_experts": 64,
            "top_k": 8, "qk_norm": "all", "tied": False, "context_length": 4096,
        },
    },
    "qwen3-30b-a3b": {
        **_LARGE, "router": "smoe:bias=false", "vocabulary": 151_936,
        "model": {
            "num_layers": 48, "dim": 2048, "num_heads": 32, "kv_heads": 4, "head_dim": 128, "hidden_dim": 768,
            "num_experts": 128, "top_k": 8, "qk_norm": "head", "tied": False, "norm_eps": 1e-6, "rope_theta": 1e6,
            "context_length": 40960,
        },
    },
    "deepseek-like": {
        **_LARGE, "router": "loss-free:groups=8:kept=4:scale=2.5", "vocabulary": 129_280,
        "model": {
            "num_layers": 61, "dim": 7168, "num_heads": 128, "kv_heads": 8, "head_dim": 128, "hidden_dim": 18432,
            "expert_hidden_dim": 2048, "num_experts": 256, "top_k": 8, "shared_experts": 1, "moe_layers": "last:58",
            "tied": False, "norm_eps": 1e-6, "context_length": 4096,
        },
    },
    "small": {**_HYPERROUTER, "model": {"num_layers": 4}},
    "medium": {**_HYPERROUTER, "model": {"num_layers": 8}},
    "large": {**_HYPERROUTER, "steps": 100_000, "model": {"num_layers": 12}},
    "mutual-medium": {**_MUTUAL, "model": _MUTUAL_MEDIUM},
    "mutual-large": {
        **_MUTUAL, "batch_size": 24, "segment_length": 1024, "memory_length": 2048, "warmup_steps": 5000,
        "eval_batch_size": 24, "eval_segment_length": 1024, "eval_memory_length": 2048,
        "model": {"num_layers": 12, "dim": 512, "num_heads": 8, "head_dim": 64, "hidden_dim": 512},
    },
    "mutual-glam": {**_GLAM, "model": {**_MUTUAL_MEDIUM, "moe_layers": "every:2"}},
    "mutual-glam-code": {
        **_GLAM,
        "model": {**_MUTUAL_MEDIUM, "num_layers": 8, "moe_layers": "0,4", "attention_only": (2, 3, 6, 7)},
    },
    "tiny-glam": {**_TINY, "model": {**_TINY_MODEL, "num_layers": 4, "moe_layers": "every:2"}},
}  # fmt: skip
"""Presets of language models: shapes with the training settings that go with them.

- `tiny`, `tiny-decoder`, `tiny-glam` (four layers, every second sparse): chosen here for two CPU cores
  (docs/training.md says how). `tiny-decoder` has experts of about as many weights as `tiny`.
- `olmoe-1b-7b`, `qwen3-30b-a3b`: the published shapes; `deepseek-like`: DeepSeek-V3 with grouped-query attention in the
  place of its latent attention, without its positions for longer texts. For costs and plans, or for `train --from`:
  their training settings are placeholders of ours, not the published ones.
- `small`, `medium`, `large`: HyperRouter's text (Sections 4.1 and 4.2, Appendix C, Table A1): input length 512, batch
  22, Adam at 2.5e-4, 400,000 steps (`large`: 100,000), k from 2 to N. What the text leaves open (memory 512, cosine
  to 0, clipping at 0.25, evaluation with segments of 128 and memory 896) is as in its released code.
- `mutual-*`: Mutual-Inform's shapes (`-code`: that of its code); its text gives epochs (60, GLaM 80), its code base
  1,000 steps an epoch, batch, lengths and learning rate (CompeteSMoE's WikiText-103 scripts, for `mutual-large`
  MomentumSMoE's). Deviations: our Transformer-XL stands for its span attention, with the attention span as memory
  length.
"""


SETTINGS = {
    "tokenizer": Setting("", "pieces:V, or the path of a tokenizer; empty: the corpus's bytes or words"),
    "start_from": Setting("", "folder of a model of transformers whose weights the training starts from"),
}


class LanguageModelling(TaskEntry):
    name = "language_modelling"
    families = ("transformer-xl", "decoder")
    configs = ("pointsman_lab.models.transformer_xl:TransformerXLConfig", "pointsman_lab.models.decoder:DecoderConfig")
    task = "pointsman_lab.tasks.language_modelling.task:LanguageModelling"
    reader = "pointsman_lab.data.subwords:read_vocabulary"
    starter = "pointsman_lab.tasks.language_modelling.task:start_config"
    levels = ("byte", "word", "subword")
    presets = PRESETS
    settings = SETTINGS

    def export(self, run: Any, top_k: int) -> Any:
        if run.config.model.family != "decoder":
            return super().export(run, top_k)
        from pointsman_lab.models.huggingface.convert import to_transformers

        return to_transformers(run.model, top_k=top_k, length=run.context)

    def add_flags(self, command: str, flags: Any) -> None:
        if command == "train":
            told = "subwords: V pieces learned on the data, or a Hugging Face tokenizer (default: the data's own unit)"
            flags.add_argument("--tokenizer", metavar="pieces:V|PATH", help=told)
        elif command == "generate":
            from pointsman_lab.cli.options import number_from, whole

            add = flags.add_argument
            add("--prompt", action="append", metavar="TEXT", help="what to continue (may be repeated)")
            add("--top-k", type=whole(1), metavar="K", help="experts a token (default: the last of training)")
            add("--tokens", type=whole(1), default=200, metavar="N", help="how many (default: 200)")
            add("--greedy", action="store_true", help="always the likeliest token")
            told = "logits are divided by it; 0 is greedy (default: 1)"
            add("--temperature", type=number_from(0, 100), default=1.0, metavar="T", help=told)
            told = "draw among the likeliest tokens that reach P together (default: 1, all)"
            add("--top-p", type=number_from(0, 1), default=1.0, metavar="P", help=told)
            add("--seed", type=whole(0), default=0, metavar="S", help="default: 0")

    def run(self, command: str, flags: Any, values: Any, device: str) -> int | None:
        if command != "generate":
            return None
        from pointsman_lab.tasks.language_modelling.generation import run_generate

        return run_generate(flags, values, device)

    def recipes(self) -> Mapping[str, Any]:
        from pointsman_lab.tasks.language_modelling.recipes import RECIPES

        return RECIPES


TASK = LanguageModelling()
