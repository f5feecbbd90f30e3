"""Finds the gates of a Hugging Face MoE by their outputs, and determines how each one is called.

A gate is a sibling module of `experts`. Its forward returns integers [tokens, k] (the chosen experts), floats
[tokens, k] (their weights) and floats [tokens, E] (logits); its name and their order differ between classes. Between
logits and choice (softmax or sigmoid, groups, correction bias, scaling, renormalisation) the class's own code runs.
Classes that return something else are known by name: `layouts`.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pointsman.diagnostics.observe import evaluating
from pointsman.hf.layouts import LAYOUTS, Form, Kind, Layout, NotAGateError, kind_of, positions, read_output
from pointsman.ops.linear import without_autocast

PROBE_TOKENS = 6
BY_TOKEN_ID = "chooses experts by token id, from a table"
TOKEN_IDS = "input_ids"
OTHER_BLOCKS = {"DogeCDMoE": "finds experts of one neuron by product keys: its scores are no product with one weight"}
"""Blocks without a gate: what they do."""


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
        """The block's experts; the block itself, where they are its parameters."""
        experts: nn.Module = getattr(self.block, "experts", self.block)
        return experts

    @property
    def layout(self) -> Layout | None:
        """What its class returns, if that is not logits, weights and indices."""
        return LAYOUTS.get(self.form.layout)

    def routed(self, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [tokens, E], weights [tokens, k] and experts [tokens, k] from the gate's output."""
        return read_output(self.form, self.module, self.block, output)

    def arguments(self, tokens: int) -> list[Tensor]:
        """What its forward takes after the hidden states; token ids 0, 1, …, if it chooses by them."""
        arguments: list[Tensor] = [getattr(self.block, extra) for extra in self.form.extras]
        if self.form.table:
            table = self.module.get_buffer(self.form.table)
            arguments.append(torch.arange(tokens, device=table.device) % len(table))
        return arguments


def owner_of(gate: nn.Module) -> str:
    """Path from the gate to the module with the scoring matrix `weight` [E, dim]; NotAGateError unless there is one."""
    if hasattr(gate, "base_layer"):
        raise NotAGateError("it has an adapter of PEFT; merge_and_unload() gives the model without")
    if any(map(is_parametrized, gate.modules())):
        raise NotAGateError("its weight is computed; torch.nn.utils.parametrize.remove_parametrizations makes it plain")
    own = [name for name, tensor in gate.named_parameters() if tensor.dim() == 2 and name.split(".")[-1] == "weight"]
    if len(own) != 1 or own[0].count(".") > 1:
        raise NotAGateError(f"{type(gate).__name__} scores with {len(own)} matrices, not with one")
    return own[0].rpartition(".")[0]


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(qualified name, module, block) of siblings of `experts` that have a `top_k` or are named as gates are."""
    for layer, block in model.named_modules():
        children = dict(block.named_children())
        for name, child in children.items():
            layout = LAYOUTS.get(type(child).__name__)
            if layout is not None and layout.block:
                known = type(block).__name__ == layout.block
            else:
                known = "experts" in children and (hasattr(child, "top_k") or name in ("gate", "router"))
            if known and name != "experts":
                yield (f"{layer}.{name}" if layer else name), child, block


def find_gates(model: nn.Module) -> list[Gate]:
    """Every gate of a model, in the order of its layers; ValueError, which says why, if it has none."""
    gates, reasons = survey(model)
    if not gates:
        raise ValueError(reasons[0] if reasons else no_gate(model))
    return gates


def no_gate(model: nn.Module) -> str:
    """Why a model without candidates has none."""
    known = sorted({type(module).__name__ for module in model.modules()} & OTHER_BLOCKS.keys())
    other = f"{type(model).__name__}: no gate next to experts: not a known mixture of experts"
    return f"{known[0]} {OTHER_BLOCKS[known[0]]}" if known else other


def survey(model: nn.Module) -> tuple[list[Gate], list[str]]:
    """The gates of a model, and for every other candidate the reason why it is not a gate."""
    gates: list[Gate] = []
    reasons: list[str] = []
    for name, module, block in candidates(model):
        layer = name.rpartition(".")[0]
        known: Form | None = getattr(module, "pointsman_form", None)
        try:
            if any(module is one.module for one in gates):
                raise NotAGateError("it is the gate of another block as well")
            if known is not None:
                router: Any = module.pointsman
                experts = router.num_experts + len(router.virtual)
                gates.append(Gate(name, layer, module, block, experts, router.dim, known))
            else:
                device = next((one.device.type for one in module.parameters()), "meta")
                with without_autocast(device):
                    gates.append(probe(name, layer, module, block))
        except NotAGateError as error:
            reasons.append(f"{name}: {error}")
    return gates, reasons


def table_of(module: nn.Module) -> str:
    """The name of the gate's buffer [V, k] with the experts of each token id; NotAGateError unless there is one."""
    tables = [name for name, one in module.named_buffers() if one.dim() == 2 and not one.is_floating_point()]
    if len(tables) != 1:
        raise NotAGateError(f"{type(module).__name__} {BY_TOKEN_ID} that is not found")
    return tables[0]


def extras_of(module: nn.Module, block: nn.Module) -> tuple[tuple[str, ...], str]:
    """The block's tensors that the gate's forward takes after the hidden states, and its table of token ids or "".

    NotAGateError if it needs an argument that is not a tensor of the block.
    """
    names, table = [], ""
    for parameter in list(inspect.signature(type(module).forward).parameters.values())[2:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if isinstance(getattr(block, parameter.name, None), Tensor):
            names.append(parameter.name)
        elif parameter.name == TOKEN_IDS:
            table = table_of(module)
        elif parameter.default is parameter.empty:
            raise NotAGateError(f"{type(module).__name__} also needs {parameter.name!r}, which is not the block's")
    return tuple(names), table


@torch.no_grad()
def probe(name: str, layer: str, module: nn.Module, block: nn.Module) -> Gate:
    """Determines a gate's form on random vectors; NotAGateError if it is none or not loaded, ValueError if sharded."""
    owner = owner_of(module)
    holder = module.get_submodule(owner)
    weight, bias = holder.get_parameter("weight"), getattr(holder, "bias", None)
    if weight.is_meta:
        raise NotAGateError("its weights are on the meta device; load them first")
    if hasattr(weight, "full_tensor"):
        raise ValueError(f"gate {name!r}: its weights are in shards: call this before fully_shard")
    dim, k = weight.shape[-1], getattr(module, "top_k", None)
    if isinstance(k, int) and k > len(weight):
        raise NotAGateError(f"its k is {k}, of {len(weight)} experts: its config.json is damaged")
    known = type(module).__name__
    if known in LAYOUTS:
        layout, power = LAYOUTS[known], getattr(block, "moe_normalize_expert_weights", None)
        form = Form(owner, layout.sequence, (), 0, 0, 0, layout.kind, True, layout=known, power=power)
        return Gate(name, layer, module, block, weight.shape[0], dim, form)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_TOKENS, dim, generator=generator)
    blank = not bool(weight.any())
    if blank:  # the output of a zero weight does not show the form
        weight.copy_(torch.randn(weight.shape, generator=generator))
    spread = F.linear(hidden.to(weight.device), weight.float()).std()  # softmax and sigmoid differ clearly at std 1
    hidden = (hidden.to(weight.device) / spread.clamp_min(1e-6)).to(weight.dtype)
    extras, table = extras_of(module, block)
    form = Form(owner, False, extras, 0, 0, 0, "other", True, table=table)
    gate = Gate(name, layer, module, block, weight.shape[0], dim, form)
    arguments = gate.arguments(PROBE_TOKENS)
    kept = distinct_table(module, table)
    try:
        output, sequence = run_gate(module, hidden, arguments)
        logits, weights, indices = positions(type(module).__name__, output, PROBE_TOKENS)
        expected = F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        actual = output[logits].reshape(PROBE_TOKENS, -1).float()
        multiplier = _multiplier(module, expected, actual)
        linear, factor = multiplier is not None, 1.0 if multiplier is None else multiplier
        flat = output[logits].dim() == output[weights].dim() == output[indices].dim() == 2
        form = Form(
            owner, sequence, extras, logits, weights, indices, "other", linear, len(output), factor, flat, table=table
        )
        gate = replace(gate, num_experts=int(actual.shape[-1]), form=form)
        return replace(gate, form=replace(form, kind=_kind(gate, hidden, arguments)))
    finally:
        if blank:
            weight.zero_()
        if kept is not None:
            module.get_buffer(table).copy_(kept)


def distinct_table(module: nn.Module, table: str) -> Tensor | None:
    """Gives every token id different experts, in place, and returns the table as it was; None without one."""
    if not table:
        return None
    experts = module.get_buffer(table)
    kept = experts.clone()
    ids, places = (torch.arange(size, device=experts.device) for size in experts.shape)
    experts.copy_((ids[:, None] + places) % max(experts.shape[1], int(getattr(module, "num_experts", 1))))
    return kept


def _multiplier(module: nn.Module, product: Tensor, logits: Tensor) -> float | None:
    """m with logits = m * product: 1, or a number that the module keeps; None if there is none."""
    if logits.shape != product.shape:
        return None
    kept = [value for value in vars(module).values() if isinstance(value, float) and value > 0]
    near = (m for m in (1.0, *kept) if torch.allclose(logits, m * product, rtol=3e-2, atol=3e-2 * min(m, 1)))
    return next(near, None)


def tensor_of(module: nn.Module) -> Tensor:
    """The first parameter, or buffer where all is frozen, that is floating point: it has the device and the dtype."""
    return max(chain(module.parameters(), module.buffers()), key=Tensor.is_floating_point)


def call_gate(gate: Gate) -> Any:
    """The gate's output for zero vectors; for a replaced router, the class's output for equal logits."""
    module: Any = gate.module
    tensor = tensor_of(module)
    routed = hasattr(module, "pointsman_form")
    width = gate.num_experts if routed else gate.dim
    hidden = torch.zeros(PROBE_TOKENS, width, device=tensor.device, dtype=tensor.dtype)
    call = partial(module.own_class.forward, module) if routed else original_forward(module)
    with evaluating(module):
        return call(hidden[None] if gate.form.sequence else hidden, *gate.arguments(PROBE_TOKENS))


def original_forward(module: nn.Module) -> Any:
    """The forward of a module without hooks, and its own where a replay is active."""
    return getattr(module.forward, "replaces", module.forward)


def run_gate(module: nn.Module, hidden: Tensor, arguments: list[Tensor]) -> tuple[Any, bool]:
    """The output for hidden [N, dim] (or as one sequence, if the class wants it so), and whether it was that."""
    problem: Exception | None = None
    for sequence in (False, True):
        try:
            with evaluating(module):
                output = original_forward(module)(hidden[None].clone() if sequence else hidden.clone(), *arguments)
        except Exception as error:  # any error means that the class does not accept this shape
            problem = error
            continue
        if not isinstance(output, tuple) and type(module).__name__ not in LAYOUTS:
            raise NotAGateError(f"{type(module).__name__} returns {type(output).__name__}, not what it chose")
        return output, sequence
    raise NotAGateError(f"{type(module).__name__} cannot be called on hidden states alone ({type(problem).__name__})")


def _kind(gate: Gate, hidden: Tensor, arguments: list[Tensor]) -> Kind:
    """The function of the logits to which the weights of all experts are proportional, measured with k = E."""
    module: Any = gate.module
    before = getattr(module, "top_k", None)
    if not gate.form.linear or not isinstance(before, int):
        return "other"
    try:
        module.top_k = gate.num_experts
        output, _ = run_gate(module, hidden, arguments)
        logits, weights, experts = (tensor.float() for tensor in gate.routed(output))
    except Exception:  # the class does not accept k = E
        return "other"
    finally:
        module.top_k = before
    return kind_of(logits, weights, experts) if weights.shape == logits.shape else "other"
