"""The smaller model: which classes can be cut, the experts that are kept or merged, and its distillation."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pointsman.hf.counterpart import correction_bias
from pointsman.hf.gates import Gate, find_gates, survey
from pointsman.hf.top_k import gate_top_k, groups_of, max_top_k
from pointsman.hf.uneven import uneven, with_experts
from pointsman_lab.checkpoints.outputs import why_unreadable
from pointsman_lab.checkpoints.text import Batches

NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Names of the number of experts in configurations."""
Keep = Mapping[str, Sequence[Sequence[int]]]
"""Layer -> groups of experts; each becomes one expert, whose router row is that of the group's first."""


def cuttable(model: nn.Module) -> tuple[list[Gate], int, int, int]:
    """The gates; of every layer the experts, the fewest that it needs, and the groups that limit the choice.

    Raises:
        ValueError: why the experts of this model cannot be cut.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"compress: {kind} is no class of transformers: take the model in it (PEFT: merge_and_unload)")
    gates, reasons = survey(model)
    if reasons or not gates:
        raise ValueError(f"compress: {kind}: {(reasons or ['no gate next to experts'])[0]}")
    for gate in gates:
        if reason := _uncut(gate):
            raise ValueError(f"compress: {kind}, layer {gate.layer!r}: {reason}")
    if len({gate.num_experts for gate in gates}) > 1:
        raise ValueError(f"compress: {kind}: its layers differ in their number of experts: it is compressed already")
    number, least, groups = gates[0].num_experts, max(map(_fewest, gates)), max(map(groups_of, gates))
    if least >= number:
        chosen = str(gate_top_k(gates[0]).value) + ("" if groups == 1 else f" from {groups} groups")
        raise ValueError(f"compress: {kind} needs all {number} experts of a layer: it chooses {chosen}")
    return gates, number, least, groups


def _uncut(gate: Gate) -> str | None:
    """Why the experts of this layer cannot be cut; None if they can."""
    name, router = f"its gate {type(gate.module).__name__}", getattr(gate.module, "pointsman", None)
    if router is not None:
        return f"its gate is the router {router.spec!r}; materialize(model) first"
    if gate.layout is not None or gate.form.table:
        return f"{name} is not a plain one"
    if reason := why_unreadable(gate):
        return reason
    scored = len(gate.module.get_submodule(gate.form.owner).get_parameter("weight"))
    return None if scored == gate.num_experts else f"{name} scores {scored} experts, of which some are shared"


def _fewest(gate: Gate) -> int:
    """The fewest experts with which a gate can still choose its k."""
    groups, k = groups_of(gate), gate_top_k(gate).value
    reached = max_top_k(gate) * groups // gate.num_experts  # groups that a token may use
    return k if groups == 1 else groups * max(2, math.ceil(k / reached))  # a group's score is that of its best two


@torch.no_grad()
def cut(
    model: Any, gates: Sequence[Gate], keep: Keep, weights: Mapping[str, Tensor] | None = None, align: bool = False
) -> Any:
    """A model with one expert for each group; it shares all other tensors with `model`.

    It is of the same class, or, where layers differ in their number, of the class `uneven` of it.

    Args:
        weights: layer -> [E], how much each expert counts in the mean of its group; None: all the same.
        align: before a mean, hidden units are put in the order in which they are most like those of the group's first.

    Raises:
        ValueError: the class does not take another number of experts from its configuration.
    """
    kind: Any = type(model)
    number, state = gates[0].num_experts, model.state_dict()
    names = {id(module): name for name, module in model.named_modules()}
    tensors = {id(one): name for name, one in [*model.named_parameters(), *model.named_buffers()]}
    for gate in gates:
        groups = keep[gate.layer]
        first, experts = torch.tensor([group[0] for group in groups]), names[id(gate.experts)]
        if align:
            _align(gate.experts, experts, state, groups)
        merged = len(groups) < sum(map(len, groups))
        for name in [one for one in state if one.startswith(f"{experts}.") and state[one].shape[:1] == (number,)]:
            share = None if weights is None else weights[gate.layer]
            state[name] = _merged(state[name], groups, share) if merged else state[name][first.to(state[name].device)]
        bias = correction_bias(gate)
        scored = [one for one in state if one.startswith(f"{names[id(gate.module)]}.")]
        scored += [tensors[id(bias)]] if id(bias) in tensors else []
        for name in scored:
            at = state[name].shape.index(number) if number in state[name].shape[:2] else None
            if at is not None and (at == 0 or state[name].shape[0] == 1):
                state[name] = state[name].index_select(at, first.to(state[name].device))
    layers = {gate.layer: len(keep[gate.layer]) for gate in gates}
    kept = max(layers.values())
    homes = (model.config, getattr(model.config, "text_config", None))
    fields = [name for name in NUMBERS if any(getattr(one, name, None) == number for one in homes)]
    config = with_experts(model.config, fields, kept)
    if min(layers.values()) < kept:
        config.uneven_experts, kind = {"fields": fields, "layers": layers}, uneven(kind)
        for one in (config, getattr(config, "text_config", None)):
            if one is not None and getattr(one, "output_router_logits", False):
                one.output_router_logits = False  # transformers' balance loss joins the layers' logits
    with torch.device("meta"):
        smaller = kind(config)
    try:
        smaller.load_state_dict(state, assign=True)
    except RuntimeError as error:
        told = f"does not take {kept} experts from its configuration: {' '.join(str(error).split())[:160]}"
        raise ValueError(f"compress: {type(model).__name__} {told}") from None
    old = dict(model.named_buffers())
    for name, buffer in smaller.named_buffers():
        if buffer.is_meta:  # not in state_dict: recomputed by no one
            home, _, last = name.rpartition(".")
            smaller.get_submodule(home).register_buffer(last, old[name], persistent=False)
    smaller.tie_weights()
    smaller.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return smaller.eval()


def _align(experts: Any, home: str, state: dict[str, Tensor], groups: Sequence[Sequence[int]]) -> None:
    """Permutes the hidden units of each merged expert to the largest sum of products of weights, as M-SMoE does."""
    from scipy.optimize import linear_sum_assignment

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    units = []
    for name in (first, f"{first}_bias", "down_proj"):
        if (place := f"{home}.{name}") not in state:
            continue
        tensor = state[place] = state[place].clone()
        if name == "down_proj":
            units.append(tensor if experts.is_transposed else tensor.transpose(1, 2))
            continue
        rows = tensor.transpose(1, 2) if experts.is_transposed and tensor.dim() == 3 else tensor
        if experts.has_gate:
            rows = torch.unflatten(rows, 1, (2, -1) if experts.is_concatenated else (-1, 2))
            rows = rows.transpose(1, 2) if experts.is_concatenated else rows
        units.append(rows)
    for head, one in ((group[0], one) for group in groups for one in group[1:]):
        alike = torch.stack([of[head].flatten(1).double() @ of[one].flatten(1).double().T for of in units]).sum(0)
        order = torch.from_numpy(linear_sum_assignment(alike.cpu().numpy(), maximize=True)[1])
        for of in units:
            of[one] = of[one][order.to(of.device)]


def _merged(tensor: Tensor, groups: Sequence[Sequence[int]], weights: Tensor | None) -> Tensor:
    """The weighted mean of each group, [groups, …]."""
    rows = []
    for group in groups:
        share = torch.ones(len(group)) if weights is None else weights[list(group)].float().clamp_min(1e-9)
        share = (share / share.sum()).to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
        rows.append((tensor[list(group)].float() * share).sum(0).to(tensor.dtype))
    return torch.stack(rows)


@torch.enable_grad()
def distil(model: Any, smaller: Any, batches: Batches, steps: int) -> Any:
    """The smaller model, its gates and experts trained in float32 towards the distributions of the original."""
    if not steps:
        return smaller
    trained = [p for gate in find_gates(smaller) for home in (gate.module, gate.experts) for p in home.parameters()]
    before = [(one, one.data, one.requires_grad) for one in smaller.parameters()]
    buffers = [(one, name, of) for one in smaller.modules() for name, of in one.named_buffers(recurse=False)]
    smaller.float().requires_grad_(False)
    shared = {one.data_ptr() for one in model.parameters()}
    for parameter in trained:
        parameter.requires_grad_(True)
        if parameter.data_ptr() in shared:  # of a gate, without an axis of experts: the original keeps it
            parameter.data = parameter.data.clone()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    device = next(model.parameters()).device
    for step in range(steps):
        batch = batches[step % len(batches)]
        given = {"input_ids": batch.ids.to(device), "attention_mask": batch.mask.long().to(device)}
        with torch.no_grad():
            wanted = F.log_softmax(model(**given).logits[batch.mask].float(), -1)
        told = F.log_softmax(smaller(**given).logits[batch.mask].float(), -1)
        loss = F.kl_div(told, wanted, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for parameter, data, learns in before:  # the others share the original's memory again
        parameter.data = parameter.data.to(data.dtype) if parameter.grad is not None else data
        parameter.grad = None
        parameter.requires_grad_(learns)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    return smaller
