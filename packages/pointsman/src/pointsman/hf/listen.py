"""The gates of a Hugging Face MoE while it runs: observed with forward hooks, replayed, or frozen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from pointsman._errors import did_you_mean
from pointsman.hf.counterpart import correction_bias
from pointsman.hf.gates import candidates, no_gate, survey
from pointsman.hf.layouts import Form, NotAGateError, read_any
from pointsman.recording import KNOWN, Listened
from pointsman.routing import Routing, RoutingContext

ROLES = ("router", "experts")


class Given:
    """What the forward of a model that runs was given: masks and token ids."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.values = model, dict[str, Any]()
        self.encodes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = {**dict(zip(self.names, args, strict=False)), **kwargs}

    def context(self, gate: str, tokens: int) -> RoutingContext | None:
        """Padding and token ids of a gate's input; None where the forward was given neither for these tokens."""
        decoder = "decoder_" if self.encodes and "decoder" in gate.split(".") else ""
        ids, mask = (self.values.get(decoder + name) for name in ("input_ids", "attention_mask"))
        ids = ids if isinstance(ids, Tensor) and ids.numel() == tokens else None
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 and tokens % len(mask) == 0 else None
        mask = None if mask is None or tokens // len(mask) > mask.shape[1] else mask[:, -(tokens // len(mask)) :].bool()
        return None if ids is None and mask is None else RoutingContext(padding_mask=mask, token_ids=ids)


class GateListener:
    """Observes the gates of one model while it runs.

    Attributes:
        layers: layer -> what is known of it before it runs.
        gates: gate -> its module, also of those that cannot be observed.
        unsupported: layer -> why its gate cannot be observed.

    Raises:
        ValueError: the model has no gate that can be observed.
    """

    def __init__(self, model: nn.Module, asked: str) -> None:
        self.model = model
        found, _ = survey(model)
        self.gates = {name: module for name, module, _ in candidates(model)}
        if not self.gates:
            raise ValueError(f"{asked}: {no_gate(model)}: {KNOWN}")
        self.found = {gate.name: gate for gate in found}
        self.layers: dict[str, Listened] = {}
        for gate in found:
            router = getattr(gate.module, "pointsman", None)
            own = router is not None and isinstance(getattr(router.select, "bias", None), Tensor)
            name = type(gate.module).__name__ if router is None else router.spec
            self.layers[gate.layer] = Listened(gate.num_experts, name, own or correction_bias(gate) is not None)
        self.unsupported: dict[str, str] = {}
        home = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        self._given = None if home is None else Given(home)

    def hooks(self, observe: Callable[..., object], strict: bool = True) -> list[RemovableHandle]:
        """Calls `observe` (`control.Observer`) for every gate.

        Args:
            strict: a gate that cannot be observed is an error; else it is kept in `unsupported`.
        """
        handles = []
        if self._given is not None:
            handles.append(self._given.model.register_forward_pre_hook(self._given, with_kwargs=True))
        for name, module in self.gates.items():
            router = getattr(module, "pointsman", None)
            hook = self._gate_hook(name, observe, strict) if router is None else None
            hook = hook or self._router_hook(name, observe)
            handles.append((module if router is None else router).register_forward_hook(hook, with_kwargs=True))
        return handles

    @contextmanager
    def listen(self, observe: Callable[..., object]) -> Iterator[None]:
        """`hooks` inside the `with`; what cannot be observed is kept in `unsupported`."""
        handles = self.hooks(observe, strict=False)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _context(self, name: str, tokens: int) -> RoutingContext | None:
        return None if self._given is None else self._given.context(name, tokens)

    def _router_hook(self, name: str, observe: Callable[..., object]) -> Callable[..., None]:
        layer = name.rpartition(".")[0]

        def hook(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], routing: Routing) -> None:
            context = args[1] if len(args) > 1 else kwargs.get("context")
            hidden = args[0].detach().reshape(-1, args[0].shape[-1])
            observe(layer, routing.detach(), self._context(name, len(hidden)) or context, hidden)

        return hook

    def _gate_hook(self, name: str, observe: Callable[..., object], strict: bool) -> Callable[..., None]:
        layer = name.rpartition(".")[0]

        @torch.no_grad()
        def hook(gate: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            flat = hidden.detach().reshape(-1, hidden.shape[-1])
            try:
                routing = self.routing(name, gate, output, flat.shape[0])
            except NotAGateError as error:
                if strict:
                    raise ValueError(f"layer {layer!r}: {error}") from None
                self.unsupported[layer] = str(error)
                return
            observe(layer, routing, self._context(name, len(flat)), flat)

        return hook

    def routing(self, name: str, gate: nn.Module, output: Any, tokens: int) -> Routing:
        """A gate's output as a Routing. If its scores are unknown, `probs` is the softmax of the logits."""
        known = self.found.get(name)
        form: Form | None = None if known is None else known.form
        block = self.model if known is None else known.block
        logits, weights, experts = (one.detach() for one in read_any(form, gate, block, output, tokens))
        logits = logits.float()
        if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
            probs = logits  # a few classes return probabilities instead of logits
        else:
            sigmoid = form is not None and form.kind == "sigmoid"
            probs = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
        return Routing(experts.long(), weights.float(), probs, logits)


def freeze(model: nn.Module, roles: Sequence[str]) -> None:
    """`pointsman.freeze` on a Hugging Face MoE: "router" is each gate with its correction bias, "experts" the experts.

    Raises:
        ValueError: another role, or no gate.
    """
    parts = list(candidates(model))
    if not parts:
        raise ValueError(f"freeze: {no_gate(model)}: {KNOWN}")
    for role in roles:
        if role not in ROLES:
            raise ValueError(
                f"freeze: {type(model).__name__} of transformers: role {role!r}: {did_you_mean(role, ROLES)}"
            )
    biases = {gate.name: correction_bias(gate) for gate in survey(model)[0]}
    for name, module, block in parts:
        gate: Any = module
        if "router" in roles:
            gate.requires_grad_(False)
            gate.pointsman_frozen = True  # balance leaves its bias
            if (bias := biases.get(name)) is not None:
                bias.requires_grad_(False)
            if (router := getattr(gate, "pointsman", None)) is not None:
                router.frozen = True
        if "experts" in roles:
            experts: nn.Module = getattr(block, "experts", block)
            for parameter in experts.parameters(recurse=experts is not block):
                parameter.requires_grad_(False)
