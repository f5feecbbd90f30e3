"""Weights of decoders and of transformers' models, one as the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pointsman._errors import RunError
from pointsman.control import set_top_k
from pointsman.diagnostics.observe import evaluating
from pointsman.layer import MoE
from pointsman.routers.frame.router import Router
from pointsman.routers.papers.loss_free import BiasedTopK
from pointsman.routers.papers.smoe_dropout import FrozenLinearScorer
from pointsman.routers.papers.topk import LinearScorer
from pointsman_lab.models.decoder import Decoder
from pointsman_lab.models.huggingface.classes import CLASSES, GateRule, HubClass, gate_of, settings_of

TOKENS = 16  # that the logits are compared on
TOLERANCE = 1e-4
ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
NORMS = {"q_norm": "query_norm", "k_norm": "key_norm"}
MAPS = {"gate_proj": "w_gate", "up_proj": "w_in", "down_proj": "w_out"}

Gates = dict[int, tuple[GateRule, Tensor, Tensor]]
"""Layer -> what `gate_of` gives of its router."""


class NoClassError(RunError):
    """No class of transformers can express a model."""


def names(model: Decoder, shared: str | None) -> Iterator[tuple[str, str]]:
    """(our name, theirs) of every tensor that is the same in both; the rest: experts' first maps, and gates."""
    yield "embedding.weight", "model.embed_tokens.weight"
    yield "final_norm.weight", "model.norm.weight"
    if not model.config.tied:
        yield "embedding.output", "lm_head.weight"
    for index, layer in enumerate(model.layers):
        here, there = f"layers.{index}", f"model.layers.{index}"
        parts = {**ATTENTION, **({} if model.config.qk_norm == "none" else NORMS)}
        for theirs, ours in parts.items():
            yield f"{here}.attention.{ours}.weight", f"{there}.self_attn.{theirs}.weight"
        yield f"{here}.attention_norm.weight", f"{there}.input_layernorm.weight"
        yield f"{here}.feed_forward_norm.weight", f"{there}.post_attention_layernorm.weight"
        moe: Any = layer.moe
        if moe is None:
            for theirs, ours in MAPS.items():
                yield f"{here}.feed_forward.{ours}", f"{there}.mlp.{theirs}.weight"
            continue
        yield f"{here}.moe.experts.w_out", f"{there}.mlp.experts.down_proj"
        if moe.shared is not None and shared:
            for theirs, ours in MAPS.items():
                yield f"{here}.moe.shared.{ours}", f"{there}.mlp.{shared}.{theirs}.weight"
            if moe.shared.gate is not None:
                yield f"{here}.moe.shared.gate", f"{there}.mlp.{shared}_gate.weight"


def sparse_layers(model: Decoder) -> Iterator[tuple[int, MoE]]:
    """The sparse layers by number."""
    for index, layer in enumerate(model.layers):
        if isinstance(layer.moe, MoE):
            yield index, layer.moe


def to_transformers(model: Decoder, *, top_k: int, length: int) -> Any:
    """A model of transformers with the same logits, in evaluation mode.

    Raises:
        NoClassError: no class expresses the model; names the layer and why.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    gates = _gates(model, top_k)
    rule = next(iter(gates.values()))[0]
    found = _class_for(model, rule)
    settings = settings_of(found, model.config, rule, top_k, length)
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        theirs = factory.from_config(AutoConfig.for_model(found.kind, **settings), dtype=torch.float32)
    theirs = theirs.to_empty(device="cpu")
    state = _their_state(model, found, gates)
    missing, strange = theirs.load_state_dict(state, strict=False, assign=True)
    assert not strange, strange
    theirs.tie_weights()
    assert set(missing) <= {"lm_head.weight"}, missing
    rotary = theirs.model.rotary_emb  # its buffers are in no state, and `to_empty` left them without values
    theirs.model.rotary_emb = type(rotary)(theirs.config)
    theirs.eval()
    if (off := difference(model, theirs, top_k)) > TOLERANCE:
        raise NoClassError(f"the logits of {found.name} differ from the model's by {off:.2g}, relative to their spread")
    return theirs


def _gates(model: Decoder, top_k: int) -> Gates:
    """Rule and weights of every sparse layer's gate; all rules are equal."""
    config = model.config
    for wrong, why in (
        (model.inserted is not None, f"moe_layers={config.moe_layers!r} adds a layer of its own"),
        (config.attention_only, f"layers.{next(iter(config.attention_only), 0)} has no feed-forward sublayer"),
        (not config.gated, "its experts are not gated"),
        (config.experts != "ffn", f"its experts are of the kind {config.experts!r}"),
        (not any(True for _ in sparse_layers(model)), f"router={config.router!r}: no layer is sparse"),
    ):
        if wrong:
            raise NoClassError(f"no class of transformers can express the model: {why}")
    gates: Gates = {}
    for index, moe in sparse_layers(model):
        try:
            gates[index] = gate_of(moe.router, top_k)
        except ValueError as error:
            raise NoClassError(f"layer layers.{index}: {error}") from None
    first, (common, *_) = next(iter(gates.items()))
    for index, (rule, *_) in gates.items():
        if (rule.kind, rule.spec) != (common.kind, common.spec):
            told = f"layer layers.{index} routes by {rule.spec!r}, layers.{first} by {common.spec!r}"
            raise NoClassError(f"{told}: the gates of a class are all alike")
    common = replace(common, corrected=any(rule.corrected for rule, *_ in gates.values()))
    return {index: (common, weight, correction) for index, (_, weight, correction) in gates.items()}


