"""Which experts a smaller model keeps or merges, by each method."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pointsman.hf.gates import Gate
from pointsman.hf.listen import GateListener
from pointsman.hf.top_k import groups_of
from pointsman_lab.checkpoints.audit.trials import Rows, mean_of, measured
from pointsman_lab.checkpoints.cutting import Keep, cut
from pointsman_lab.checkpoints.outputs import Observed, expert_sums
from pointsman_lab.checkpoints.text import TEXT, Batches

SUPER = 10.0
"""An expert whose largest output is more than SUPER times the median expert's goes last, and is merged last."""
FIRST = 1e9  # added to the score of such an expert
SWAPS = 64  # of `search`
ByLayer = Mapping[str, Tensor]
Groups = dict[str, list[list[int]]]
"""`Keep` of whole lists."""

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
    model: Any, gates: Sequence[Gate], batches: Batches, kept: int, method: str, seed: int = 0, least: int | None = None
) -> tuple[Groups, dict[str, Tensor] | None]:
    """Layer -> the groups that this method makes of its experts; layer -> [E], how often each was chosen.

    Every method but `random` keeps the experts with outputs far above the others' (`SUPER`) as they are; where they
    are too many, its own order decides among them.

    Args:
        kept: experts a layer, on average.
        least: of any layer; None: every layer keeps `kept`.
    """
    least, total = kept if least is None else least, kept * len(gates)
    if method == "random":
        return drawn(gates, {gate.layer: kept for gate in gates}, seed), None
    alike: dict[str, Tensor] = {}

    def observe(layer: str, routing: Any, context: object, hidden: Tensor) -> None:
        logits = routing.logits[found.mask.to(hidden.device)]
        alike[layer] = alike.get(layer, torch.zeros(())) + (logits.double().T @ logits.double()).cpu()

    with expert_sums(gates, everywhere=method == "hc-smoe") as found, GateListener(model, "compress").listen(observe):
        for batch in batches:
            found.mask = (batch.kinds == TEXT).reshape(-1)
            measured(model, [batch])
    counts = {layer: of["count"] for layer, of in found.layers.items()}
    middle = torch.cat([of["peak"] for of in found.layers.values()]).median()
    first = {layer: of["peak"] > SUPER * middle for layer, of in found.layers.items()}
    if method == "hc-smoe":
        everywhere = {layer: of["everywhere"] for layer, of in found.layers.items()}
        return _clusters(everywhere, counts, first, least, total), counts
    if method == "m-smoe":
        heads = _best(gates, counts, least, total, first)
        return {layer: _joined(alike[layer], heads[layer], first[layer]) for layer in heads}, counts
    best = _best(gates, _scores(found, "reap" if method == "search" else method), least, total, first)
    groups = {layer: [[one] for one in experts] for layer, experts in best.items()}
    return _searched(model, gates, groups, batches, seed, least, first) if method == "search" else groups, counts


def drawn(gates: Sequence[Gate], numbers: Mapping[str, int], seed: int) -> Groups:
    """As many experts of each layer, at random."""
    generator = torch.Generator().manual_seed(seed)
    scores = {gate.layer: torch.rand(gate.num_experts, generator=generator) for gate in gates}
    none = {layer: torch.zeros(len(score), dtype=torch.bool) for layer, score in scores.items()}
    best = (_best([gate], scores, numbers[gate.layer], numbers[gate.layer], none) for gate in gates)
    return {layer: [[one] for one in experts] for found in best for layer, experts in found.items()}


def at_random(
    model: nn.Module,
    gates: Sequence[Gate],
    keep: Keep,
    batches: Batches,
    count: int,
    seed: int = 0,
    heal: Callable[[Any], Any] = lambda smaller: smaller,
) -> tuple[list[float], Rows]:
    """The losses of random prunings that keep as many experts of each layer, healed, and the mean of their rows."""
    numbers = {layer: len(groups) for layer, groups in keep.items()}
    prunings = (drawn(gates, numbers, seed + 1 + one) for one in range(count))
    lost = [measured(heal(cut(model, gates, groups)), batches) for groups in prunings]
    mean = [(sum(one[0] for one in each) / count, each[0][1]) for each in zip(*lost, strict=True)]
    return [mean_of(each) for each in lost], mean


