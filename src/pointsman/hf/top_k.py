"""k of a Hugging Face MoE: where it is kept, and whether the class takes another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from pointsman.hf.gates import NO_GATE, Gate, NotAGateError, call_gate, survey
from pointsman.routers.router import Router

CONFIG_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""What configurations call k."""


class Slot(NamedTuple):
    """A place that holds k."""

    owner: Any
    attribute: str

    @property
    def value(self) -> int:
        return int(getattr(self.owner, self.attribute))


def most_experts(gate: Gate) -> int:
    """The largest k: all experts, or with group-limited routing those of the groups that a token may reach."""
    groups, reached = getattr(gate.module, "num_group", None), getattr(gate.module, "topk_group", None)
    if isinstance(groups, int) and isinstance(reached, int) and 0 < reached < groups:
        return gate.num_experts // groups * reached
    return gate.num_experts


def gate_slot(gate: Gate) -> Slot:
    """Where this gate reads its k from.

    Raises:
        ValueError: it keeps no k.
    """
    if isinstance(getattr(gate.module, "top_k", None), int):
        return Slot(gate.module, "top_k")
    config = getattr(gate.module, "config", None)
    for name in CONFIG_NAMES:
        if isinstance(getattr(config, name, None), int):
            return Slot(config, name)
    raise ValueError(f"set_top_k: layer {gate.layer!r}: {type(gate.module).__name__} keeps no k")


def slots(model: nn.Module, k: int) -> list[Slot]:
    """Every place that must hold k: gates, our routers in them, the models' own copies (for aux_loss), configurations.

    Raises:
        ValueError: k is out of range for a layer, or the layer's class works with no other k; nothing has changed.
    """
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError("set_top_k: " + (reasons[0] if reasons else NO_GATE.format(type(model).__name__)))
    found: list[Slot] = []
    for gate in gates:
        most = most_experts(gate)
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
            raise ValueError(f"top_k={k!r}: allowed are whole numbers from 1 to {most} (layer {gate.layer!r})")
        slot = gate_slot(gate)
        _check_takes(gate, slot, k)
        found.append(slot)
        found.extend(Slot(router, "top_k") for router in gate.module.modules() if isinstance(router, Router))
    found.extend(_copies(model, {slot.value for slot in found}))
    return list({(id(slot.owner), slot.attribute): slot for slot in found}.values())


def _copies(model: nn.Module, current: set[int]) -> Iterator[Slot]:
    """The models' and configurations' own copies of k. One that differs from every gate's means something else."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not hasattr(module, "base_model_prefix"):
            continue
        for owner in (module, config):
            for name in CONFIG_NAMES:
                value = owner.__dict__.get(name)
                if isinstance(value, int) and not isinstance(value, bool) and value in current:
                    yield Slot(owner, name)


@torch.no_grad()
def _check_takes(gate: Gate, slot: Slot, k: int) -> None:
    """Whether the gate, asked for k experts, returns k."""
    if k == slot.value or next(gate.module.parameters()).is_meta:
        return
    before, training = slot.value, gate.module.training
    gate.module.eval()
    setattr(slot.owner, slot.attribute, k)
    try:
        given = int(gate.routed(call_gate(gate))[2].shape[-1])
    except (RuntimeError, ValueError, AssertionError, NotAGateError) as error:
        raise ValueError(
            f"set_top_k: layer {gate.layer!r}: {type(gate.module).__name__} does not work with k = {k} ({error})"
        ) from None
    finally:
        setattr(slot.owner, slot.attribute, before)
        gate.module.train(training)
    if given != k:
        raise ValueError(
            f"set_top_k: layer {gate.layer!r}: {type(gate.module).__name__} chooses {given} experts whatever k is"
        )
