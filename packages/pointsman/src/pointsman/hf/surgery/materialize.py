"""materialize: turns replaced routers back into the class's own gates, for stock transformers and servers."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.hf.counterpart import correction_bias, counterpart, same_forward
from pointsman.hf.gates import Gate, survey
from pointsman.hf.surgery.notes import CONFIG_KEY
from pointsman.hf.surgery.routed import ClassRule, become


def materialize(model: nn.Module) -> nn.Module:
    """Gives every replaced gate of a Hugging Face MoE a plain weight with the same logits, in place.

    The saved checkpoint then loads in stock transformers and in servers that read its checkpoints. The weight has the
    original gate's dtype; in float32 the logits are identical.

    Returns:
        the model.

    Raises:
        ValueError: no layer has a replaced router, or a plain gate cannot express one (a cosine router, a mixer of a
            strength above 0, a trained correction bias where the class has none). The message names the layer; nothing
            has changed.
    """
    for replaced, weight, bias in plain_gates(model):
        router: Any = replaced.module.pointsman
        correction, moved = correction_bias(replaced), getattr(router.select, "bias", None)
        if replaced.form.table and not isinstance(router.select, ClassRule):
            table = replaced.module.get_buffer(replaced.form.table)
            table.copy_(router.score.table.view_as(table))
        _plain(replaced.module, weight, bias)
        if correction is not None and isinstance(moved, Tensor):
            correction.data.copy_(moved.reshape(correction.shape))
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, CONFIG_KEY):
            delattr(config, CONFIG_KEY)
    return model


def plain_gates(model: nn.Module) -> list[tuple[Gate, Tensor, Tensor | None]]:
    """Each replaced gate with the weight and the bias of a plain one; raises ValueError as `materialize` does."""
    gates = {gate.name: gate for gate in survey(model)[0]}
    found: list[tuple[Gate, Tensor, Tensor | None]] = []
    for name, gate in model.named_modules():
        router: Any = getattr(gate, CONFIG_KEY, None)
        if router is None or not hasattr(gate, "pointsman_form"):
            continue
        where = f"materialize: layer {name.rpartition('.')[0]!r} has the router {router.spec!r}"
        if router.mix is not None and float(router.mix.strength().detach()) != 0:
            raise ValueError(f"{where}: a plain gate cannot express its mixer")
        by_table = gate.pointsman_form.table and router.score.gate is not None  # the class's own, which chooses
        with torch.no_grad():
            plain = (router.score.gate if by_table else router.score).plain_linear()
        if plain is None:
            raise ValueError(f"{where}, which a plain gate cannot express")
        factor = gate.pointsman_form.multiplier
        weight, bias = (None if tensor is None else tensor.detach() / factor for tensor in plain)
        assert weight is not None
        if not gate.pointsman_has_bias:
            if bias is not None and bool(bias.any()):
                raise ValueError(f"{where} with a bias; {type(gate).__name__} has none")
            bias = None
        if not isinstance(router.select, ClassRule):
            plain_one = copy.deepcopy(gate)
            _plain(plain_one, weight, bias)
            own = counterpart(replace(gates[name], module=plain_one))  # the class's own rule
            if own is None or not same_forward(router.spec, own):
                raise ValueError(f"{where}; the rule of {type(gate).__name__} is {own or 'another one'!r}")
            trained = getattr(router.select, "bias", None)
            if correction_bias(gates[name]) is None and isinstance(trained, Tensor) and bool(trained.any()):
                raise ValueError(f"{where} with a trained correction bias; {type(gate).__name__} has none")
        found.append((gates[name], weight, bias))
    if not found:
        raise ValueError(f"materialize: no layer of {type(model).__name__} has a pointsman router")
    return found


def _plain(gate: Any, weight: Tensor, bias: Tensor | None) -> None:
    owner = gate.get_submodule(gate.pointsman_form.owner)
    dtype = gate.pointsman_dtype
    del gate.pointsman, gate.pointsman_form, gate.pointsman_dtype, gate.pointsman_has_bias
    state = gate.__dict__.pop("pointsman_state")
    if state is not None:
        state.detach()
    become(gate, type(gate).own_class)
    if owner is not gate:
        owner.__class__ = type(owner).own_class
    owner.register_parameter("weight", nn.Parameter(weight.to(dtype)))
    owner.register_parameter("bias", None if bias is None else nn.Parameter(bias.to(dtype)))
    if bias is None and not isinstance(owner, nn.Linear):
        del owner._parameters["bias"]
