"""The gates of a Hugging Face MoE while it runs: observed with forward hooks, replayed, or frozen."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from pointsman._errors import did_you_mean
from pointsman.diagnostics import Fluctuation
from pointsman.hf.counterpart import correction_bias
from pointsman.hf.forms import Form, NotAGateError
from pointsman.hf.gates import candidates, no_gate, survey
from pointsman.hf.layouts import read_any
from pointsman.recording import KNOWN, Listened
from pointsman.routing import Routing, RoutingContext

ROLES = ("router", "experts")


class Given:
    """What the forward of a model that runs was given: masks and token ids."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.values = model, dict[str, Any]()
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.values = {**dict(zip(self.names, args, strict=False)), **kwargs}

    def context(self, gate: str, tokens: int) -> RoutingContext | None:
        """Padding and token ids of a gate's input; None where the forward was given neither for these tokens."""
        decoder = "decoder" in gate.split(".") and "decoder_input_ids" in self.values
        ids, mask = (
            self.values.get(("decoder_" if decoder else "") + name) for name in ("input_ids", "attention_mask")
        )
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
        bfloat16: layer -> fluctuation between the gate in float32 and in bf16.

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
        self.bfloat16: dict[str, Fluctuation] = {}
        self._copies: dict[str, tuple[nn.Module, nn.Module] | None] = {}  # gate -> in float32 and in bf16
        home = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        self._given = None if home is None else Given(home)

    def hooks(
        self, observe: Callable[..., object], mask: Tensor | None = None, bfloat16: bool = False, strict: bool = True
    ) -> list[RemovableHandle]:
        """Calls `observe` (`control.Observer`) for every gate.

        Args:
            mask: [B, T] bool, the tokens that the comparison counts.
            bfloat16: also compares each gate in float32 and in bf16.
            strict: a gate that cannot be observed is an error; else it is kept in `unsupported`.
        """
        handles = []
        if self._given is not None:
            handles.append(self._given.model.register_forward_pre_hook(self._given, with_kwargs=True))
        for name, module in self.gates.items():
            router = getattr(module, "pointsman", None)
            hook = self._gate_hook(name, observe, mask, bfloat16, strict) if router is None else None
            hook = hook or self._router_hook(name, observe)
            handles.append((module if router is None else router).register_forward_hook(hook, with_kwargs=True))
        return handles

    @contextmanager
    def listen(
        self, observe: Callable[..., object], mask: Tensor | None = None, bfloat16: bool = False
    ) -> Iterator[None]:
        """`hooks` inside the `with`; what cannot be observed is kept in `unsupported`."""
        handles = self.hooks(observe, mask, bfloat16, strict=False)
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
            observe(layer, routing.detach(), context or self._context(name, len(hidden)), hidden)

        return hook

    def _gate_hook(
        self, name: str, observe: Callable[..., object], mask: Tensor | None, bfloat16: bool, strict: bool
    ) -> Callable[..., None]:
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
            if bfloat16:
                self._compare_precisions(name, gate, args, kwargs, mask)

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
