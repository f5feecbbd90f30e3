"""Which experts a smaller model keeps or merges, by each method, and the smaller model itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.hf.audit.trials import mean_of, measured
from pointsman.hf.counterpart import correction_bias
from pointsman.hf.experts import Observed, expert_sums, why_unreadable
from pointsman.hf.gates import Gate, find_gates
from pointsman.hf.listen import GateListener
from pointsman.hf.text import TEXT, TextBatch
from pointsman.hf.top_k import gate_top_k, max_top_k
from pointsman.hf.uneven import uneven, with_experts

NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
"""Names of the number of experts in configurations."""
SUPER = 10.0
"""An expert whose largest output is more than SUPER times the median expert's is always kept."""
SWAPS = 64  # of `search`

Keep = Mapping[str, Sequence[Sequence[int]]]
"""Layer -> groups of experts; each becomes one expert, whose router row is that of the group's first."""
METHODS = {
    "reap": "smallest mean of weight times output norm over the tokens that chose the expert (arXiv 2510.13999)",
    "frequency": "fewest tokens",
    "norm": "smallest sum of weight times output norm",
    "mean": "smallest sum of squares about the expert's mean output, which replaces it in MoNE",
    "hc-smoe": "merged: clusters of mean outputs over all tokens, average linkage, weighted by frequency",
    "m-smoe": "merged into the most frequent ones, by similarity of router logits, hidden units aligned, weighted by "
    "frequency (arXiv 2310.01334)",
    "search": "the prunings of reap, then swaps of an expert in a layer that lower the loss",
    "random": "drawn at random",
}


@torch.no_grad()
def plan(
    model: nn.Module,
    gates: Sequence[Gate],
    batches: Sequence[TextBatch],
    kept: int,
    method: str,
    seed: int = 0,
    least: int | None = None,
) -> tuple[dict[str, list[list[int]]], dict[str, Tensor] | None]:
    """Layer -> the groups that this method makes of its experts; layer -> [E], how often each was chosen.

    Args:
        kept: experts a layer, on average.
        least: of any layer; None: every layer keeps `kept`.
    """
    least, total = kept if least is None else least, kept * len(gates)
    if method == "random":
        return drawn(gates, {gate.layer: kept for gate in gates}, seed), None
    alike: dict[str, Tensor] = {}

    def observe(layer: str, routing: Any, context: object, hidden: Tensor) -> None:
        logits = routing.logits[found.mask.to(hidden.device)] if found.mask is not None else routing.logits
        alike[layer] = alike.get(layer, torch.zeros(())) + (logits.double().T @ logits.double()).cpu()

    with expert_sums(gates, everywhere=method == "hc-smoe") as found, GateListener(model, "compress").listen(observe):
        for batch in batches:
            found.mask = (batch.kinds == TEXT).reshape(-1)
            measured(model, [batch])
    counts = {layer: of.count for layer, of in found.layers.items()}
    if method == "hc-smoe":
        return _clusters({layer: of.everywhere for layer, of in found.layers.items()}, counts, least, total), counts
    if method == "m-smoe":
        heads = _best(gates, counts, least, total)
        return {layer: _joined(alike[layer], heads[layer]) for layer in heads}, counts
    best = _best(gates, _scores(gates, found, "reap" if method == "search" else method), least, total)
    groups = {layer: [[one] for one in experts] for layer, experts in best.items()}
    return _searched(model, gates, groups, batches, seed, least) if method == "search" else groups, counts


def drawn(gates: Sequence[Gate], numbers: Mapping[str, int], seed: int) -> dict[str, list[list[int]]]:
    """As many experts of each layer, at random."""
    generator = torch.Generator().manual_seed(seed)
    scores = {gate.layer: torch.rand(gate.num_experts, generator=generator) for gate in gates}
    best = (_best([gate], scores, numbers[gate.layer], numbers[gate.layer]) for gate in gates)
    return {layer: [[one] for one in experts] for found in best for layer, experts in found.items()}


