"""Replay in a Hugging Face MoE: the class's own code runs, and its `topk` over the experts gives the replayed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pointsman.control import KNOWN
from pointsman.hf.gates import Gate, no_gate, survey
from pointsman.hf.surgery.routed import ClassRule


class _Choice(TorchFunctionMode):
    """Inside, `topk` of [tokens, E] (or [B, T, E]) returns these experts [tokens, k], and their values."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.num_experts, self.used = experts, num_experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self.num_experts or scores[..., 0].numel() != len(self.experts):
            return found  # of groups, or of something else
        self.used = True
        experts = self.experts.to(scores.device).reshape(*scores.shape[:-1], -1)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


class GatePlace:
    """One gate whose class's choice can be replaced."""

    first = 0

    def __init__(self, gate: Gate) -> None:
        self.gate, self.last = gate, gate.num_experts - 1
        chooses = gate.layout is None or gate.layout.write is not None
        self.module: Any = gate.module if chooses else gate.block  # DBRX's block chooses

    def replay(self, experts: Tensor | None) -> None:
        self.module.__dict__.pop("forward", None)
        if experts is None:
            return
        own, where = self.module.forward, f"replay_routing: layer {self.gate.layer!r}"
        kind, checked = type(self.gate.module).__name__, self.module is self.gate.module

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            tokens = hidden.numel() // hidden.shape[-1]
            if tokens != len(experts):
                raise ValueError(f"{where}: the replayed routing is of {len(experts)} tokens, the input of {tokens}")
            with _Choice(experts, self.gate.num_experts) as choice:
                output = own(*args, **kwargs)
            if not choice.used or (checked and not self._took(output, experts.to(hidden.device))):
                raise ValueError(f"{where}: {kind} does not choose by topk over its experts: it cannot be replayed")
            return output

        self.module.forward = forward

    def _took(self, output: Any, experts: Tensor) -> bool:
        found = self.gate.routed(output)[2].reshape(len(experts), -1).long()
        return torch.equal(found.sort(-1).values, experts.sort(-1).values)


class _RouterPlace:
    """A gate that `replace_routers` gave a router with its own rule."""

    first = -1

    def __init__(self, router: Any) -> None:
        self.router, self.last = router, router.num_experts + len(router.virtual) - 1

    def replay(self, experts: Tensor | None) -> None:
        self.router.replayed = experts


def places(model: nn.Module) -> dict[str, Any]:
    """Layer -> where its choice is replaced.

    Raises:
        ValueError: the model has no gate, or one whose output is not known.
    """
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError(f"replay_routing: {reasons[0] if reasons else no_gate(model)}: {KNOWN}")
    found: dict[str, Any] = {}
    for gate in gates:
        router: Any = getattr(gate.module, "pointsman", None)
        own = router is not None and not isinstance(router.select, ClassRule)
        found[gate.layer] = _RouterPlace(router) if own else GatePlace(gate)
    return found
