"""A tiny random model of every MoE class in the installed transformers; a tokenizer and texts for them."""

import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <e> {% endfor %}"

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "intermediate_size": 48,
    "ffn_hidden_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "expert_ffn_hidden_size": 24,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "shared_experts_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "expert_dim": 24,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "vocab_size": 96,
    "unpadded_vocab_size": 96,
    "max_position_embeddings": 128,
    "max_seq_len": 128,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "decoder_sparse_step": 1,
    "moe_layer_start_index": 0,
    "moe_layer_interval": 1,
    "interleave_moe_layer_step": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "num_nextn_predict_layers": 0,
    "mlp_bias": False,
    "rope_parameters": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "router_hidden_size": 16,
    "norm_topk_prob": True,
    "expert_capacity": 64,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "encoder_sparse_step": 1,
    "moe_hidden_size": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_global_key_value_heads": 2,
}
"""What a tiny configuration sets, wherever a configuration has a field of that name."""


@cache
def moe_modules() -> tuple[str, ...]:
    """Model types whose modeling file has experts."""
    found = []
    root = importlib.import_module("transformers.models")
    for module in pkgutil.iter_modules(root.__path__):
        path = Path(root.__path__[0]) / module.name / f"modeling_{module.name}.py"
        if path.is_file() and re.search(
            r"^class \w+(Experts|MoE|Moe|SparseMLP|MoELayer|CDMoE)\(", path.read_text(), re.M
        ):
            found.append(module.name)
    return tuple(found)


PER_CLASS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v4": {"num_hidden_layers": 4, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    "doge": {"is_moe": True, "num_experts": 64, "num_experts_per_tok": 4},
    "dots3_note": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [24, 24],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
    "glm5_next": {"num_key_value_heads": 4, "index_topk": 16, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "inkling2_loop": {  # the layer in the middle runs three times
        "num_hidden_layers": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "step3p7": {"sliding_window": 16},
    "vitpose_backbone": {"num_experts": 2, "image_size": [32, 32], "patch_size": [16, 16], "part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single classes need beside SMALL."""


def model_class(name: str) -> type[Any]:
    """The class of a model type that we try: its causal language model, else its text model, else what generates."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    classes = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and issubclass(value, transformers.PreTrainedModel)
    }
    for ending in (
        "ForCausalLM",
        "TextModel",
        "ForConditionalGeneration",
        "ForTokenClassification",
        "Backbone",
        "Model",
    ):
        for key, value in classes.items():
            if key.endswith(ending) and "PreTrained" not in key and getattr(value, "config_class", None) is not None:
                return value
    raise LookupError(name)


def tiny_config(cls: type[Any], name: str) -> Any:
    """A small configuration for a model class."""
    config_class = cls.config_class
    fields = set(getattr(config_class, "__dataclass_fields__", {})) | set(
        inspect.signature(config_class.__init__).parameters
    )
    values = {key: value for key, value in SMALL.items() if key in fields and value is not None}
    mapped = getattr(config_class, "attribute_map", {})
    values = {key: value for key, value in values.items() if mapped.get(key, key) == key or mapped[key] not in fields}
    if "qk_rope_head_dim" in fields:
        values.pop("head_dim", None)
    if "kv_lora_rank" in fields:
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    if "mlp_layer_types" in fields:
        values["mlp_layer_types"] = ["sparse"] * SMALL["num_hidden_layers"]
    return config_class(**{**values, **PER_CLASS.get(name, {})})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model of a model type, in evaluation mode."""
    cls = model_class(name)
    config = tiny_config(cls, name)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    return cls(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "<e>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate([*special, "<|", "|>", "user", "assistant", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<e>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def texts(count: int = 6, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(9, 30, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, 60, (n,), generator=generator).tolist()) for n in lengths]


if __name__ == "__main__":
    print(len(moe_modules()), moe_modules())
