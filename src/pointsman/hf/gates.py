"""Finds the gates of a Hugging Face MoE by what they return, and says what each one does with its logits.

A gate is a sibling of `experts` whose forward returns, among a few tensors, integers [tokens, k] (the chosen experts),
floats [tokens, k] (their weights) and floats [tokens, E] (logits); its name differs from class to class. What a class
does between logits and choice (softmax or sigmoid, groups, correction bias, scaling, renormalisation) is its own
affair: we run its own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PROBE_TOKENS = 6
NO_GATE = "{}: no gate beside experts: not a mixture of experts of the shared kind"
Kind = Literal["softmax", "sigmoid", "other"]


class NotAGateError(ValueError):
    """A module beside the experts that does not route as the shared block does; the message says what it does."""


@dataclass(frozen=True)
class Form:
    """How a gate is called, and what it returns.

    Attributes:
        owner: path from the gate to the module that holds the linear map ("" = the gate itself).
        sequence: whether its input must be [B, T, dim].
        extras: names of the block's tensors that it takes beside the hidden states (a correction bias).
        logits, weights, indices: positions in the tuple that it returns.
        kind: what turns its logits into scores; "other" if neither softmax nor sigmoid.
        linear: whether its logits are weight @ hidden (+ bias), nothing before and nothing after.
    """

    owner: str
    sequence: bool
    extras: tuple[str, ...]
    logits: int
    weights: int
    indices: int
    kind: Kind
    linear: bool


@dataclass(frozen=True)
class Gate:
    """One gate of a model.

    Attributes:
        name: its qualified name.
        layer: the qualified name of the block that it routes for.
        module: the gate.
        block: the module that holds gate and experts.
        num_experts, dim: how many experts it scores, and the width of its input.
        form: how it is called.
    """

    name: str
    layer: str
    module: nn.Module
    block: nn.Module
    num_experts: int
    dim: int
    form: Form

    @property
    def experts(self) -> nn.Module:
        return self.block.get_submodule("experts")

    def routed(self, output: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [tokens, E], weights [tokens, k] and experts [tokens, k] from what the gate returned."""
        width = output[self.form.logits].shape[-1]
        return (
            output[self.form.logits].reshape(-1, width),
            output[self.form.weights].reshape(-1, output[self.form.weights].shape[-1]),
            output[self.form.indices].reshape(-1, output[self.form.indices].shape[-1]),
        )


