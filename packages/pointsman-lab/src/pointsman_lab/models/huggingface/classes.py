"""The classes of transformers that a decoder can become, and what each cannot express.

Shared by all: RMSNorm before each sublayer, rotary positions, grouped-query attention without biases, gated experts
without biases. They differ in the query-key norm, the gate, shared experts and which layers may be dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pointsman_lab.models.decoder import DecoderConfig
from pointsman_lab.models.huggingface.rules import GateRule


@dataclass(frozen=True)
class HubClass:
    """A class of transformers.

    Attributes:
        name: of the class.
        kind: its `model_type`.
        qk_norms: values of `DecoderConfig.qk_norm` that it has.
        gate: kind of its scores.
        dense: which layers may be dense: "none", "first" (those before the first sparse one) or "any".
        shared: name of the shared experts' module; None: it has none. One that it has is always there.
        settings: its own settings of a decoder's settings and rule.
    """

    name: str
    kind: str
    qk_norms: tuple[str, ...]
    gate: str
    dense: str
    shared: str | None
    settings: Callable[[DecoderConfig, GateRule], dict[str, Any]]
    always_renormalized: bool = False

    def misfits(self, config: DecoderConfig, rule: GateRule) -> Iterator[str]:
        """Why a decoder is not one of this class."""
        if rule.kind != self.gate:
            yield f"its gate is a {self.gate}"
        if config.qk_norm not in self.qk_norms:
            yield f"it has qk_norm={'|'.join(self.qk_norms)}"
        if config.shared_experts and self.shared is None:
            yield "it has no shared experts"
        if config.shared_gate and self.gate == "sigmoid":
            yield "its shared experts have no gate"
        if self.gate == "softmax" and not rule.plain:
            yield "its gate has neither groups nor a correction bias"
        if self.always_renormalized and not rule.renormalize:
            yield "its weights are renormalized"
        sparse = sorted(config.layout.sparse)
        if self.dense == "none" and len(sparse) < config.num_layers:
            yield "all its layers are sparse"
        if self.dense == "first" and sparse != list(range(sparse[0], config.num_layers)):
            yield "its dense layers come first"


def _mixtral(config: DecoderConfig, rule: GateRule) -> dict[str, Any]:
    return {"intermediate_size": config.expert_width, "num_local_experts": config.num_experts, "sliding_window": None}


def _olmoe(config: DecoderConfig, rule: GateRule) -> dict[str, Any]:
    return {"intermediate_size": config.expert_width, "num_experts": config.num_experts,
            "norm_topk_prob": rule.renormalize}  # fmt: skip


def _qwen3(config: DecoderConfig, rule: GateRule) -> dict[str, Any]:
    return {
        "intermediate_size": config.hidden_dim,
        "moe_intermediate_size": config.expert_width,
        "num_experts": config.num_experts,
        "norm_topk_prob": rule.renormalize,
        "mlp_only_layers": sorted(set(range(config.num_layers)) - config.layout.sparse),
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen2(config: DecoderConfig, rule: GateRule) -> dict[str, Any]:
    width = config.expert_width * max(config.shared_experts, 1)
    return {**_qwen3(config, rule), "shared_expert_intermediate_size": width, "qkv_bias": False}


def _deepseek(config: DecoderConfig, rule: GateRule) -> dict[str, Any]:
    return {
        "intermediate_size": config.hidden_dim,
        "moe_intermediate_size": config.expert_width,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": max(config.shared_experts, 1),
        "n_group": rule.groups,
        "topk_group": rule.kept,
        "norm_topk_prob": rule.renormalize,
        "routed_scaling_factor": rule.scale,
        "first_k_dense_replace": min(config.layout.sparse),
        "sliding_window": None,
    }


def _glm(config: DecoderConfig, rule: GateRule) -> dict[str, Any]:
    return {**_deepseek(config, rule), "use_qk_norm": config.qk_norm == "head", "num_mtp_layers": 0}


CLASSES = (
    HubClass("MixtralForCausalLM", "mixtral", ("none",), "softmax", "none", None, _mixtral, True),
    HubClass("OlmoeForCausalLM", "olmoe", ("all",), "softmax", "none", None, _olmoe),
    HubClass("Qwen3MoeForCausalLM", "qwen3_moe", ("head",), "softmax", "any", None, _qwen3),
    HubClass("Qwen2MoeForCausalLM", "qwen2_moe", ("none",), "softmax", "any", "shared_expert", _qwen2),
    HubClass("Dots1ForCausalLM", "dots1", ("head",), "sigmoid", "first", "shared_experts", _deepseek),
    HubClass("Glm4MoeForCausalLM", "glm4_moe", ("none",), "sigmoid", "first", "shared_experts", _glm),
)
"""In the order in which they are tried."""


def common_settings(config: DecoderConfig, top_k: int, length: int) -> dict[str, Any]:
    """The settings that all classes have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads or config.num_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "num_experts_per_tok": top_k,
        "initializer_range": config.init_std,
        "max_position_embeddings": length,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
