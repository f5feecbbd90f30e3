"""Listening to the gates of an untouched Hugging Face MoE: hooks, no edits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics import Fluctuation
from pointsman.hf.gates import Kind, NotAGateError, candidates, positions, survey
from pointsman.routing import Routing

Taker = Callable[[str, Routing, Tensor], None]
"""(layer, its routing, what its gate saw [tokens, dim])."""


def changed(routing: Routing, change: Callable[[Tensor], Tensor]) -> Routing:
    """A routing with every tensor changed: moved to a device, cut to some tokens."""
    unmixed = None if routing.unmixed is None else change(routing.unmixed)
    return Routing(
        change(routing.experts),
        change(routing.weights),
        change(routing.probs),
        change(routing.logits),
        unmixed=unmixed,
    )


class GateListener:
    """The gates of one model, heard while it runs.

    Attributes:
        num_experts: gate -> how many experts it scores.
        unsupported: layer -> why its gate says nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        gates, _ = survey(model)
        self.kinds: dict[str, Kind] = {gate.name: gate.form.kind for gate in gates}
        self.num_experts = {gate.name: gate.num_experts for gate in gates}
        self.gates = {name: module for name, module, _ in candidates(model)}
        self.unsupported: dict[str, str] = {}
        self.precision: dict[str, Fluctuation] = {}
        self._rounded: dict[str, tuple[nn.Module, nn.Module] | None] = {}

    @property
    def layers(self) -> list[str]:
        return [name.rpartition(".")[0] for name in self.gates]

    @contextmanager
    def listen(self, take: Taker, mask: Tensor | None = None, rounding: bool = False) -> Iterator[None]:
        """Hands on every gate's routing; with `rounding`, `precision` gathers whether it is another one in bf16.

        Args:
            mask: [B, T] bool, the tokens that `precision` counts.
        """
        handles = []
        for name, module in self.gates.items():
            router = getattr(module, "pointsman", None)
            if router is not None:
                handles.append(router.register_forward_hook(self._of_router(name, take), with_kwargs=True))
            else:
                hook = self._of_gate(name, take, mask, rounding)
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _of_router(self, name: str, take: Taker) -> Callable[..., None]:
        layer = name.rpartition(".")[0]

        def hook(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> None:
            take(layer, routing.detach(), args[0].detach().reshape(-1, args[0].shape[-1]))

        return hook

    def _of_gate(self, name: str, take: Taker, mask: Tensor | None, rounding: bool) -> Callable[..., None]:
        layer = name.rpartition(".")[0]

        def hook(gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            flat = hidden.detach().reshape(-1, hidden.shape[-1])
            try:
                routing = self.routing(name, gate, output, flat.shape[0])
            except NotAGateError as error:
                self.unsupported[layer] = str(error)
                return
            take(layer, routing, flat)
            if rounding:
                self._round(name, gate, args, kwargs, mask)

        return hook

    def routing(self, name: str, gate: nn.Module, output: Any, tokens: int) -> Routing:
        """What a gate returned, as a Routing. Where its scores are unknown, probs are the softmax of its logits."""
        if not isinstance(output, tuple):
            raise NotAGateError(f"{type(gate).__name__} returns {type(output).__name__}, not what it chose")
        logits, weights, experts = (output[place].detach() for place in positions(type(gate).__name__, output, tokens))
        logits = logits.reshape(tokens, -1).float()
        kind = self.kinds.get(name, "other")
        if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
            probs = logits  # a few classes return probabilities there
        else:
            probs = torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, -1)
        return Routing(experts.reshape(tokens, -1).long(), weights.reshape(tokens, -1).float(), probs, logits)

    def _round(
        self, name: str, gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> None:
        """Runs the gate once in float32 and once in bf16, on what it saw."""
        if name not in self._rounded:
            self._rounded[name] = (_copy(gate, torch.float32), _copy(gate, torch.bfloat16))
        pair = self._rounded[name]
        if pair is None:
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        tokens = hidden.numel() // hidden.shape[-1]
        try:
            exact, rounded = (
                self.routing(name, one, one(hidden.to(dtype), *args[1:], **rest), tokens)
                for one, dtype in zip(pair, (torch.float32, torch.bfloat16), strict=True)
            )
        except (RuntimeError, NotAGateError):  # a class that cannot be run in another precision
            self._rounded[name] = None
            return
        flat = None if mask is None or mask.numel() != tokens else mask.reshape(-1).to(hidden.device)
        self.precision.setdefault(name.rpartition(".")[0], Fluctuation()).update(exact, rounded, flat)


def _copy(gate: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy without hooks (ours would listen to it, too)."""
    copied = copy.copy(gate)
    copied._forward_hooks, copied._forward_pre_hooks = type(gate._forward_hooks)(), type(gate._forward_pre_hooks)()
    copied._forward_hooks_with_kwargs = type(gate._forward_hooks_with_kwargs)()
    return copy.deepcopy(copied).to(dtype).eval()
