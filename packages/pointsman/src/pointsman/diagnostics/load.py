"""Load: the number of tokens of each expert, and which experts are chosen together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pointsman.diagnostics.base import Given, RoutingDiagnostic, chosen, counts, number, numbers, table
from pointsman.ops.selection import members
from pointsman.routing import Routing

CHUNK = 1 << 14  # rows of the multi-hot matrix that co-activation builds at a time


def load_summary(assigned: Tensor) -> dict[str, Any]:
    """Statistics of one load vector n [E], the number of assignments of each expert.

    `share` f_i = n_i / sum n; `cv` = std(n) / mean(n), population (its square: Shazeer's CV^2); `dead`: the experts
    without an assignment; `effective` = exp(H(f)), from 1 to E; `max_violation` = (max n - mean n) / mean n (MaxVio);
    `busiest`, `idlest`: the total share of the ceil(E / 5) experts with the largest and the smallest load.
    """
    assigned = assigned.double().cpu()
    total, experts = float(assigned.sum()), assigned.numel()
    if not total:
        names = ("cv", "effective", "max_violation", "busiest", "idlest")
        return {"share": [None] * experts, "dead": [], **dict.fromkeys(names)}
    share = assigned / total
    mean = total / experts
    fifth = math.ceil(experts / 5)
    ordered = share.sort(descending=True).values
    return {
        "share": numbers(share),
        "dead": torch.nonzero(assigned == 0)[:, 0].tolist(),
        "cv": number(assigned.std(correction=0) / mean),
        "effective": number(torch.special.entr(share).sum().exp()),
        "max_violation": number((assigned.max() - mean) / mean),
        "busiest": number(ordered[:fifth].sum()),
        "idlest": number(ordered[-fifth:].sum()),
    }


class Load(RoutingDiagnostic):
    """The number of assignments of each expert: every one of a token's k choices counts 1, padding and dropped ones 0.

    The figures of `load_summary`, and `tokens`, `assignments`, `importance` (each expert's share of the sum of combine
    weights), `unfilled` (the share of the entries of `Routing.experts` that are no expert, not a virtual one either:
    over capacity, or not chosen where k is the most or the mean; None for expert choice).
    """

    def __init__(self) -> None:
        self.assigned: Tensor | None = None
        self.weight: Tensor | None = None
        self.tokens: Tensor | None = None
        self.requested: Tensor | None = None  # tokens * k; tokens * E where k is a mean
        self.filled: Tensor | None = None  # of these, by virtual experts as well

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        experts = chosen(routing, mask)
        real = experts.new_tensor(experts.shape[0]) if mask is None else mask.to(experts.device).sum()
        weights = torch.where(experts < 0, 0.0, routing.weights.detach().double())
        weight = weights.new_zeros(routing.num_experts + 1)
        self._add(
            assigned=counts(experts, routing.num_experts),
            weight=weight.index_add_(0, experts.reshape(-1) + 1, weights.reshape(-1))[1:],
            tokens=real.double(),
            requested=real.double() * (0 if routing.by_experts else experts.shape[-1]),
            filled=(chosen(routing, mask, virtual=True) >= 0).sum().double(),
        )

    def result(self) -> dict[str, Any]:
        if self.assigned is None or self.weight is None or self.tokens is None or self.requested is None:
            return {"tokens": 0, "assignments": 0, "importance": [], "unfilled": None, **load_summary(torch.zeros(0))}
        assert self.filled is not None
        requested = float(self.requested)
        return {
            "tokens": int(self.tokens),
            "assignments": int(self.assigned.sum()),
            "importance": numbers(self.weight / self.weight.sum()),
            "unfilled": 1 - float(self.filled) / requested if requested else None,
            **load_summary(self.assigned),
        }


class CoActivation(RoutingDiagnostic):
    """Co-activation of experts: C_ij = the number of tokens that chose both i and j; C_ii = the number that chose i.

    `given` [E, E]: P(j | i) = C_ij / C_ii (None if i is dead). `pairs`: of the pairs with at least 10 joint tokens the
    10 with the highest lift C_ij T / (C_ii C_jj), T tokens (1 = independent), each as
    {"experts": [i, j], "tokens": C_ij, "lift": …}.
    """

    def __init__(self) -> None:
        self.together: Tensor | None = None
        self.tokens: Tensor | None = None

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        experts = chosen(routing, mask)
        width = routing.num_experts
        together = torch.zeros(width, width, dtype=torch.float64, device=experts.device)
        for start in range(0, experts.shape[0], CHUNK):
            hot = members(experts[start : start + CHUNK], width).float()
            together += (hot.T @ hot).double()  # counts up to CHUNK are exact in float32
        self._add(together=together, tokens=(experts >= 0).any(-1).sum().double())

    def result(self) -> dict[str, Any]:
        if self.together is None or self.tokens is None:
            return {"tokens": 0, "given": [], "pairs": []}
        together, tokens = self.together.cpu(), float(self.tokens)
        alone = together.diagonal()
        lift = torch.where(together >= 10, together * tokens / torch.outer(alone, alone), 0.0).triu(1)
        best = lift.reshape(-1).sort(descending=True, stable=True).indices[:10].tolist()
        pairs = [
            {"experts": [i, j], "tokens": int(together[i, j]), "lift": number(lift[i, j])}
            for i, j in (divmod(place, len(lift)) for place in best)
            if lift[i, j] > 0
        ]
        return {"tokens": int(tokens), "given": table(together / alone[:, None]), "pairs": pairs}
