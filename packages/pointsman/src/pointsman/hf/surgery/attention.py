"""Traces the attention before an MoE block, for the mixers `+attention` and `+similarity:source=attention`.

transformers calls every attention function of its interface as f(module, query, key, value, …). The entry registered
here computes with sdpa and keeps query, key and value; hooks on the module add its output and output projection.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pointsman.hf.surgery.state import ForwardState
from pointsman.routing import AttentionTrace

NAME = "pointsman_sdpa"
PROJECTIONS = ("o_proj", "out_proj", "dense")
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks")
"""Keyword arguments of attention that the trace cannot represent."""
REACHES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kind of layer -> what a configuration calls the most tokens that it attends to."""


def register() -> None:
    """Registers the tracing attention function with transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, traced_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def traced_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """sdpa; if a router needs the trace, keeps query, key and value until the module returns its output."""
    tracer = module.__dict__.get("pointsman_tracer")
    if tracer is not None:
        tracer.keep(query, key, value, {"sliding_window": _reach(module), **kwargs})
    output = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    if tracer is not None:
        tracer.attended = output[0]
    return output


def _reach(module: Any) -> int | None:
    """The most tokens to which an attention attends by its configuration; None: all earlier ones."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return getattr(config, REACHES.get(kinds[module.layer_idx], ""), None) if kinds else None


class Tracer:
    """Builds the trace of one attention module for one gate."""

    def __init__(self, module: nn.Module, projection: nn.Module, gate: nn.Module, state: ForwardState) -> None:
        self.projection, self.gate, self.state = projection, gate, state
        self.kept: tuple[Tensor, Tensor, Tensor, float] | None = None
        self.attended: Tensor | None = None
        self.plain = False
        module.__dict__["pointsman_tracer"] = self
        state.handles.append(projection.register_forward_pre_hook(self.before_projection))
        state.handles.append(module.register_forward_hook(self.finish))
        state.traced.append(module)

    def keep(self, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        for name in UNSUPPORTED:
            if kwargs.get(name) is not None:
                raise ValueError(f"attention-informed routing does not support attention with {name!r}")
        window = kwargs.get("sliding_window")
        if isinstance(window, int) and window < max(self.state.tokens, key.shape[2]):
            raise ValueError(f"attention-informed routing needs sequences of at most {window} tokens, its window")
        scale = kwargs.get("scaling")
        self.kept = query, key, value, float(query.shape[-1] ** -0.5 if scale is None else scale)

    def before_projection(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Checks once that the heads' outputs are projected unchanged, so that u = sum_h W_h sum_j A_h[i, j] v_j."""
        attended, self.attended = self.attended, None
        if self.plain or attended is None:
            return
        if args[0].numel() != attended.numel() or not torch.equal(args[0].reshape(attended.shape), attended):
            raise ValueError("attention-informed routing needs heads that are projected unchanged; these are gated")
        self.plain = True

    def finish(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.kept is None:
            raise ValueError(f"{type(module).__name__} computed without the attention interface: no trace")
        query, key, value, scale = self.kept
        self.kept = None
        result = output[0] if isinstance(output, tuple) else output
        heads, width = query.shape[1], value.shape[-1]
        weight: Any = self.projection.weight  # also one that is computed, as by weight_norm
        if weight.is_meta and not result.is_meta:
            raise ValueError("attention-informed routing reads the output projection's weight, which is offloaded: "
                             "keep the attention's layers on a device")  # fmt: skip
        if weight.dtype.itemsize < 2 or all(one is not self.projection for one in module.children()):
            raise ValueError("attention-informed routing reads the output projection's own weight: an adapter or "
                             "quantised numbers are not in that; merge the adapter, or leave it out")  # fmt: skip
        if weight.shape[1] != heads * width:
            raise ValueError(f"{type(module).__name__} does not project {heads} heads of width {width} into its output")
        groups = heads // key.shape[1]
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        out_weight = weight.t().reshape(heads, width, -1).float()
        output = result.reshape(*result.shape[:2], -1).float()
        trace = AttentionTrace(query.float(), key.float(), value.float(), out_weight, output, scale)
        self.state.attention[id(self.gate)] = trace


def find_attention(model: nn.Module, gate_name: str) -> tuple[nn.Module, nn.Module]:
    """The plain attention before a gate's block, and its only output projection; ValueError if there is none."""
    where = f"layer {gate_name.rpartition('.')[0]!r}: attention-informed routing"
    path = gate_name.split(".")
    for depth in range(len(path) - 1, 0, -1):
        layer = model.get_submodule(".".join(path[:depth]))
        found = [child for name, child in layer.named_children() if "attn" in name or "attention" in name]
        found = [child for child in found if hasattr(child, "scaling") or hasattr(child, "num_key_value_groups")]
        if len(found) == 1:
            return found[0], _projection(found[0], where)
    raise ValueError(f"{where} needs one attention module before the block")


def _projection(attention: Any, where: str) -> nn.Module:
    kind = type(attention).__name__
    if any(isinstance(getattr(attention, name, None), Tensor) for name in ("sinks", "sink")):
        raise ValueError(f"{where} does not support the attention sinks of {kind}")
    projections = [getattr(attention, name) for name in PROJECTIONS if hasattr(attention, name)]
    if len(projections) != 1 or not isinstance(projections[0], nn.Linear):
        raise ValueError(f"{where} needs an attention with one output projection; {kind} has none by a known name")
    if projections[0].bias is not None:
        raise ValueError(f"{where} needs an output projection without bias; that of {kind} has one")
    query = getattr(attention, "q_proj", None)
    wide = isinstance(query, nn.Linear) and query.out_features > projections[0].in_features
    gates = any(hasattr(attention, name) for name in ("gate_proj", "g_proj", "gate", "o_norm"))
    # queries and keys of latent attention are wider than values without a gate
    latent = hasattr(attention, "kv_a_proj_with_mqa") or hasattr(attention, "kv_b_proj")
    if gates or (wide and not latent):
        raise ValueError(f"{where} needs heads that are projected unchanged; {kind} gates them")
    if not getattr(attention, "is_causal", True):
        raise ValueError(f"{where} needs causal attention; {kind} is not")
    return projections[0]


def trace(model: Any, gate_name: str, gate: nn.Module, state: ForwardState) -> None:
    """Starts tracing the attention before a gate for its router. `model` is the transformers model with both."""
    attention, projection = find_attention(model, gate_name)
    check_implementation(model)
    Tracer(attention, projection, gate, state)
    state.implementation = state.implementation or model.config._attn_implementation
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)


def check_implementation(model: Any) -> None:
    """Raises ValueError if the model's attention cannot be traced."""
    if any(getattr(part, "indexer", None) is not None for part in model.modules()):
        raise ValueError(f"attention-informed routing needs all earlier tokens; {type(model).__name__} has an indexer")
    if model.config._attn_implementation not in ("sdpa", "eager", NAME):
        raise ValueError(f"attention-informed routing needs sdpa, not {model.config._attn_implementation!r}")
