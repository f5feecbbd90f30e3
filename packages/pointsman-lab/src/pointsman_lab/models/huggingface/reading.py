"""The settings of a decoder from those of a class of transformers."""

from pathlib import Path
from typing import Any

from pointsman._errors import RunError, did_you_mean
from pointsman.ops.feed_forward import ACTIVATIONS
from pointsman_lab.models.decoder import DecoderConfig
from pointsman_lab.models.huggingface.classes import CLASSES, SAME, GateRule, HubClass

LATENT = "it has latent attention, which the decoder has not"
REFUSED = {
    "xlm-roberta": "an encoder can, with --preset xmoe-base",
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
}


def open_config(folder: str) -> Any:
    """The configuration in a folder of transformers; RunError without one that it reads."""
    from transformers import AutoConfig

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise RunError(f"{folder}: no folder of a Hugging Face model: it has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for an unknown or damaged configuration
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(f"{folder}: transformers cannot read its config.json: {lines[0]}") from None


def read_config(config: Any, where: str, router: str | None = None) -> tuple[DecoderConfig, HubClass]:
    """The settings of the decoder that computes what a model with this configuration computes."""
    known, kind = {one.kind: one for one in CLASSES}, str(config.model_type)
    if kind not in known:
        told = REFUSED.get(kind, did_you_mean(kind, known))
        raise RunError(f"{where}: {kind!r} is no class that a decoder can be: {told}")
    found = known[kind]
    _refuse(config, where)
    same: Any = {ours: kind(getattr(config, theirs)) for ours, (theirs, kind) in SAME.items()}
    heads = same["num_heads"]
    experts = int(getattr(config, "num_local_experts", None) or config.num_experts)
    dense = int(getattr(config, "intermediate_size", 0))
    width = int(getattr(config, "moe_intermediate_size", None) or dense)
    shared = 0
    if found.kind == "qwen2_moe":
        shared, left = divmod(int(config.shared_expert_intermediate_size), width)
        if left:
            raise RunError(f"{where}: its shared expert is {config.shared_expert_intermediate_size} wide: allowed are "
                           f"multiples of an expert's {width}")  # fmt: skip
    elif found.shared:
        shared = int(config.n_shared_experts or 0)
    norm: Any = "head" if getattr(config, "use_qk_norm", False) else found.qk_norms[0]
    try:
        settings = DecoderConfig(
            **same,
            kv_heads=int(config.num_key_value_heads or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            hidden_dim=dense,
            expert_hidden_dim=width,
            num_experts=experts,
            top_k=int(config.num_experts_per_tok),
            router=rule_of(config, found).spec if router is None else router,
            moe_layers=_moe_layers(config, found),
            shared_experts=shared,
            shared_gate=found.kind == "qwen2_moe",
            qk_norm=norm,
            context_length=int(config.max_position_embeddings),
            rope_theta=float((config.rope_parameters or {}).get("rope_theta", 10_000.0)),
        )
    except ValueError as error:
        raise RunError(f"{where}: {error}") from None
    return settings, found


def rule_of(config: Any, found: HubClass) -> GateRule:
    """The rule of the class's own gate."""
    if found.gate == "softmax":
        return GateRule("softmax", bool(found.always_renormalized or config.norm_topk_prob))
    groups, kept = int(config.n_group or 1), int(config.topk_group or 1)
    return GateRule("sigmoid", bool(config.norm_topk_prob), float(config.routed_scaling_factor), groups, kept)


def _moe_layers(config: Any, found: HubClass) -> str:
    count = int(config.num_hidden_layers)
    sparse = list(range(count))
    if found.dense == "first":
        sparse = sparse[int(config.first_k_dense_replace or 0) :]
    elif found.dense == "any":
        step = int(config.decoder_sparse_step)
        sparse = [layer for layer in sparse if layer not in config.mlp_only_layers and step and not (layer + 1) % step]
    if not sparse:
        raise ValueError("no layer of it is sparse")
    if sparse == list(range(sparse[0], count)):
        return "all" if len(sparse) == count else f"last:{len(sparse)}"
    return ",".join(map(str, sparse))


def _refuse(config: Any, where: str) -> None:
    """RunError for what no decoder has."""
    rope = config.rope_parameters or {}
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type in ("mixtral", "qwen3_moe"):
        windows = config.sliding_window is not None and config.sliding_window < config.max_position_embeddings
    for refused, what in (
        (windows, "sliding windows"),
        (getattr(config, "attention_bias", False) or getattr(config, "qkv_bias", False), "biases in its attention"),
        (getattr(config, "clip_qkv", None) is not None, "clip_qkv"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial rotary positions"),
        (config.hidden_act not in ACTIVATIONS, f"the activation {config.hidden_act!r}"),
    ):
        if refused:
            raise RunError(f"{where}: it has {what}, which the decoder has not")
    if (kind := rope.get("rope_type", "default")) != "default":
        raise RunError(f"{where}: it has rotary positions of type {kind!r}: allowed is default")
