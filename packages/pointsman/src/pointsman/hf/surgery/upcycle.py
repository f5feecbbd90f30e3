"""upcycle: turns a dense model into a mixture of experts with the same outputs (Komatsuzaki et al. 2023)."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from pointsman._errors import did_you_mean
from pointsman._values import check_whole
from pointsman.conversion import check_weights, copies
from pointsman.hf.surgery.replace import replace_routers
from pointsman.hf.surgery.scorers import RULES, has_own_rule
from pointsman.routers.frame.registry import parse_spec, split_specs

SHARED_HIDDEN = 64
"""Width of Qwen2-MoE's mandatory shared expert; its output projection starts at zero."""


def _mixtral(config: Any, num_experts: int, top_k: int) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ValueError(f"upcycle: {type(config).__name__} has {name}=True, which Mixtral does not support")
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "sliding_window": getattr(config, "sliding_window", None),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }


def _qwen(config: Any, num_experts: int, top_k: int) -> dict[str, Any]:
    sparse = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    sizes = {"num_experts": num_experts, "num_experts_per_tok": top_k}
    return {**sizes, "moe_intermediate_size": config.intermediate_size, **sparse}


def _qwen2(config: Any, num_experts: int, top_k: int) -> dict[str, Any]:
    return {**_qwen(config, num_experts, top_k), "shared_expert_intermediate_size": SHARED_HIDDEN, "qkv_bias": True}


def _qwen3(config: Any, num_experts: int, top_k: int) -> dict[str, Any]:
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise ValueError("upcycle: this Qwen3 has full and sliding attention, which Qwen3-MoE does not support")
    sliding = "sliding_attention" in kinds
    return {**_qwen(config, num_experts, top_k), "use_sliding_window": sliding, "head_dim": config.head_dim}


TARGETS: dict[str, tuple[str, Callable[[Any, int, int], dict[str, Any]]]] = {
    "llama": ("mixtral", _mixtral),
    "mistral": ("mixtral", _mixtral),
    "qwen2": ("qwen2_moe", _qwen2),
    "qwen3": ("qwen3_moe", _qwen3),
}
"""Dense model type -> the MoE model type with the same attention, and its additional settings."""


def upcycle(
    model: PreTrainedModel, num_experts: int, *, top_k: int = 2, router: str | Sequence[str] | None = None,
    noise: float = 0.0,
) -> PreTrainedModel:  # fmt: skip
    """Builds a mixture of experts from a dense model: every expert is a copy of the feed-forward layer.

    Llama and Mistral become Mixtral, Qwen2 becomes Qwen2-MoE, Qwen3 becomes Qwen3-MoE. The combine weights of a token
    sum to 1, so that the outputs equal the dense model's for any k, up to rounding; routers with other weights
    (`sparsemixer`, `renormalize=false`, `scale=2`) are refused. The dense model is not changed; attention, embeddings
    and norms are copied.

    Args:
        model: the dense model, a causal language model or its bare transformer.
        num_experts: E.
        top_k: experts per token.
        router: a router spec for `replace_routers`, with the method's own initial values; None: the class's own gate.
        noise: standard deviation of Gaussian noise on the experts' weights, relative to that of each matrix. It lets
            experts diverge; with noise the outputs are close to the dense model's, not equal.

    Returns:
        the new model, in the same mode and dtype, on the same device.

    Raises:
        ValueError: no MoE class matches the model's class, or it does not support one of the model's settings; the
            router's weights do not sum to 1.
    """
    kind = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    if kind not in TARGETS:
        raise ValueError(f"upcycle: no mixture of experts matches {kind!r}: {did_you_mean(kind, TARGETS)}")
    check_whole("upcycle: num_experts", num_experts)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
        raise ValueError(f"upcycle: top_k={top_k!r}: allowed are whole numbers from 1 to {num_experts}")
    if isinstance(noise, bool) or not 0 <= noise < float("inf"):
        raise ValueError(f"upcycle: noise={noise!r}: allowed are numbers from 0")
    if router is not None:
        for spec in split_specs(router):
            if parse_spec(spec).router in RULES and has_own_rule(spec):  # else the class renormalises
                check_weights(spec, num_experts, top_k)
    target, settings = TARGETS[kind]
    config = _config(model.config, target, settings(model.config, num_experts, top_k))
    causal = type(model).__name__.endswith("ForCausalLM")
    if not causal and not type(model).__name__.endswith("Model"):
        raise ValueError(f"upcycle: {type(model).__name__} is neither a causal language model nor a bare transformer")
    factory: Any = AutoModelForCausalLM if causal else AutoModel
    mixture: PreTrainedModel = factory.from_config(config, dtype=model.dtype).to(model.device)
    with torch.no_grad():
        _fill(mixture.state_dict(), model.state_dict(), num_experts, noise)
    mixture.train(model.training)
    if getattr(model, "generation_config", None) is not None:
        mixture.generation_config = copy.deepcopy(model.generation_config)
    if router is not None:
        replace_routers(mixture, router, start="fresh")
    return mixture


def _config(dense: Any, target: str, values: dict[str, Any]) -> Any:
    """The MoE configuration: the fields that both classes have from the dense one, and `values`."""
    skipped = {"model_type", "architectures", "transformers_version", "auto_map"}
    known = {name for name in AutoConfig.for_model(target).to_dict() if not name.startswith("_")} - skipped
    common = {name: value for name, value in dense.to_dict().items() if name in known}
    return AutoConfig.for_model(target, **{**common, **values})


def _fill(into: dict[str, Tensor], dense: dict[str, Tensor], num_experts: int, noise: float) -> None:
    """Copies the dense weights; those of feed-forward layers to every expert."""
    left = set(dense)
    for name, tensor in into.items():
        if name in dense:
            if tensor.shape != dense[name].shape:
                raise ValueError(f"upcycle: {name} is {list(dense[name].shape)}, expected {list(tensor.shape)}")
            tensor.copy_(dense[name])
            left.discard(name)
        elif name.endswith("mlp.experts.gate_up_proj"):
            base = name.removesuffix("experts.gate_up_proj")
            sources = f"{base}gate_proj.weight", f"{base}up_proj.weight"
            left.difference_update(sources)
            for half, source in zip(tensor.chunk(2, 1), sources, strict=True):
                half.copy_(copies(dense[source], num_experts, noise))
        elif name.endswith("mlp.experts.down_proj"):
            source = name.removesuffix("experts.down_proj") + "down_proj.weight"
            tensor.copy_(copies(dense[source], num_experts, noise))
            left.discard(source)
        elif name.endswith("shared_expert.down_proj.weight"):
            tensor.zero_()
    if left:
        raise ValueError(f"upcycle: the MoE class has no parameters for {', '.join(sorted(left)[:3])}")
