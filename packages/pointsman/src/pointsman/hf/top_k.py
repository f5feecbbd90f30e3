"""Where a Hugging Face MoE stores k, and whether its class accepts another value."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from pointsman.hf.gates import BY_TOKEN_ID, Gate, call_gate, no_gate, survey, tensor_of
from pointsman.hf.layouts import NotAGateError
from pointsman.routers.frame.router import Router

CONFIG_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""Names of k in configurations."""

GROUPS = ("num_group", "n_group", "num_expert_group")
"""What a gate may call its number of groups of experts."""


class TopKField(NamedTuple):
    """An attribute that stores k."""

    owner: Any
    attribute: str

    @property
    def value(self) -> int:
        return int(getattr(self.owner, self.attribute))


def groups_of(gate: Gate) -> int:
    """The number of groups of experts that limit the choice."""
    greedy = getattr(gate.module, "topk_method", None) == "greedy"  # DeepSeek-V2 with groups that it does not use
    found = (getattr(gate.module, name, None) for name in GROUPS)
    return 1 if greedy else next((number for number in found if isinstance(number, int)), 1)


def max_top_k(gate: Gate) -> int:
    """The largest k: the number of experts; with group-limited routing, that of the groups a token may use."""
    groups, reached = groups_of(gate), getattr(gate.module, "topk_group", None) or 0
    return gate.num_experts // groups * reached if 0 < reached < groups else gate.num_experts


def gate_top_k(gate: Gate) -> TopKField:
    """The attribute from which this gate reads k; ValueError if there is none."""
    kind = type(gate.module).__name__
    if gate.layout is not None and gate.layout.fixed_k is not None:
        raise ValueError(f"set_top_k: layer {gate.layer!r}: {kind} always chooses {gate.layout.fixed_k}")
    router = getattr(gate.module, "pointsman", None)
    if gate.form.table and router is not None:
        return TopKField(router, "top_k")
    for owner in (gate.module, gate.block):
        if isinstance(getattr(owner, "top_k", None), int):
            return TopKField(owner, "top_k")
    config = getattr(gate.module, "config", None)
    for name in CONFIG_NAMES:
        if isinstance(getattr(config, name, None), int):
            return TopKField(config, name)
    raise ValueError(f"set_top_k: layer {gate.layer!r}: {kind} keeps no k")


def top_k_fields(model: nn.Module, k: int) -> list[TopKField]:
    """All attributes that must be set to change k: gates, replaced routers, copies in models (aux_loss) and configs.

    ValueError if k is out of range for a layer, or the layer's class accepts no other k.
    """
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError("set_top_k: " + (reasons[0] if reasons else no_gate(model)))
    found: list[TopKField] = []
    for gate in gates:
        most = max_top_k(gate)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
            raise ValueError(f"top_k={k!r}: allowed are whole numbers from 1 to {most} (layer {gate.layer!r})")
        field = gate_top_k(gate)
        _check_accepts(gate, field, k)
        found.append(field)
        found.extend(TopKField(router, "top_k") for router in gate.module.modules() if isinstance(router, Router))
    if not any(gate.layout is not None and gate.layout.own_k for gate in gates):
        found.extend(_copies(model, {field.value for field in found}))
    return list({(id(field.owner), field.attribute): field for field in found}.values())


def _copies(model: nn.Module, current: set[int]) -> Iterator[TopKField]:
    """Copies of k in models and configurations. A value that differs from every gate's k has another meaning."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not hasattr(module, "base_model_prefix"):
            continue
        for owner in (module, config, getattr(config, "ffn_config", config)):  # DBRX keeps it there
            for name in CONFIG_NAMES:
                value = owner.__dict__.get(name)
                of_layers = value if isinstance(value, list) else [value]  # HunYuan has one for each
                if of_layers and all(type(one) is int and one in current for one in of_layers):
                    yield TopKField(owner, name)


@torch.no_grad()
def _check_accepts(gate: Gate, field: TopKField, k: int) -> None:
    """Raises ValueError unless the gate, with this k, returns k experts per token."""
    kind = type(gate.module).__name__
    if k == field.value or tensor_of(gate.module).is_meta or (gate.form.table and hasattr(gate.module, "pointsman")):
        return
    if gate.form.table:
        raise ValueError(f"set_top_k: layer {gate.layer!r}: {kind} {BY_TOKEN_ID} of {field.value}")
    before = field.value
    setattr(field.owner, field.attribute, k)
    try:
        given = int(gate.routed(call_gate(gate))[2].shape[-1])
    except (RuntimeError, ValueError, AssertionError, NotAGateError) as error:
        raise ValueError(f"set_top_k: layer {gate.layer!r}: {kind} does not work with k = {k} ({error})") from None
    finally:
        setattr(field.owner, field.attribute, before)
    if given != k:
        raise ValueError(f"set_top_k: layer {gate.layer!r}: {kind} chooses {given} experts whatever k is")
