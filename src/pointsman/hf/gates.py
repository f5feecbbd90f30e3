"""Finds the gates of a Hugging Face MoE by their outputs, and determines how each one is called.

A gate is a sibling module of `experts`. Its forward returns integers [tokens, k] (the chosen experts), floats
[tokens, k] (their weights) and floats [tokens, E] (logits); its name and their order differ between classes. Between
logits and choice (softmax or sigmoid, groups, correction bias, scaling, renormalisation) the class's own code runs.
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
NO_GATE = "{}: no gate next to experts: not a known mixture of experts"
BY_TOKEN_ID = "chooses experts by token id, from a table"
Kind = Literal["softmax", "sigmoid", "other"]


class NotAGateError(ValueError):
    """A module next to the experts does not return logits, weights and indices; the message says what it does."""


@dataclass(frozen=True)
class Form:
    """How a gate is called, and what it returns.

    Attributes:
        owner: path from the gate to the module that holds the linear map ("" = the gate itself).
        sequence: whether its input must be [B, T, dim].
        extras: names of the block's tensors that are further arguments (a correction bias).
        logits, weights, indices: positions in the returned tuple.
        kind: the function from logits to scores; "other" if neither softmax nor sigmoid.
        linear: whether the logits are exactly `multiplier` * (weight @ hidden (+ bias)).
        outputs: the length of the returned tuple; 0 in configurations of earlier versions.
        multiplier: a constant of the class between the product and the logits.
        flat: whether it returns tokens [B * T] also for an input [B, T, dim].
    """

    owner: str
    sequence: bool
    extras: tuple[str, ...]
    logits: int
    weights: int
    indices: int
    kind: Kind
    linear: bool
    outputs: int = 0
    multiplier: float = 1.0
    flat: bool = False


@dataclass(frozen=True)
class Gate:
    """One gate of a model.

    Attributes:
        name, layer: qualified names of the gate and of its MoE block.
        module, block: the gate, and the block that contains gate and experts.
        num_experts, dim: the number of experts, virtual ones included, and the width of the input.
        form: how the gate is called.
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
        """Logits [tokens, E], weights [tokens, k] and experts [tokens, k] from the gate's output."""
        logits, weights, experts = (
            output[place].flatten(0, -2) for place in (self.form.logits, self.form.weights, self.form.indices)
        )
        return logits, weights, experts


def owner_of(gate: nn.Module) -> str:
    """Path from the gate to the module with the scoring matrix `weight` [E, dim]; NotAGateError unless there is one."""
    own = [name for name, tensor in gate.named_parameters() if tensor.dim() == 2 and name.split(".")[-1] == "weight"]
    if len(own) != 1 or own[0].count(".") > 1:
        raise NotAGateError(f"{type(gate).__name__} scores with {len(own)} matrices, not with one")
    return own[0].rpartition(".")[0]


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(qualified name, module, block) of siblings of `experts` that have a `top_k` or are named as gates are."""
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
        ValueError: the model has no gate, or its candidates are not gates; the message says why.
    """
    gates, reasons = survey(model)
    if not gates:
        raise ValueError(reasons[0] if reasons else NO_GATE.format(type(model).__name__))
    return gates


def survey(model: nn.Module) -> tuple[list[Gate], list[str]]:
    """The gates of a model, and for every other candidate the reason why it is not a gate."""
    gates: list[Gate] = []
    reasons: list[str] = []
    for name, module, block in candidates(model):
        layer = name.rpartition(".")[0]
        known: Form | None = getattr(module, "pointsman_form", None)
        try:
            if known is not None:
                router: Any = module.pointsman
                experts = router.num_experts + len(router.virtual)
                gates.append(Gate(name, layer, module, block, experts, router.dim, known))
            else:
                gates.append(probe(name, layer, module, block))
        except NotAGateError as error:
            reasons.append(f"{name}: {error}")
    return gates, reasons


