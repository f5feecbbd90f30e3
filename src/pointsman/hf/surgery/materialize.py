"""materialize: a Hugging Face model back to its class's own plain gates, for stock transformers and servers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pointsman.hf.surgery.replace import CONFIG_KEY


def materialize(model: nn.Module) -> nn.Module:
    """Gives every replaced gate of a Hugging Face MoE a plain weight with the same logits, in place.

    The saved checkpoint then loads in stock transformers, and in whatever reads its checkpoints. The weight has the
    dtype of the model's other weights; in float32 the logits are identical.

    Returns:
        the model.

    Raises:
        ValueError: no layer has one of our routers; or one that no plain gate expresses (a cosine router, a mixer of a
            strength above 0), named with its layer. Nothing has changed then.
    """
    found: list[tuple[Any, Tensor, Tensor | None]] = []
    for name, gate in model.named_modules():
        router: Any = getattr(gate, CONFIG_KEY, None)
        if router is None or not hasattr(gate, "pointsman_form"):
            continue
        where = f"materialize: layer {name.rpartition('.')[0]!r} has the router {router.spec!r}"
        if router.mix is not None and float(router.mix.strength().detach()) != 0:
            raise ValueError(f"{where}, whose mixer no plain gate expresses")
        with torch.no_grad():
            plain = router.score.plain_linear()
        if plain is None:
            raise ValueError(f"{where}, which no plain gate expresses")
        weight, bias = (None if tensor is None else tensor.detach().clone() for tensor in plain)
        assert weight is not None
        if not gate.pointsman_has_bias:
            if bias is not None and bool(bias.any()):
                raise ValueError(f"{where}, whose bias {type(gate).__name__} has no place for")
            bias = None
        found.append((gate, weight, bias))
    if not found:
        raise ValueError(f"materialize: no layer of {type(model).__name__} has a router of ours")
    for gate, weight, bias in found:
        _plain(gate, weight, bias)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, CONFIG_KEY):
            delattr(config, CONFIG_KEY)
    return model


def _plain(gate: Any, weight: Tensor, bias: Tensor | None) -> None:
    owner = gate.get_submodule(gate.pointsman_form.owner)
    dtype = gate.pointsman_dtype
    del gate.pointsman, gate.pointsman_form, gate.pointsman_dtype, gate.pointsman_has_bias
    state = gate.__dict__.pop("pointsman_state")
    if state is not None:
        state.detach()
    gate.__class__ = type(gate).own_class
    if owner is not gate:
        owner.__class__ = type(owner).own_class
    owner.register_parameter("weight", nn.Parameter(weight.to(dtype)))
    owner.register_parameter("bias", None if bias is None else nn.Parameter(bias.to(dtype)))
    if bias is None and not isinstance(owner, nn.Linear):
        del owner._parameters["bias"]
