"""BASE layers (Lewis et al. 2021, arXiv 2103.16716): training assigns tokens to experts in balance, at best score.

    maximise sum_ne x_ne z_ne,   x in {0, 1},   sum_e x_ne = k,   sum_n x_ne = floor or ceil of N k / E

A minimum-cost flow by successive shortest paths. For any column prices, the k best experts of z - price are an optimum
for the loads that they have. Prices near the dual optimum give loads that are nearly right; each shortest path between
experts then moves one token of an expert with too many along to one with too few, and keeps the optimum. Scores are
rounded to whole numbers first, so that no path depends on rounding: the value is within N k (max - min) 2^-40 of the
optimum. Nothing of size N x N is built.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pointsman.ops.linear import orthogonal_
from pointsman.ops.selection import top_k
from pointsman.routers.frame.entries import LayerSpec, register_router
from pointsman.routers.frame.stage_values import Scores
from pointsman.routers.frame.stages import Selector, Sigmoid, Stages
from pointsman.routers.papers.topk import LinearScorer
from pointsman.routing import RoutingContext

Array = NDArray[np.int64]
GAIN = 0.1
LEVELS = 2.0**40
FAR = np.int64(2**61)  # no edge; two of them do not overflow
SWEEPS = 16


@torch.library.custom_op("pointsman::balanced_assignment", mutates_args=())
def balanced_assignment(scores: Tensor, mask: Tensor | None, k: int) -> Tensor:
    """Experts [G, N, k] of the balanced assignment of each group, each token's best score first.

    Args:
        scores: [G, N, E]; -inf and NaN count as the group's smallest finite score, inf as its largest.
        mask: [G, N] bool, True for a real token; the others take no place and get expert -1.
        k: experts a token, up to E.
    """
    groups, tokens, _ = scores.shape
    experts = torch.full((groups, tokens, k), -1)
    values = scores.detach().cpu().double()
    for group in range(groups):
        real = torch.arange(tokens) if mask is None else mask[group].cpu().nonzero()[:, 0]
        if len(real):
            experts[group, real] = torch.from_numpy(assign(_whole_numbers(values[group, real]), k))
    return experts.to(scores.device)


@balanced_assignment.register_fake
def _(scores: Tensor, mask: Tensor | None, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:2], k), dtype=torch.int64)


def _whole_numbers(scores: Tensor) -> Array:
    finite = scores[scores.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    scores = torch.nan_to_num(scores, low, high, low)
    found: Array = ((scores - low) * (LEVELS / max(high - low, 1e-300))).round().long().numpy()
    return found


def assign(scores: Array, k: int) -> Array:
    """Experts [N, k] of the largest sum of the scores [N, E], N >= 1, under equal loads; each row best first."""
    if k < scores.shape[1]:
        member = _best(scores - _prices(scores, k), k)
        _balance(scores, member)
        scores = np.where(member, scores, -FAR)
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def _best(scores: Array, k: int) -> NDArray[np.bool_]:
    """[N, E]: each row's k largest; of equal ones the lowest index."""
    member = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(member, np.argsort(-scores, axis=1, kind="stable")[:, :k], True, axis=1)
    return member


