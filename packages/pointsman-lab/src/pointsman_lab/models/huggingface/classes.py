"""The classes of transformers that a decoder can become, what each cannot express, and their gates as routers.

Shared by all: RMSNorm before each sublayer, rotary positions, grouped-query attention without biases, gated experts
without biases. They differ in the query-key norm, the gate, shared experts and which layers may be dense.
"""

import math
from collections.abc import Iterator
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
        settings: names of its own settings (`settings_of`), besides those of all classes.
    """

    name: str
    kind: str
    qk_norms: tuple[str, ...]
    gate: str
    dense: str
    shared: str | None
    settings: tuple[str, ...]
    always_renormalized: bool = False

    def misfits(self, config: DecoderConfig, rule: GateRule) -> Iterator[str]:
        """Why a decoder is not one of this class."""
        sparse = sorted(config.layout.sparse)
        for wrong, why in (
            (rule.kind != self.gate, f"its gate is a {self.gate}"),
            (config.qk_norm not in self.qk_norms, f"it has qk_norm={'|'.join(self.qk_norms)}"),
            (config.shared_experts and self.shared is None, "it has no shared experts"),
            (config.shared_gate and self.gate == "sigmoid", "its shared experts have no gate"),
            (self.gate == "softmax" and not rule.plain, "its gate has neither groups nor a correction bias"),
            (self.always_renormalized and not rule.renormalize, "its weights are renormalized"),
            (self.dense == "none" and len(sparse) < config.num_layers, "all its layers are sparse"),
            (
                self.dense == "first" and sparse != list(range(sparse[0], config.num_layers)),
                "its dense layers come first",
            ),
        ):
            if wrong:
                yield why


QWEN = (
    "moe_intermediate_size", "num_experts", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step",
    "use_sliding_window",
)  # fmt: skip
DEEPSEEK = (
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "first_k_dense_replace", "sliding_window",
)  # fmt: skip
MIXTRAL, OLMOE = ("num_local_experts", "sliding_window"), ("num_experts", "norm_topk_prob")
QWEN2, GLM = (*QWEN, "shared_expert_intermediate_size", "qkv_bias"), (*DEEPSEEK, "use_qk_norm", "num_mtp_layers")

CLASSES = (
    HubClass("MixtralForCausalLM", "mixtral", ("none",), "softmax", "none", None, MIXTRAL, True),
    HubClass("OlmoeForCausalLM", "olmoe", ("all",), "softmax", "none", None, OLMOE),
    HubClass("Qwen3MoeForCausalLM", "qwen3_moe", ("head",), "softmax", "any", None, QWEN),
    HubClass("Qwen2MoeForCausalLM", "qwen2_moe", ("none",), "softmax", "any", "shared_expert", QWEN2),
    HubClass("Dots1ForCausalLM", "dots1", ("head",), "sigmoid", "first", "shared_experts", DEEPSEEK),
    HubClass("Glm4MoeForCausalLM", "glm4_moe", ("none",), "sigmoid", "first", "shared_experts", GLM),
)
"""In the order in which they are tried."""


SAME: dict[str, tuple[str, type]] = {
    "vocab_size": ("vocab_size", int), "dim": ("hidden_size", int), "num_layers": ("num_hidden_layers", int),
    "num_heads": ("num_attention_heads", int), "activation": ("hidden_act", str), "norm_eps": ("rms_norm_eps", float),
    "tied": ("tie_word_embeddings", bool), "init_std": ("initializer_range", float),
}  # fmt: skip
"""Setting of a decoder -> its name and type in all classes."""


def settings_of(found: HubClass, config: DecoderConfig, rule: GateRule, top_k: int, length: int) -> dict[str, Any]:
    """The settings of the class for a decoder: those that all classes have, and its own."""
    width, shared = config.expert_width, max(config.shared_experts, 1)
    every = {
        "moe_intermediate_size": width,
        "num_experts": config.num_experts,
        "num_local_experts": config.num_experts,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": shared,
        "shared_expert_intermediate_size": width * shared,
        "norm_topk_prob": rule.renormalize,
        "n_group": rule.groups,
        "topk_group": rule.kept,
        "routed_scaling_factor": rule.scale,
        "first_k_dense_replace": min(config.layout.sparse),
        "mlp_only_layers": sorted(set(range(config.num_layers)) - config.layout.sparse),
        "decoder_sparse_step": 1,
        "sliding_window": None,
        "use_sliding_window": False,
        "qkv_bias": False,
        "use_qk_norm": config.qk_norm == "head",
        "num_mtp_layers": 0,
    }
    return {
        **{theirs: getattr(config, ours) for ours, (theirs, _) in SAME.items()},
        **{name: every[name] for name in found.settings},
        "intermediate_size": config.hidden_dim if "moe_intermediate_size" in found.settings else width,
        "num_key_value_heads": config.kv_heads or config.num_heads,
        "head_dim": config.head_dim,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": length,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