def _scores(found: Observed, method: str) -> dict[str, Tensor]:
    """Layer -> [E]; the smallest are pruned."""
    scores = {}
    for layer, of in found.layers.items():
        count = of["count"].clamp_min(1)
        scores[layer] = {
            "reap": of["weighted"] / count,
            "frequency": of["count"],
            "norm": of["weighted"],
            "mean": of["square"] - of["output"].square().sum(1) / count,
        }[method]
    return scores


def _best(gates: Sequence[Gate], scores: ByLayer, least: int, total: int, first: ByLayer) -> dict[str, list[int]]:
    """The `total` experts with the best scores, at least `least` a layer, as many of each of a layer's groups.

    Layers are compared by the share that an expert has of the scores of its layer: their sizes differ with depth.
    Those of `first` (layer -> [E] bool) go before all others.
    """
    order, steps, numbers = {}, [], {}
    for gate in gates:
        score, groups = scores[gate.layer].double(), groups_of(gate)
        share = score / score.masked_fill(first[gate.layer], 0.0).sum().clamp_min(1e-30)
        share = share + FIRST * first[gate.layer]
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


def _joined(alike: Tensor, heads: Sequence[int], first: Tensor) -> list[list[int]]:
    """Every other expert joins that of `heads` whose router logits are most similar (cosine), of `first` at last."""
    norm = alike.diagonal().clamp_min(1e-30).sqrt()
    cosine = alike / torch.outer(norm, norm) - FIRST * first
    groups = {head: [head] for head in heads}
    for one in range(len(norm)):
        if one not in groups:
            groups[max(heads, key=lambda head: float(cosine[one, head]))].append(one)
    return list(groups.values())


def _clusters(outputs: ByLayer, counts: ByLayer, first: ByLayer, least: int, total: int) -> Groups:
    """Agglomerative clustering of mean outputs [E, dim] with average linkage, the most frequent member first.

    The two nearest clusters of any layer with more than `least` are joined, distances as a share of the layer's mean;
    those with experts of `first` at last.
    """
    far = {layer: torch.cdist(each, each) for layer, each in outputs.items()}
    groups = {layer: [[one] for one in range(len(each))] for layer, each in outputs.items()}

    def nearest(layer: str) -> tuple[float, str, int, int]:
        of, apart = groups[layer], far[layer] / far[layer].mean().clamp_min(1e-30)
        apart = apart + FIRST * (first[layer][:, None] | first[layer])
        return min((float(apart[a][:, b].mean()), layer, i, j) for i, a in enumerate(of) for j, b in enumerate(of[:i]))

    best = {layer: nearest(layer) for layer, of in groups.items() if len(of) > least}
    for _ in range(sum(map(len, groups.values())) - total):
        _, layer, i, j = min(best.values())
        groups[layer][j] += groups[layer].pop(i)
        if len(groups[layer]) > least:
            best[layer] = nearest(layer)
        else:
            best.pop(layer)
    for layer, of in groups.items():
        groups[layer] = sorted(sorted(group, key=lambda one: (-float(counts[layer][one]), one)) for group in of)
    return groups


def _searched(
    model: nn.Module, gates: Sequence[Gate], groups: Groups, batches: Batches, seed: int, least: int, first: ByLayer
) -> Groups:
    """`SWAPS` random swaps of a kept and a pruned expert, each kept where the loss on the text falls.

    They are of one layer and group; where a layer has more than `least` experts, the other one may be of any layer.
    An expert of `first` stays.
    """
    generator = torch.Generator().manual_seed(seed)

    def one_of(found: Sequence[Any]) -> Any:
        return found[int(torch.randint(len(found), (1,), generator=generator))]

    best = mean_of(measured(cut(model, gates, groups), batches))
    for _ in range(SWAPS):
        gate = one_of(gates)
        going = [group for group in groups[gate.layer] if not first[gate.layer][group[0]]]
        if not going:
            continue
        out, size = one_of(going), gate.num_experts // groups_of(gate)
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