def _scores(gates: Sequence[Gate], found: Observed, method: str) -> dict[str, Tensor]:
    """Layer -> [E]; the smallest are pruned."""
    scores = {}
    peaks = torch.cat([found.layers[gate.layer].peak for gate in gates])
    for gate in gates:
        of = found.layers[gate.layer]
        count = of.count.clamp_min(1)
        score = {
            "reap": of.weighted / count,
            "frequency": of.count,
            "norm": of.weighted,
            "mean": of.square - of.output.square().sum(1) / count,
        }[method]
        scores[gate.layer] = torch.where(of.peak > SUPER * peaks.median(), float("inf"), score)
    return scores


def why_uncut(gate: Gate) -> str | None:
    """Why the experts of this layer cannot be cut; None if they can."""
    name = f"its gate {type(gate.module).__name__}"
    if gate.layout is not None or gate.form.table or hasattr(gate.module, "pointsman"):
        return f"{name} is not a plain one"
    if reason := why_unreadable(gate):
        return reason
    scored = len(gate.module.get_submodule(gate.form.owner).get_parameter("weight"))
    return None if scored == gate.num_experts else f"{name} scores {scored} experts, of which some are shared"


def groups_of(gate: Gate) -> int:
    """The number of groups of experts that limit the choice; each keeps the same number of experts."""
    found = (getattr(gate.module, name, None) for name in ("num_group", "n_group"))
    return next((number for number in found if isinstance(number, int)), 1)


def fewest(gate: Gate) -> int:
    """The fewest experts with which a gate can still choose its k."""
    groups, k = groups_of(gate), gate_top_k(gate).value
    reached = max_top_k(gate) * groups // gate.num_experts  # groups that a token may use
    return k if groups == 1 else groups * max(2, math.ceil(k / reached))  # a group's score is that of its best two