def _prices(scores: Array, k: int) -> Array:
    """[E]: prices of the dual, halfway in each sweep to where about N k / E tokens pass."""
    tokens, num_experts = scores.shape
    share = tokens * k // num_experts
    prices = np.zeros(num_experts, dtype=np.int64)
    for _ in range(SWEEPS):
        net = scores - prices
        best = np.partition(net, [num_experts - 1 - k, num_experts - k], axis=1)[:, num_experts - 1 - k :]
        # a token takes an expert whose score is above the k-th largest of the others
        margins = scores - np.where(net >= best[:, 1:2], best[:, :1], best[:, 1:2])
        around = np.partition(margins, [tokens - 1 - share, tokens - max(share, 1)], axis=0)
        prices = (prices + (around[tokens - 1 - share] + around[tokens - max(share, 1)]) // 2) // 2
    return prices


def _balance(scores: Array, member: NDArray[np.bool_]) -> None:
    """Moves tokens, in place, until loads are floor or ceil of their mean and no exchange of tokens is better."""
    num_experts = scores.shape[1]
    loads = member.sum(0)
    floor = int(loads.sum()) // num_experts
    ceil = -(-int(loads.sum()) // num_experts)
    costs = np.empty((num_experts, num_experts), dtype=np.int64)
    movers = np.empty((num_experts, num_experts), dtype=np.int64)
    changed = range(num_experts)
    while True:
        for expert in changed:
            _edges(scores, member, expert, costs, movers)
        if (loads > ceil).any():
            path, _ = _shortest(costs, loads > ceil, loads < ceil)
        elif (loads < floor).any():
            path, _ = _shortest(costs, loads > floor, loads < floor)
        elif ceil > floor:  # which experts get one more: a path that pays
            path, cost = _shortest(costs, loads == ceil, loads == floor)
            if cost >= 0:
                return
        else:
            return
        moved = [int(movers[start, stop]) for start, stop in pairwise(path)]
        touched = member[moved].any(0)
        for token, (start, stop) in zip(moved, pairwise(path), strict=True):
            member[token, start], member[token, stop] = False, True
        touched |= member[moved].any(0)
        loads[path[0]] -= 1
        loads[path[-1]] += 1
        changed = np.flatnonzero(touched)  # type: ignore[assignment]


def _edges(scores: Array, member: NDArray[np.bool_], expert: int, costs: Array, movers: Array) -> None:
    """Row `expert` of costs and movers: the least loss of moving one of its tokens to each expert, and which token."""
    tokens = np.flatnonzero(member[:, expert])
    costs[expert] = FAR
    if len(tokens):
        loss = scores[tokens, expert, None] - scores[tokens]
        loss[member[tokens]] = FAR
        best = loss.argmin(0)
        costs[expert] = loss[best, np.arange(len(best))]
        movers[expert] = tokens[best]


def _shortest(costs: Array, sources: NDArray[Any], sinks: NDArray[Any]) -> tuple[list[int], int]:
    """The cheapest path from a source to a sink, and its cost (Bellman and Ford); there is no negative cycle."""
    every = np.arange(len(costs))
    distance = np.where(sources, np.int64(0), FAR)
    before = np.full(len(costs), -1)
    while True:
        through = np.where((costs < FAR) & (distance < FAR)[:, None], distance[:, None] + costs, FAR)
        nearest = through.argmin(0)
        shorter = through[nearest, every] < distance
        if not shorter.any():
            break
        distance = np.where(shorter, through[nearest, every], distance)
        before = np.where(shorter, nearest, before)
    end = int(np.where(sinks, distance, FAR).argmin())
    path = [end]
    while before[path[0]] >= 0:
        path.insert(0, int(before[path[0]]))
    return path, int(distance[end])


class Assigned(Selector):
    """Training: the balanced assignment of the group's tokens with the largest sum of scores. Evaluation: the k best.

    Weights are the probabilities of the chosen experts; no gradient goes through the choice.
    """

    training_causal = False

    def __init__(self, group: str, renormalize: bool) -> None:
        super().__init__(renormalize)
        self.group = group
        self.training_batch_invariant = group == "sequence"

    def forward(self, scores: Scores, k: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        choice = scores.choice.detach()
        if self.training:
            choice, mask, own = self.grouped(choice, context.padding_mask, self.group)
            experts = balanced_assignment(choice, mask, k).flatten(0, 1)[own]
        else:
            experts = top_k(choice.flatten(0, 1), k)
        return experts, self.renormalized(scores.probs.flatten(0, 1).gather(-1, experts.clamp_min(0)))


def centroids(layer: LayerSpec) -> Stages:
    """Sigmoids of products with trained centroids, which start orthogonal."""
    scorer = LinearScorer(layer.dim, layer.columns, bias=False)
    orthogonal_(scorer.weight, GAIN)
    return Stages(scorer, Sigmoid())


@register_router("base", paper="Lewis et al. 2021, arXiv 2103.16716", scores=centroids, renormalize=False)
def base(layer: LayerSpec, stages: Stages, *, group: Literal["batch", "sequence"] = "batch") -> Stages:
    """z = C h, weights sigmoid(z). Training: equal loads at the largest sum of scores; evaluation: the k best.

    group: whose tokens are assigned together: the batch's, or each sequence's.
    """
    return replace(stages, select=Assigned(group, layer.renormalize))