def _class_for(model: Decoder, rule: GateRule) -> HubClass:
    reasons = []
    for one in CLASSES:
        wrong = list(one.misfits(model.config, rule))
        if not wrong:
            return one
        reasons.append(f"{one.name.removesuffix('ForCausalLM')}: {wrong[0]}")
    first = next(index for index, _ in sparse_layers(model))
    raise NoClassError(
        f"layer layers.{first}: no class of transformers has qk_norm={model.config.qk_norm!r}, "
        f"{model.config.shared_experts} shared experts, the gate {rule.spec!r} and sparse layers "
        f"{model.config.moe_layers!r} ({'; '.join(reasons)})"
    )


def _their_state(model: Decoder, found: HubClass, gates: Gates) -> dict[str, Tensor]:
    own = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    state = {theirs: own[ours].clone() for ours, theirs in names(model, found.shared)}
    if model.config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for index, moe in sparse_layers(model):
        here, there = f"layers.{index}.moe", f"model.layers.{index}.mlp"
        rule, weight, correction = gates[index]
        state[f"{there}.experts.gate_up_proj"] = torch.cat(
            [own[f"{here}.experts.w_gate"], own[f"{here}.experts.w_in"]], 1
        )
        state[f"{there}.gate.weight"] = weight.float().cpu().clone()
        if found.gate == "sigmoid":
            state[f"{there}.gate.e_score_correction_bias"] = correction.clone()
        elif rule.scale != 1:  # a softmax gate has no factor of its own
            state[f"{there}.experts.down_proj"] *= rule.scale
        if found.shared is None:
            continue
        shared = f"{there}.{found.shared}"
        if moe.shared is None:  # the class always has a shared expert: one of weight 0
            width, dim = model.config.expert_width, model.config.dim
            for name in ("gate_proj", "up_proj"):
                state[f"{shared}.{name}.weight"] = torch.zeros(width, dim)
            state[f"{shared}.down_proj.weight"] = torch.zeros(dim, width)
        if found.gate == "softmax" and (moe.shared is None or moe.shared.gate is None):
            state[f"{shared}_gate.weight"] = torch.zeros(1, model.config.dim)  # sigmoid(0) = 1/2
            state[f"{shared}.down_proj.weight"] *= 2
    return state


@torch.no_grad()
def load_theirs(model: Decoder, state: Mapping[str, Tensor], shared: str | None) -> list[str]:
    """Copies the weights of a model of transformers into a decoder of the same shape, in place.

    Returns:
        names of the sparse layers whose router keeps its own initial values: not linear, or with virtual experts.
    """
    own = model.state_dict()

    def put(ours: str, tensor: Tensor | None, name: str) -> None:
        if tensor is None or own[ours].shape != tensor.shape:
            told = "is missing" if tensor is None else f"is {list(tensor.shape)}, not {list(own[ours].shape)}"
            raise RunError(f"the checkpoint does not fit: {name} {told}")
        own[ours].copy_(tensor)

    for ours, name in names(model, shared):
        put(ours, state.get(name), name)
    fresh = []
    for index, moe in sparse_layers(model):
        here, there = f"layers.{index}.moe", f"model.layers.{index}.mlp"
        both = state.get(f"{there}.experts.gate_up_proj")
        halves = (None, None) if both is None else both.chunk(2, 1)
        for part, tensor in zip(("w_gate", "w_in"), halves, strict=True):
            put(f"{here}.experts.{part}", tensor, f"{there}.experts.gate_up_proj")
        if not _start_gate(moe.router, state, f"{there}.gate"):
            fresh.append(f"layers.{index}")
    return fresh


def _start_gate(router: Router, state: Mapping[str, Tensor], gate: str) -> bool:
    """Copies a gate's weight (and correction bias) into a linear router; False if it is none or has nulls."""
    score: Any = router.score
    if router.virtual or not isinstance(score, LinearScorer | FrozenLinearScorer):
        return False
    score.weight.copy_(state[f"{gate}.weight"])
    correction = state.get(f"{gate}.e_score_correction_bias")
    if isinstance(router.select, BiasedTopK) and correction is not None:
        router.select.bias.copy_(correction.reshape(-1))
    return True


@torch.no_grad()
def difference(model: Decoder, theirs: Any, top_k: int) -> float:
    """The largest difference of the logits of random tokens, divided by their standard deviation."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, TOKENS), generator=generator)
    device = next(model.parameters()).device
    with evaluating(model), set_top_k(model, top_k):
        logits = model(tokens.to(device)).logits.float().cpu()
    expected = theirs(tokens.to(theirs.device)).logits.float().cpu()
    return float((logits - expected).abs().max() / expected.std().clamp_min(1e-12))