def extras_of(module: nn.Module, block: nn.Module) -> tuple[str, ...]:
    """Names of the block's tensors that the gate's forward takes after the hidden states.

    Raises:
        NotAGateError: the gate needs an argument that is not a tensor of the block.
    """
    names = []
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[2:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if isinstance(getattr(block, parameter.name, None), Tensor):
            names.append(parameter.name)
        elif parameter.name == "input_ids":
            raise NotAGateError(f"{type(module).__name__} {BY_TOKEN_ID}")
        elif parameter.default is parameter.empty:
            raise NotAGateError(f"{type(module).__name__} also needs {parameter.name!r}, which is not the block's")
    return tuple(names)


@torch.no_grad()
def probe(name: str, layer: str, module: nn.Module, block: nn.Module) -> Gate:
    """Determines a gate's form by calling it on random vectors.

    Raises:
        NotAGateError: its output is not that of a gate, or its weights are not loaded.
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
    if blank:  # the output of a zero weight does not show the form
        weight.copy_(torch.randn(weight.shape, generator=generator))
    spread = F.linear(hidden.to(weight.device), weight.float()).std()  # softmax and sigmoid differ clearly at std 1
    hidden = (hidden.to(weight.device) / spread.clamp_min(1e-6)).to(weight.dtype)
    extras = extras_of(module, block)
    arguments = [getattr(block, extra) for extra in extras]
    training = module.training
    module.eval()
    try:
        output, sequence = run_gate(module, hidden, arguments)
        logits, weights, indices = positions(type(module).__name__, output, PROBE_TOKENS)
        expected = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        actual = output[logits].reshape(PROBE_TOKENS, -1).float()
        multiplier = _multiplier(module, expected, actual)
        num_experts = int(actual.shape[-1])
        linear, factor = multiplier is not None, 1.0 if multiplier is None else multiplier
        flat = output[logits].dim() == output[weights].dim() == output[indices].dim() == 2
        form = Form(owner, sequence, extras, logits, weights, indices, "other", linear, len(output), factor, flat)
        gate = Gate(name, layer, module, block, num_experts, dim, form)
        form = replace(form, kind=_kind(gate, hidden, arguments))
    finally:
        module.train(training)
        if blank:
            weight.zero_()
    return replace(gate, form=form)


def _multiplier(module: nn.Module, product: Tensor, logits: Tensor) -> float | None:
    """m with logits = m * product: 1, or a number that the module keeps; None if there is none."""
    if logits.shape != product.shape:
        return None
    kept = [value for value in vars(module).values() if isinstance(value, float) and value > 0]
    near = (m for m in (1.0, *kept) if torch.allclose(logits, m * product, rtol=3e-2, atol=3e-2 * min(m, 1)))
    return next(near, None)


def call_gate(gate: Gate) -> tuple[Any, ...]:
    """The gate's output for zero vectors; for a replaced router, the class's output for equal logits."""
    parameter = next(gate.module.parameters())
    module: Any = gate.module
    routed = hasattr(module, "pointsman_form")
    width = gate.num_experts if routed else gate.dim
    hidden = torch.zeros(PROBE_TOKENS, width, device=parameter.device, dtype=parameter.dtype)
    call = partial(module.own_class.forward, module) if routed else module.forward
    arguments = [getattr(gate.block, extra) for extra in gate.form.extras]
    output: tuple[Any, ...] = call(hidden[None] if gate.form.sequence else hidden, *arguments)
    return output


def run_gate(module: nn.Module, hidden: Tensor, arguments: list[Tensor]) -> tuple[tuple[Any, ...], bool]:
    problem: Exception | None = None
    for sequence in (False, True):
        try:
            output = module.forward(hidden[None].clone() if sequence else hidden.clone(), *arguments)  # without hooks
        except Exception as error:  # any error means that the class does not accept this shape
            problem = error
            continue
        if not isinstance(output, tuple):
            raise NotAGateError(f"{type(module).__name__} returns {type(output).__name__}, not what it chose")
        return output, sequence
    raise NotAGateError(f"{type(module).__name__} cannot be called on hidden states alone ({type(problem).__name__})")


def positions(kind: str, output: tuple[Any, ...], tokens: int) -> tuple[int, int, int]:
    """Positions of logits, weights and indices in the output of a gate of class `kind` for this number of tokens."""
    tensors = [
        (place, item.flatten(0, -2) if item.dim() > 1 else item[:, None])
        for place, item in enumerate(output)
        if isinstance(item, Tensor) and item.dim() > 0
    ]
    tensors = [(place, item) for place, item in tensors if item.shape[0] == tokens]
    integers = [(place, item) for place, item in tensors if not item.is_floating_point() and item.dtype != torch.bool]
    floats = [(place, item) for place, item in tensors if item.is_floating_point()]
    if len(integers) != 1:
        raise NotAGateError(f"{kind} does not return the chosen experts [tokens, k]")
    indices, chosen = integers[0]
    if not chosen.shape[1]:
        raise NotAGateError(f"{kind} chooses no expert: its k is 0")
    if chosen.shape[1] > 1 and bool((chosen.sort(-1).values.diff(dim=-1) == 0).any()):
        raise NotAGateError(f"{kind} returns a mask over experts, not the chosen experts [tokens, k]")
    wide = [place for place, item in floats if item.shape[1] > chosen.shape[1]]
    narrow = [place for place, item in floats if item.shape == chosen.shape]
    if not wide and len(narrow) >= 2:  # k = E: every class returns the logits first
        wide, narrow = narrow[:1], narrow[1:]
    if not wide or not narrow:
        raise NotAGateError(f"{kind} does not return logits [tokens, experts] and weights [tokens, k]")
    return wide[0], narrow[0], indices


def _kind(gate: Gate, hidden: Tensor, arguments: list[Tensor]) -> Kind:
    """The function of the logits to which the weights of all experts are proportional, measured with k = E."""
    if not gate.form.linear:
        return "other"
    module: Any = gate.module
    before = getattr(module, "top_k", None)
    if not isinstance(before, int):
        return "other"
    try:
        module.top_k = gate.num_experts
        output, _ = run_gate(module, hidden, arguments)
        logits, weights, experts = (tensor.float() for tensor in gate.routed(output))
    except Exception:  # the class does not accept k = E
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
