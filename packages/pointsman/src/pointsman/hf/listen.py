"""The gates of a Hugging Face MoE while it runs: observed with forward hooks, replayed, or frozen."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pointsman._errors import did_you_mean
from pointsman.hf.counterpart import correction_bias, virtual_experts_of
from pointsman.hf.gates import candidates, no_gate, survey
from pointsman.hf.given import Given
from pointsman.hf.layouts import Form, NotAGateError, full_scores, read_any
from pointsman.recording import KNOWN, Listened
from pointsman.routing import Routing

ROLES = ("router", "experts")


class GateListener:
    """Observes the gates of one model while it runs; ValueError if it has none.

    Attributes:
        layers: layer -> what is known of it before it runs.
        gates: gate -> its module, also of those that cannot be observed.
        unsupported: layer -> why its gate cannot be observed.
    """

    def __init__(self, model: nn.Module, asked: str) -> None:
        self.model = model
        found, _ = survey(model)
        self.gates = {name: module for name, module, _ in candidates(model)}
        if not self.gates:
            raise ValueError(f"{asked}: {no_gate(model)}: {KNOWN}")
        if len({*self.gates.values()}) < len(self.gates):
            raise ValueError(f"{asked}: blocks share a gate, so that their choices cannot be told apart")
        self.found = {gate.name: gate for gate in found}
        self.layers: dict[str, Listened] = {}
        for gate in found:
            router = getattr(gate.module, "pointsman", None)
            own = router is not None and isinstance(getattr(router.select, "bias", None), Tensor)
            name = type(gate.module).__name__ if router is None else router.spec
            biased = own or correction_bias(gate) is not None
            self.layers[gate.layer] = Listened(gate.num_experts, name, biased, virtual_experts_of(gate))
        self.unsupported: dict[str, str] = {}
        self._given = Given(model)

    def hooks(self, observe: Callable[..., object], strict: bool = True) -> list[RemovableHandle]:
        """Calls `observe` (`recording.Observer`) for every gate; one that cannot be observed is an error if `strict`,
        else kept in `unsupported`."""
        handles = self._given.hooks()
        for name, module in self.gates.items():
            observed = getattr(module, "pointsman", module)
            hook = partial(self._observe, observe, strict, name)
            handles.append(observed.register_forward_hook(hook, with_kwargs=True))
        return handles

    @contextmanager
    def listen(self, observe: Callable[..., object]) -> Iterator[None]:
        """`hooks` inside the `with`; what cannot be observed is kept in `unsupported`."""
        with ExitStack() as inside:
            for handle in self.hooks(observe, strict=False):
                inside.enter_context(handle)
            yield

    @torch.no_grad()
    def _observe(
        self, observe: Callable[..., object], strict: bool, name: str, module: nn.Module, args: Any, kwargs: Any,
        output: Any,
    ) -> None:  # fmt: skip
        layer = name.rpartition(".")[0]
        hidden: Tensor = next(iter((*args, *kwargs.values()))).detach()
        flat = hidden.reshape(-1, hidden.shape[-1])
        context = self._given.context(name, len(flat))
        if isinstance(output, Routing):  # of a router of this library
            context = context or (args[1] if len(args) > 1 else kwargs.get("context"))
        if context is not None and context.padding_mask is not None:  # on the inputs' device
            context = replace(context, padding_mask=context.padding_mask.to(flat.device))
        try:
            routing = output.detach() if isinstance(output, Routing) else self.routing(name, module, output, len(flat))
        except NotAGateError as error:
            if strict:
                raise ValueError(f"layer {layer!r}: {error}") from None
            self.unsupported[layer] = str(error)
            return
        observe(layer, routing, context, flat)

    def routing(self, name: str, gate: nn.Module, output: Any, tokens: int) -> Routing:
        """A gate's output as a Routing."""
        known = self.found.get(name)
        form: Form | None = None if known is None else known.form
        block = self.model if known is None else known.block
        logits, weights, experts = (one.detach() for one in read_any(form, gate, block, output, tokens))
        logits = logits.float()
        return Routing(experts.long(), weights.float(), full_scores(form, logits, weights, experts), logits)


def freeze(model: nn.Module, roles: Sequence[str]) -> None:
    """`pointsman.freeze` on a Hugging Face MoE: "router" is each gate with its correction bias, or "experts"."""
    parts = list(candidates(model))
    if not parts:
        raise ValueError(f"freeze: {no_gate(model)}: {KNOWN}")
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"freeze: role {role!r} in a model of transformers: {did_you_mean(role, ROLES)}")
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