def _best(gates: Sequence[Gate], scores: Mapping[str, Tensor], least: int, total: int) -> dict[str, list[int]]:
    """The `total` experts with the best scores, at least `least` a layer, as many of each of a layer's groups.

    Layers are compared by the share that an expert has of the scores of its layer: their sizes differ with depth.
    """
    order, steps, numbers = {}, [], {}
    for gate in gates:
        score, groups = scores[gate.layer].double(), groups_of(gate)
        share = score / score.masked_fill(score.isinf(), 0.0).sum().clamp_min(1e-30)
        ranked = share.view(groups, -1).sort(dim=-1, descending=True, stable=True)
        order[gate.layer] = ranked.indices + torch.arange(groups)[:, None] * (len(score) // groups)
        numbers[gate.layer] = least // groups
        worth = ranked.values.sum(0).tolist()
        steps += [(-worth[place] / groups, place, gate.layer, groups) for place in range(least // groups, len(worth))]
    left = total - least * len(gates)
    for _, _, layer, groups in sorted(steps):
        if groups <= left:
            numbers[layer] += 1
            left -= groups
    return {layer: sorted(ranked[:, : numbers[layer]].flatten().tolist()) for layer, ranked in order.items()}


def _joined(alike: Tensor, heads: Sequence[int]) -> list[list[int]]:
    """Every other expert joins that of `heads` whose router logits are most similar (cosine)."""
    norm = alike.diagonal().clamp_min(1e-30).sqrt()
    cosine = alike / torch.outer(norm, norm)
    groups = {head: [head] for head in heads}
    for one in range(len(norm)):
        if one not in groups:
            groups[max(heads, key=lambda head: float(cosine[one, head]))].append(one)
    return list(groups.values())


def _clusters(
    outputs: Mapping[str, Tensor], counts: Mapping[str, Tensor], least: int, total: int
) -> dict[str, list[list[int]]]:
    """Agglomerative clustering of mean outputs [E, dim] with average linkage, the most frequent member first.

    The two nearest clusters of any layer with more than `least` are joined, distances as a share of the layer's mean.
    """
    far = {layer: torch.cdist(each, each) for layer, each in outputs.items()}
    groups = {layer: [[one] for one in range(len(each))] for layer, each in outputs.items()}

    def nearest(layer: str) -> tuple[float, str, int, int]:
        of, apart = groups[layer], far[layer] / far[layer].mean().clamp_min(1e-30)
        return min((float(apart[a][:, b].mean()), layer, i, j) for i, a in enumerate(of) for j, b in enumerate(of[:i]))

    best = {layer: nearest(layer) for layer, of in groups.items() if len(of) > least}
    for _ in range(sum(map(len, groups.values())) - total):
        _, layer, i, j = min(best.values())
        groups[layer][j] += groups[layer].pop(i)
        if len(groups[layer]) > least:
            best[layer] = nearest(layer)
        else:
            best.pop(layer)
    return {
        layer: sorted(sorted(group, key=lambda one: (-float(counts[layer][one]), one)) for group in of)
        for layer, of in groups.items()
    }


def _searched(
    model: nn.Module,
    gates: Sequence[Gate],
    groups: dict[str, list[list[int]]],
    batches: Sequence[TextBatch],
    seed: int,
    least: int,
) -> dict[str, list[list[int]]]:
    """`SWAPS` random swaps of a kept and a pruned expert, each kept where the loss on the text falls.

    They are of one layer and group; where a layer has more than `least` experts, the other one may be of any layer.
    """
    generator = torch.Generator().manual_seed(seed)

    def one_of(found: Sequence[Any]) -> Any:
        return found[int(torch.randint(len(found), (1,), generator=generator))]

    best = mean_of(measured(cut(model, gates, groups), batches))
    for _ in range(SWAPS):
        gate = one_of(gates)
        out, size = one_of(groups[gate.layer]), gate.num_experts // groups_of(gate)
        free = len(groups[gate.layer]) > least and groups_of(gate) == 1
        pruned = [
            (other.layer, one)
            for other in (gates if free else [gate])
            for one in range(other.num_experts)
            if [one] not in groups[other.layer] and (free or one // size == out[0] // size)
        ]
        if not pruned:
            continue
        layer, into = one_of(pruned)
        tried = {**groups, gate.layer: [one for one in groups[gate.layer] if one != out]}
        tried[layer] = sorted([*tried[layer], [into]])
        loss = mean_of(measured(cut(model, gates, tried), batches))
        if loss < best:
            best, groups = loss, tried
    return groups


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
        for name in [one for one in state if one.startswith(f"{names[id(gate.module)]}.")] + (
            [] if bias is None or id(bias) not in tensors else [tensors[id(bias)]]
        ):
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
        told = " ".join(str(error).split())[:160]
        raise ValueError(
            f"compress: {type(model).__name__} does not take {kept} experts from its configuration: {told}"
        ) from None
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

    first, gated = ("gate_up_proj" if experts.has_gate else "up_proj"), experts.has_gate
    units = []
    for name in (first, f"{first}_bias", "down_proj"):
        if (place := f"{home}.{name}") not in state:
            continue
        tensor = state[place] = state[place].clone()
        if name == "down_proj":
            units.append(tensor if experts.is_transposed else tensor.transpose(1, 2))
            continue
        rows = tensor.transpose(1, 2) if experts.is_transposed and tensor.dim() == 3 else tensor
        if gated:
            size = rows.shape[1] // 2
            rows = (
                rows.view(len(rows), 2, size, *rows.shape[2:]).transpose(1, 2)
                if experts.is_concatenated
                else rows.view(len(rows), size, 2, *rows.shape[2:])
            )
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
def distil(model: Any, smaller: Any, batches: Sequence[TextBatch], steps: int) -> None:
    """Trains gates and experts of the smaller model towards the distributions of the original."""
    trained = [p for gate in find_gates(smaller) for home in (gate.module, gate.experts) for p in home.parameters()]
    for parameter in smaller.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
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
    smaller.requires_grad_(False)