def owner_of(gate: nn.Module) -> str:
    """Path from the gate to the module whose `weight` [experts, dim] scores; NotAGateError if that is not one map."""
    own = [name for name, tensor in gate.named_parameters() if tensor.dim() == 2 and name.split(".")[-1] == "weight"]
    if len(own) != 1 or own[0].count(".") > 1:
        raise NotAGateError(f"{type(gate).__name__} scores with {len(own)} matrices, not with one")
    return own[0].rpartition(".")[0]


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(qualified name, module, block) of whatever stands beside `experts` and looks like a gate."""
    for layer, block in model.named_modules():
        children = dict(block.named_children())
        if "experts" not in children:
            continue
        for name, child in children.items():
            if name != "experts" and (hasattr(child, "top_k") or name in ("gate", "router")):
                yield (f"{layer}.{name}" if layer else name), child, block


def find_gates(model: nn.Module) -> list[Gate]:
    """Every gate of a model, in the order of its layers.

    Raises:
        ValueError: the model has none, or one that does not route as the shared block does; the message says why.
    """
    gates, reasons = survey(model)
    if not gates:
        raise ValueError(reasons[0] if reasons else NO_GATE.format(type(model).__name__))
    return gates


def survey(model: nn.Module) -> tuple[list[Gate], list[str]]:
    """The gates of a model, and why other modules beside experts are not among them."""
    gates: list[Gate] = []
    reasons: list[str] = []
    for name, module, block in candidates(model):
        layer = name.rpartition(".")[0]
        known: Form | None = getattr(module, "pointsman_form", None)
        try:
            if known is not None:
                router: Any = module.pointsman
                gates.append(Gate(name, layer, module, block, router.num_experts, router.dim, known))
            else:
                gates.append(probe(name, layer, module, block))
        except NotAGateError as error:
            reasons.append(f"{name}: {error}")
    return gates, reasons


def extras_of(module: nn.Module, block: nn.Module) -> tuple[str, ...]:
    """The block's tensors that the gate takes beside the hidden states, by name.

    Raises:
        NotAGateError: the gate needs something else.
    """
    names = []
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[2:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if isinstance(getattr(block, parameter.name, None), Tensor):
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise NotAGateError(f"{type(module).__name__} also needs {parameter.name!r}, which is not the block's")
    return tuple(names)


@torch.no_grad()
def probe(name: str, layer: str, module: nn.Module, block: nn.Module) -> Gate:
    """Calls the gate on a few random vectors and reads its form off the answer.

    Raises:
        NotAGateError: its answer is not that of a gate, or its weights are not loaded.
    """
    owner = owner_of(module)
    holder = module.get_submodule(owner)
    weight, bias = holder.get_parameter("weight"), getattr(holder, "bias", None)
    if weight.is_meta:
        raise NotAGateError("its weights are on the meta device; load them first")
    dim = weight.shape[-1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_TOKENS, dim, generator=generator)
    blank = not bool(weight.any())
    if blank:  # a gate that starts at zero would look like anything
        weight.copy_(torch.randn(weight.shape, generator=generator))
    spread = F.linear(hidden.to(weight.device), weight.float()).std()  # logits of spread 1 tell softmax from sigmoid
    hidden = (hidden.to(weight.device) / spread.clamp_min(1e-6)).to(weight.dtype)
    extras = extras_of(module, block)
    arguments = [getattr(block, extra) for extra in extras]
    training = module.training
    module.eval()
    try:
        output, sequence = _call(module, hidden, arguments)
        logits, weights, indices = positions(type(module).__name__, output, PROBE_TOKENS)
        expected = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        seen = output[logits].reshape(PROBE_TOKENS, -1).float()
        linear = seen.shape == expected.shape and bool(torch.allclose(seen, expected, rtol=3e-2, atol=3e-2))
        num_experts = int(seen.shape[-1])
        form = Form(owner, sequence, extras, logits, weights, indices, "other", linear)
        gate = Gate(name, layer, module, block, num_experts, dim, form)
        form = replace(form, kind=_kind(gate, hidden, arguments))
    finally:
        module.train(training)
        if blank:
            weight.zero_()
    return replace(gate, form=form)


def call_gate(gate: Gate) -> tuple[Any, ...]:
    """What the gate returns for a few zeros; where one of our routers scores, what its class makes of equal scores."""
    parameter = next(gate.module.parameters())
    module: Any = gate.module
    routed = hasattr(module, "pointsman_form")
    width = gate.num_experts if routed else gate.dim
    hidden = torch.zeros(PROBE_TOKENS, width, device=parameter.device, dtype=parameter.dtype)
    call = partial(module.own_class.forward, module) if routed else module.forward
    arguments = [getattr(gate.block, extra) for extra in gate.form.extras]
    output: tuple[Any, ...] = call(hidden[None] if gate.form.sequence else hidden, *arguments)
    return output


def _call(module: nn.Module, hidden: Tensor, arguments: list[Tensor]) -> tuple[tuple[Any, ...], bool]:
    problem: Exception | None = None
    for sequence in (False, True):
        try:
            output = module.forward(hidden[None].clone() if sequence else hidden.clone(), *arguments)  # hooks stay out
        except Exception as error:  # the class's own code on a shape that it may not take: any error means no
            problem = error
            continue
        if not isinstance(output, tuple):
            raise NotAGateError(f"{type(module).__name__} returns {type(output).__name__}, not what it chose")
        return output, sequence
    raise NotAGateError(f"{type(module).__name__} cannot be called on hidden states alone ({type(problem).__name__})")


def positions(kind: str, output: tuple[Any, ...], tokens: int) -> tuple[int, int, int]:
    """Where logits, weights and indices stand in what a gate of class `kind` returned for so many tokens."""
    tensors = [
        (place, item.reshape(-1, item.shape[-1]) if item.dim() > 1 else item[:, None])
        for place, item in enumerate(output)
        if isinstance(item, Tensor) and item.dim() > 0
    ]
    tensors = [(place, item) for place, item in tensors if item.shape[0] == tokens]
    integers = [(place, item) for place, item in tensors if not item.is_floating_point() and item.dtype != torch.bool]
    floats = [(place, item) for place, item in tensors if item.is_floating_point()]
    if len(integers) != 1:
        raise NotAGateError(f"{kind} does not return the chosen experts [tokens, k]")
    indices, chosen = integers[0]
    if chosen.shape[1] > 1 and bool((chosen.sort(-1).values.diff(dim=-1) == 0).any()):
        raise NotAGateError(f"{kind} returns a mask over experts, not the chosen experts [tokens, k]")
    wide = [place for place, item in floats if item.shape[1] > chosen.shape[1]]
    narrow = [place for place, item in floats if item.shape == chosen.shape]
    if not wide and len(narrow) >= 2:  # k = E: logits come first in every class
        wide, narrow = narrow[:1], narrow[1:]
    if not wide or not narrow:
        raise NotAGateError(f"{kind} does not return logits [tokens, experts] and weights [tokens, k]")
    return wide[0], narrow[0], indices


def _kind(gate: Gate, hidden: Tensor, arguments: list[Tensor]) -> Kind:
    """What the weights of all experts are proportional to, with k = E for the moment."""
    if not gate.form.linear:
        return "other"
    module: Any = gate.module
    before = getattr(module, "top_k", None)
    if not isinstance(before, int):
        return "other"
    try:
        module.top_k = gate.num_experts
        output, _ = _call(module, hidden, arguments)
        logits, weights, experts = (tensor.float() for tensor in gate.routed(output))
    except Exception:  # a class that takes no such k
        return "other"
    finally:
        module.top_k = before
    if weights.shape != logits.shape:
        return "other"
    weights = torch.zeros_like(weights).scatter(1, experts.long(), weights)
    weights = weights / weights.sum(-1, keepdim=True)
    kinds: dict[Kind, Tensor] = {"softmax": torch.softmax(logits, -1), "sigmoid": torch.sigmoid(logits)}
    near = {kind: float((weights - score / score.sum(-1, keepdim=True)).abs().max()) for kind, score in kinds.items()}
    best = min(near, key=lambda kind: near[kind])
    return best if near[best] < 0.1 * max(near.values()) else "other"
