"""Which experts a smaller model keeps or merges, by each method, and the smaller model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pointsman.hf.audit.trials import mean_of, measured
from pointsman.hf.expert_sums import Observed, expert_sums
from pointsman.hf.gates import Gate, find_gates
from pointsman.hf.listen import GateListener
from pointsman.hf.text import TEXT, TextBatch

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
    model: nn.Module, gates: Sequence[Gate], batches: Sequence[TextBatch], kept: int, method: str, seed: int = 0
) -> tuple[dict[str, list[list[int]]], dict[str, Tensor] | None]:
    """Layer -> the groups that this method makes of its experts; layer -> [E], how often each was chosen."""
    if method == "random":
        generator = torch.Generator().manual_seed(seed)
        return {
            g.layer: _alone(torch.rand(g.num_experts, generator=generator), kept, groups_of(g)) for g in gates
        }, None
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
        return {layer: _clusters(of.everywhere, of.count, kept) for layer, of in found.layers.items()}, counts
    if method == "m-smoe":
        return {layer: _joined(alike[layer], of.count, kept) for layer, of in found.layers.items()}, counts
    scores = _scores(gates, found, "reap" if method == "search" else method)
    groups = {g.layer: _alone(scores[g.layer], kept, groups_of(g)) for g in gates}
    return _searched(model, gates, groups, batches, seed) if method == "search" else groups, counts


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


def groups_of(gate: Gate) -> int:
    """The number of groups of experts that limit the choice; each keeps the same number of experts."""
    found = (getattr(gate.module, name, None) for name in ("num_group", "n_group"))
    return next((number for number in found if isinstance(number, int)), 1)


def _alone(score: Tensor, kept: int, groups: int) -> list[list[int]]:
    best = score.view(groups, -1).topk(kept // groups).indices + torch.arange(groups)[:, None] * (len(score) // groups)
    return [[one] for one in sorted(best.flatten().tolist())]


def _joined(alike: Tensor, count: Tensor, kept: int) -> list[list[int]]:
    """Every expert joins the most frequent one whose router logits are most similar (cosine)."""
    norm = alike.diagonal().clamp_min(1e-30).sqrt()
    cosine = alike / torch.outer(norm, norm)
    heads = sorted(count.topk(kept).indices.tolist())
    groups = {head: [head] for head in heads}
    for one in range(len(count)):
        if one not in groups:
            groups[max(heads, key=lambda head: float(cosine[one, head]))].append(one)
    return list(groups.values())


def _clusters(outputs: Tensor, count: Tensor, kept: int) -> list[list[int]]:
    """Agglomerative clustering of mean outputs [E, dim] with average linkage, the most frequent member first."""
    groups = [[one] for one in range(len(outputs))]
    far = torch.cdist(outputs, outputs)
    while len(groups) > kept:
        pairs = ((float(far[a][:, b].mean()), i, j) for i, a in enumerate(groups) for j, b in enumerate(groups[:i]))
        _, i, j = min(pairs)
        groups[j] += groups.pop(i)
    return sorted(sorted(group, key=lambda one: (-float(count[one]), one)) for group in groups)


def _searched(
    model: nn.Module, gates: Sequence[Gate], groups: dict[str, list[list[int]]], batches: Sequence[TextBatch], seed: int
) -> dict[str, list[list[int]]]:
    """`SWAPS` random swaps of a kept and a pruned expert, each kept where the loss on the text falls."""
    generator = torch.Generator().manual_seed(seed)
    best = mean_of(measured(cut(model, gates, groups), batches))
    for _ in range(SWAPS):
        gate = gates[int(torch.randint(len(gates), (1,), generator=generator))]
        kept = [group[0] for group in groups[gate.layer]]
        size = gate.num_experts // groups_of(gate)
        out = kept[int(torch.randint(len(kept), (1,), generator=generator))]
        pruned = [one for one in range(gate.num_experts) if one not in kept and one // size == out // size]
        into = pruned[int(torch.randint(len(pruned), (1,), generator=generator))]
        tried = {**groups, gate.layer: [[one] for one in sorted({*kept, into} - {out})]}
        loss = mean_of(measured(cut(model, gates, tried), batches))
        if loss < best:
            best, groups = loss, tried
    return groups


@torch.no_grad()
def cut(
    model: Any, gates: Sequence[Gate], keep: Keep, weights: Mapping[str, Tensor] | None = None, align: bool = False
) -> Any:
    """A model of the same class with one expert for each group; it shares all other tensors with `model`.

    Args:
        weights: layer -> [E], how much each expert counts in the mean of its group; None: all the same.
        align: before a mean, hidden units are put in the order in which they are most like those of the group's first.

    Raises:
        ValueError: the class does not take another number of experts from its configuration.
    """
    kind, number, kept = type(model).__name__, gates[0].num_experts, len(keep[gates[0].layer])
    state = model.state_dict()
    names = {id(module): name for name, module in model.named_modules()}
    for gate in gates:
        first = torch.tensor([group[0] for group in keep[gate.layer]])
        experts = names[id(gate.experts)]
        if align:
            _align(gate.experts, experts, state, keep[gate.layer])
        for home in (names[id(gate.module)], experts):
            for name in [one for one in state if one.startswith(f"{home}.") and state[one].shape[:1] == (number,)]:
                tensor = state[name]
                if home == experts and len(keep[gate.layer]) < sum(map(len, keep[gate.layer])):
                    state[name] = _merged(tensor, keep[gate.layer], None if weights is None else weights[gate.layer])
                else:
                    state[name] = tensor.index_select(0, first.to(tensor.device))
    config = copy.deepcopy(model.config)
    for one in (config, getattr(config, "text_config", None)):
        for name in NUMBERS:
            if one is not None and getattr(one, name, None) == number:
                setattr(one, name, kept)
    with torch.device("meta"):
        smaller = type(model)(config)
    try:
        smaller.load_state_dict(state, assign=True)
    except RuntimeError as error:
        told = " ".join(str(error).split())[:160]
        raise ValueError(f"compress: {kind} does not take {kept} experts from its configuration: {told}") from None
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
