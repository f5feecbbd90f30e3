"""Specialisation: the dependence between experts and token ids."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from pointsman.diagnostics.base import Given, RoutingDiagnostic, chosen, number
from pointsman.routing import Routing

TOP = 20  # token ids listed for each expert


class Specialisation(RoutingDiagnostic):
    """Mutual information of expert and token id, from the table n_vi of assignments.

    n_vi = the number of assignments of tokens with id v to expert i; each of a token's k choices counts 1.
    `mutual_information` I = sum_vi p_vi ln(p_vi / (p_v p_i)) in nats, p = n / sum n (0: id and expert are independent).
    It is biased upwards if there are few tokens per id: `corrected` subtracts Miller and Madow's bias
    (cells - ids - experts + 1) / (2 sum n), counting those that occur, and is at least 0. `of_entropy` = I / H(expert).
    `saturation`: the mean over assignments of the share of the token id's most frequent expert.
    `top`: for each expert its 20 most frequent ids as [id, count, share of all assignments of that id].

    The table has at most `most_ids` rows: larger ids share the last row, and I is then a lower bound.
    """

    def __init__(self, most_ids: int = 1 << 16) -> None:
        self.most_ids = most_ids
        self.table: Tensor | None = None  # [ids, E] int32 counts below 2^31

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        if token_ids is None:
            raise ValueError("Specialisation: update needs token_ids [tokens]")
        experts = chosen(routing, mask)
        ids = token_ids.reshape(-1, 1).to(experts.device).clamp_max(self.most_ids - 1).expand_as(experts)
        assigned = experts >= 0
        ids, experts = ids[assigned], experts[assigned]
        if not ids.numel():
            return
        table = self._grown(int(ids.max()) + 1, routing.num_experts, experts.device)
        ones = torch.ones((), dtype=table.dtype, device=table.device).expand(ids.shape)
        table.view(-1).index_add_(0, ids * routing.num_experts + experts, ones)

    def _grown(self, ids: int, num_experts: int, device: torch.device) -> Tensor:
        """The table, extended to at least `ids` rows."""
        rows = min(self.most_ids, max(256, 1 << (ids - 1).bit_length()))
        if self.table is None:
            self.table = torch.zeros(rows, num_experts, dtype=torch.int32, device=device)
        elif self.table.shape[0] < ids:
            more = self.table.new_zeros(rows - self.table.shape[0], num_experts)
            self.table = torch.cat([self.table, more])
        return self.table

    def merge(self, other: Self) -> Self:
        if other.table is not None:
            if other.most_ids != self.most_ids:
                raise ValueError(f"Specialisation: most_ids={self.most_ids} and {other.most_ids} do not merge")
            mine = self._grown(other.table.shape[0], other.table.shape[1], other.table.device)
            mine[: other.table.shape[0]] += other.table.to(mine.device)
        return self

    def result(self) -> dict[str, Any]:
        names = ("mutual_information", "corrected", "of_entropy", "saturation")
        if self.table is None:
            return {"assignments": 0, "ids": 0, "pooled": False, **dict.fromkeys(names), "top": []}
        counts = self.table.cpu().double()
        total = float(counts.sum())
        of_id, of_expert = counts.sum(1), counts.sum(0)

        def entropy(values: Tensor) -> float:
            return float(torch.special.entr(values / total).sum())

        expert_entropy = entropy(of_expert)
        information = max(0.0, expert_entropy + entropy(of_id) - entropy(counts))
        seen_ids = int((of_id > 0).sum())
        cells = int((counts > 0).sum()) - seen_ids - int((of_expert > 0).sum()) + 1
        ids = min(TOP, counts.shape[0])
        top = []
        for expert in range(counts.shape[1]):
            best = counts[:, expert].sort(descending=True, stable=True)
            pairs = zip(best.indices[:ids].tolist(), best.values[:ids].tolist(), strict=True)
            top.append([[v, int(n), n / float(of_id[v])] for v, n in pairs if n])
        return {
            "assignments": int(total),
            "ids": seen_ids,
            "pooled": bool(counts.shape[0] == self.most_ids and of_id[-1] > 0),
            "mutual_information": number(information),
            "corrected": max(0.0, information - cells / (2 * total)),
            "of_entropy": number(information / expert_entropy) if expert_entropy > 1e-12 else None,
            "saturation": number(counts.max(1).values.sum() / total) if math.isfinite(total) else None,
            "top": top,
        }
