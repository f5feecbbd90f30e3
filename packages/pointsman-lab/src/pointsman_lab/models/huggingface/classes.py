"""The classes of transformers that a decoder can become, what each cannot express, and their gates as routers.

Shared by all: RMSNorm before each sublayer, rotary positions, grouped-query attention without biases, gated experts
without biases. They differ in the query-key norm, the gate, shared experts and which layers may be dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pointsman.routers.frame.router import Router
from pointsman.routers.frame.stages import Sigmoid, Softmax, TopK
from pointsman.routers.papers.loss_free import BiasedTopK
from pointsman_lab.models.decoder import DecoderConfig


@dataclass(frozen=True)
class GateRule:
    """scores = softmax or sigmoid of W h; the top-k of scores + correction in the best groups; weights = scores.

    Attributes:
        kind: of the scores.
        renormalize: whether the k weights are divided by their sum.
        scale: factor of the weights.
        groups, kept: in how many equal runs the experts lie, and from how many best ones a token may choose.
        corrected: whether a correction bias other than 0 takes part in the choice.
    """

    kind: Literal["softmax", "sigmoid"]
    renormalize: bool
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    corrected: bool = False

    @property
    def spec(self) -> str:
        """The spec of the router that follows this rule."""
        options = ["bias=false"] if self.kind == "softmax" else []
        if self.groups > 1:
            options += [f"groups={self.groups}", f"kept={self.kept}"]
        if not self.renormalize:
            options.append("renormalize=false")
        if self.scale != 1:
            options.append(f"scale={self.scale:.12g}")
        return ":".join(["smoe" if self.kind == "softmax" else "loss-free", *options])

    @property
    def plain(self) -> bool:
        """Whether the choice is the top-k of all scores."""
        return self.groups == 1 and not self.corrected


def gate_of(router: Router, top_k: int) -> tuple[GateRule, Tensor, Tensor]:
    """Rule, W [E, dim] and correction bias [E] of a gate that routes as `router` does in evaluation at this k.

    Raises:
        ValueError: no gate of transformers does; says why, without the layer.
    """
    where = f"the router {router.spec!r}"
    if router.mix is not None:
        raise ValueError(f"{where} mixes tokens, and no class does")
    if router.capacity is not None:
        raise ValueError(f"{where} drops tokens (capacity), and no class does")
    if router.virtual:
        raise ValueError(f"{where} has virtual experts (nulls), and no class does")
    if router.weigh == "input":
        raise ValueError(f"{where} weighs the inputs of experts, and no class does")
    with torch.no_grad():
        plain = router.score.plain_linear()
    if plain is None:
        raise ValueError(f"{where} has scores that no linear gate gives")
    weight, bias = plain
    if bias is not None and bool(bias.any()):
        raise ValueError(f"{where} has a bias, and no class's gate has one: train with bias=false")
    if not isinstance(router.normalize, Softmax | Sigmoid):
        raise ValueError(f"{where} normalizes its scores as no class does")
    kind: Literal["softmax", "sigmoid"] = "softmax" if isinstance(router.normalize, Softmax) else "sigmoid"
    select: Any = router.select
    correction = torch.zeros(router.num_experts)
    if type(select) is TopK:
        rule = GateRule(kind, bool(select.renormalize), router.scale)
    elif type(select) is BiasedTopK:
        if select.groups > 1 and select.group_score != "top2":
            raise ValueError(f"{where} has group_score={select.group_score}, and the classes have top2")
        kept = max(select.kept, math.ceil(top_k * select.groups / router.num_experts))
        correction = select.bias.detach().float().cpu()
        groups, kept = (1, 1) if kept == select.groups else (select.groups, kept)
        rule = GateRule(kind, bool(select.renormalize), router.scale, groups, kept, bool(correction.any()))
        if 1 < groups == router.num_experts:
            raise ValueError(f"{where} has groups of one expert, and the classes add the best two of a group")
        if select.on_logits and not rule.plain:
            raise ValueError(f"{where} ranks by logits (biased=logits), and the classes rank by scores")
    else:
        raise ValueError(f"{where} selects experts as no class does")
    return rule, weight.detach(), correction


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
