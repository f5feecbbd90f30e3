"""What a recorded routing costs to serve: experts over devices, and a cache of hot experts, against their optimum.

A placement is chosen on the first half of the tokens and judged on the second, in batches. Its cost is the largest load
of a device over the mean load, 1 at best: the time of a layer whose devices wait for each other.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor

from pointsman.traces.trace import RoutingTrace

Placement = Sequence[Sequence[int]]
"""For each device its experts; an expert on several of them gives each the same share of its tokens."""
COUNTED = 4096
"""Tokens on which `cache` runs."""


def real_experts(trace: RoutingTrace) -> dict[str, int]:
    """Layer -> E without virtual experts, which have no weights: no device holds them."""
    return {layer: number - trace.virtual.get(layer, 0) for layer, number in trace.num_experts.items()}


def contiguous(loads: Tensor, devices: int) -> Placement:
    """Equal runs of experts, the longer ones first: what engines do by default."""
    return [part.tolist() for part in torch.arange(len(loads)).tensor_split(devices)]


def balanced(loads: Tensor, devices: int) -> Placement:
    """The heaviest expert first, each on the device with the least load that has room: as many experts a device."""
    return _packed([(float(load), expert) for expert, load in enumerate(loads)], devices)


def replicated(loads: Tensor, devices: int, spare: int) -> Placement:
    """EPLB (DeepSeek, 2025; its global policy): `spare` copies go one by one to the expert with the most load a copy,
    then `balanced`."""
    copies = [1] * len(loads)
    for _ in range(spare):
        copies[max(range(len(copies)), key=lambda e: float(loads[e]) / copies[e])] += 1
    shares = [(float(load) / n, n) for load, n in zip(loads, copies, strict=True)]
    return _packed([(share, expert) for expert, (share, n) in enumerate(shares) for _ in range(n)], devices)


def _packed(weights: Iterable[tuple[float, int]], devices: int) -> Placement:
    ordered = sorted(weights, reverse=True)
    room = -(-len(ordered) // devices)
    heap = [(0.0, device) for device in range(devices)]
    placed: list[list[int]] = [[] for _ in range(devices)]
    for load, expert in ordered:
        total, device = heappop(heap)
        placed[device].append(expert)
        if len(placed[device]) < room:
            heappush(heap, (total + load, device))
    return placed


def imbalance(loads: Tensor, placement: Placement) -> float:
    """The largest load of a device over the mean, for loads [E]; 1 where nothing was routed."""
    placed = [expert for experts in placement for expert in experts]
    copies = torch.bincount(torch.tensor(placed, dtype=torch.long), minlength=len(loads))
    share = loads.double() / copies.clamp_min(1)
    each = [float(share[list(experts)].sum()) if experts else 0.0 for experts in placement]
    return max(each) * len(each) / total if (total := sum(each)) else 1.0


def bound(loads: Tensor, devices: int) -> float:
    """No placement without copies is below this: the heaviest expert alone, or equal loads."""
    total = float(loads.sum())
    return max(1.0, float(loads.max()) * devices / total) if total else 1.0


def place(trace: RoutingTrace, devices: int, *, spare: int = 0, batch: int = 1024) -> dict[str, dict[str, float]]:
    """layer -> placement -> mean cost over batches of the second half of the tokens.

    Args:
        devices: over which each layer's experts are divided.
        spare: places for copies of experts in a layer, for EPLB.
        batch: tokens that the devices compute at once.

    Raises:
        ValueError: more devices than experts in a layer, numbers out of range, or too few tokens for one batch.
    """
    experts = real_experts(trace)
    least = min(experts.values())
    if not 1 < devices <= least:
        raise ValueError(f"devices={devices}: allowed are 2 to {least}, the experts of a layer")
    if spare < 0 or batch < 1:
        raise ValueError(f"spare={spare}, batch={batch}: allowed are spare from 0 and batch from 1")
    half = trace.tokens // 2
    batch = min(batch, trace.tokens - half)
    if not half:
        raise ValueError(f"the trace has {trace.tokens} tokens; a placement needs at least two")
    found: dict[str, dict[str, float]] = {}
    for layer, chosen in trace.experts.items():
        before = _loads(chosen[:half], experts[layer])
        placements = {"contiguous": contiguous(before, devices), "balanced": balanced(before, devices)}
        if spare:
            placements[f"EPLB, {spare} copies"] = replicated(before, devices, spare)
        starts = range(half, trace.tokens - batch + 1, batch)
        loads = [_loads(chosen[start : start + batch], experts[layer]) for start in starts]
        costs = {name: [imbalance(one, placement) for one in loads] for name, placement in placements.items()}
        costs["bound without copies"] = [bound(one, devices) for one in loads]
        found[layer] = {name: sum(values) / len(values) for name, values in costs.items()}
    return found


def _loads(chosen: Tensor, num_experts: int) -> Tensor:
    """[E]: how many choices each expert got; virtual ones, after the E, are left out."""
    return torch.bincount(chosen[chosen >= 0].long(), minlength=num_experts)[:num_experts]


def cache(trace: RoutingTrace, size: int) -> dict[str, dict[str, float]]:
    """layer -> policy -> share of the choices whose expert was in a cache of `size` experts, a token at a time.

    The policies are least recently used, the most frequent experts of the first half (fixed), and the optimum, which
    knows the future (Belady). Counted over the second half of the first `COUNTED` tokens.

    Raises:
        ValueError: size is no number from 1 to E - 1.
    """
    experts = real_experts(trace)
    least = min(experts.values())
    if not 1 <= size < least:
        raise ValueError(f"size={size}: allowed are 1 to {least - 1}, fewer than the experts of a layer")
    found: dict[str, dict[str, float]] = {}
    for layer, chosen in trace.experts.items():
        rows = chosen[:COUNTED]
        half = len(rows) // 2
        asked = [one for row in rows.tolist() for one in row if 0 <= one < experts[layer]]
        counted = sum(0 <= one < experts[layer] for row in rows[half:].tolist() for one in row)
        first = len(asked) - counted
        hot = set(_loads(rows[:half], experts[layer]).topk(size).indices.tolist())
        hits: Mapping[str, Any] = {
            "least recently used": _hits(asked, first, size, _recent),
            "most frequent": sum(one in hot for one in asked[first:]),
            "optimum": _hits(asked, first, size, _optimal),
        }
        found[layer] = {name: value / max(1, counted) for name, value in hits.items()}
    return found


def _hits(asked: Sequence[int], first: int, size: int, policy: Callable[[Sequence[int], int], Iterable[bool]]) -> int:
    return sum(hit for index, hit in enumerate(policy(asked, size)) if index >= first)


def _recent(asked: Sequence[int], size: int) -> Iterable[bool]:
    held: OrderedDict[int, None] = OrderedDict()
    for one in asked:
        yield one in held
        held[one] = None
        held.move_to_end(one)
        if len(held) > size:
            held.popitem(last=False)


def _optimal(asked: Sequence[int], size: int) -> Iterable[bool]:
    """Belady: of the held experts and the new one, that goes whose next use is the furthest."""
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(asked) - 1, -1, -1):
        uses[asked[index]].append(index)
    held: set[int] = set()
    for one in asked:
        uses[one].pop()
        yield one in held
        held.add(one)
        if len(held) > size:
            held.remove(max(held, key=lambda e: uses[e][-1] if uses[e] else len(asked)))
