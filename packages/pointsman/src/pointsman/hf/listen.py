"""Observes the gates of a Hugging Face MoE with forward hooks; the model is not changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics import Fluctuation
from pointsman.hf.forms import Kind, NotAGateError, positions
from pointsman.hf.gates import candidates, survey
from pointsman.routing import Routing

Observer = Callable[[str, Routing, Tensor], object]
"""Called with (layer, its routing, its gate's input [tokens, dim])."""


class GateListener:
    """Observes the gates of one model while it runs.

    Attributes:
        num_experts: gate -> the number of experts that it scores.
        unsupported: layer -> why its gate cannot be observed.
        bfloat16: layer -> fluctuation between the gate in float32 and in bf16.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        gates, _ = survey(model)
        self.kinds: dict[str, Kind] = {gate.name: gate.form.kind for gate in gates}
        self.by_layout = {gate.name: gate for gate in gates if gate.layout is not None}
        self.num_experts = {gate.name: gate.num_experts for gate in gates}
        self.gates = {name: module for name, module, _ in candidates(model)}
        self.unsupported: dict[str, str] = {}
        self.bfloat16: dict[str, Fluctuation] = {}
        self._copies: dict[str, tuple[nn.Module, nn.Module] | None] = {}  # gate -> in float32 and in bf16

    @property
    def layers(self) -> list[str]:
        return [name.rpartition(".")[0] for name in self.gates]

    @contextmanager
    def listen(self, observe: Observer, mask: Tensor | None = None, bfloat16: bool = False) -> Iterator[None]:
        """Calls `observe` for every gate; if `bfloat16`, also compares each gate in float32 and in bf16.

        Args:
            mask: [B, T] bool, the tokens that the comparison counts.
        """
        with ExitStack() as hooks:
            for name, module in self.gates.items():
                if (router := getattr(module, "pointsman", None)) is not None:
                    handle = router.register_forward_hook(self._router_hook(name, observe), with_kwargs=True)
                else:
                    hook = self._gate_hook(name, observe, mask, bfloat16)
                    handle = module.register_forward_hook(hook, with_kwargs=True)
                hooks.enter_context(handle)
            yield

    def _router_hook(self, name: str, observe: Observer) -> Callable[..., None]:
        layer = name.rpartition(".")[0]

        def hook(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> None:
            observe(layer, routing.detach(), args[0].detach().reshape(-1, args[0].shape[-1]))

        return hook

    def _gate_hook(self, name: str, observe: Observer, mask: Tensor | None, bfloat16: bool) -> Callable[..., None]:
        layer = name.rpartition(".")[0]

        def hook(gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            flat = hidden.detach().reshape(-1, hidden.shape[-1])
            try:
                routing = self.routing(name, gate, output, flat.shape[0])
            except NotAGateError as error:
                self.unsupported[layer] = str(error)
                return
            observe(layer, routing, flat)
            if bfloat16:
                self._compare_precisions(name, gate, args, kwargs, mask)

        return hook

    def routing(self, name: str, gate: nn.Module, output: Any, tokens: int) -> Routing:
        """A gate's output as a Routing. If its scores are unknown, `probs` is the softmax of the logits."""
        if name in self.by_layout:
            logits, weights, experts = (one.detach() for one in self.by_layout[name].routed(output))
        elif isinstance(output, tuple):
            places = positions(type(gate).__name__, output, tokens)
            logits, weights, experts = (output[place].detach() for place in places)
        else:
            raise NotAGateError(f"{type(gate).__name__} returns {type(output).__name__}, not what it chose")
        logits = logits.reshape(tokens, -1).float()
        kind = self.kinds.get(name, "other")
        if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
            probs = logits  # a few classes return probabilities instead of logits
        else:
            probs = torch.sigmoid(logits) if kind == "sigmoid" else torch.softmax(logits, -1)
        return Routing(experts.reshape(tokens, -1).long(), weights.reshape(tokens, -1).float(), probs, logits)

    def _compare_precisions(
        self, name: str, gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
    ) -> None:
        """Runs the gate on the same input once in float32 and once in bf16."""
        if name not in self._copies:
            self._copies[name] = (_copy(gate, torch.float32), _copy(gate, torch.bfloat16))
        pair = self._copies[name]
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
        except (RuntimeError, NotAGateError):  # the class does not run in another precision
            self._copies[name] = None
            return
        flat = None if mask is None or mask.numel() != tokens else mask.reshape(-1).to(hidden.device)
        self.bfloat16.setdefault(name.rpartition(".")[0], Fluctuation()).update(exact, rounded, flat)


def _copy(gate: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy without forward hooks."""
    copied = copy.copy(gate)
    copied._forward_hooks, copied._forward_pre_hooks = type(gate._forward_hooks)(), type(gate._forward_pre_hooks)()
    copied._forward_hooks_with_kwargs = type(gate._forward_hooks_with_kwargs)()
    return copy.deepcopy(copied).to(dtype).eval()
