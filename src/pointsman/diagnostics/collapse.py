"""Representation collapse: how much the hidden states of one expert's tokens still differ from each other."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from pointsman.diagnostics.base import Given, RoutingDiagnostic, first_choice, number
from pointsman.routing import Routing


class RepresentationCollapse(RoutingDiagnostic):
    """RC = Tr(S_W pinv(S_B)) of the hidden states that the router sees (X-MoE, Eq. 11). Larger = less collapsed.

    Classes are the tokens' routed experts (the first one at k > 1); the paper does not name them. With n_c tokens and
    mean mu_c in class c, C classes, n tokens and mu their mean:
        S_W = 1/n sum_c sum_(t in c) (h_t - mu_c)(h_t - mu_c)^T,    S_B = 1/C sum_c (mu_c - mu)(mu_c - mu)^T
    (S_B not weighted by class size, mu the mean over tokens: Zhu et al. 2021). Experts with fewer than two tokens are
    left out of everything. Eigenvalues of S_B up to max(dim, C) eps lambda_max count as zero. The value grows with the
    width and falls with C, so compare equals: `classes` gives C, `class_tokens` n_c, `rank` that of S_B, `per_class`
    RC / C (Zhu et al.'s NC1). `between` and `within` are the traces of S_B and S_W. None with fewer than two classes.

    State: per class a count and a mean, and one [dim, dim] matrix, kept centred (float64).
    """

    def __init__(self) -> None:
        self.count: Tensor | None = None  # [E]
        self.mean: Tensor | None = None  # [E, dim]
        self.scatter: Tensor | None = None  # [dim, dim], n S_W

    def take(self, routing: Routing, mask: Given, hidden: Given, token_ids: Given) -> None:
        if hidden is None:
            raise ValueError("RepresentationCollapse: update needs hidden [tokens, dim], what the router saw")
        hidden = hidden.detach().reshape(-1, hidden.shape[-1]).double()
        classes = first_choice(routing, mask) + 1  # 0: no expert
        hidden = torch.where(classes[:, None] > 0, hidden, 0.0)
        rows = routing.num_experts + 1
        real = (classes > 0).double()
        count = hidden.new_zeros(rows).index_add_(0, classes, real)
        mean = hidden.new_zeros(rows, hidden.shape[1]).index_add_(0, classes, hidden) / count.clamp_min(1)[:, None]
        centred = (hidden - mean[classes]) * real[:, None]
        self._take(count[1:], mean[1:], centred.T @ centred)

    def merge(self, other: Self) -> Self:
        if other.count is not None and other.mean is not None and other.scatter is not None:
            self._take(other.count, other.mean, other.scatter)
        return self

    def _take(self, count: Tensor, mean: Tensor, scatter: Tensor) -> None:
        if self.count is None or self.mean is None or self.scatter is None:
            self.count, self.mean, self.scatter = count.clone(), mean.clone(), scatter.clone()
            return
        count, mean, scatter = (tensor.to(self.count.device) for tensor in (count, mean, scatter))
        total = self.count + count
        share = count / total.clamp_min(1)
        apart = mean - self.mean
        self.scatter += scatter + (apart * (self.count * share)[:, None]).T @ apart
        self.mean += apart * share[:, None]
        self.count = total

    def result(self) -> dict[str, Any]:
        names = ("value", "per_class", "within", "between")
        if self.count is None or self.mean is None or self.scatter is None:
            return {"tokens": 0, "classes": 0, "rank": 0, "class_tokens": [], **dict.fromkeys(names)}
        count = self.count.cpu()
        kept = count >= 2
        classes, tokens = int(kept.sum()), float(count[kept].sum())
        found: dict[str, Any] = {
            "tokens": int(tokens),
            "classes": classes,
            "rank": 0,
            "class_tokens": [int(n) for n in count.tolist()],
            **dict.fromkeys(names),
        }
        if classes < 2:
            return found
        mean, count = self.mean.cpu()[kept], count[kept]
        apart = mean - (mean * (count / tokens)[:, None]).sum(0)
        within = self.scatter.cpu() / tokens
        # pinv(S_B) = C sum_r v_r v_r^T / s_r^2 with the singular values and right vectors of the C x dim matrix
        _, singular, right = torch.linalg.svd(apart, full_matrices=False)
        squares = singular.square()
        limit = max(apart.shape[1], classes) * torch.finfo(torch.float64).eps * squares.max()
        right, squares = right[squares > limit], squares[squares > limit]
        found.update(
            rank=len(squares),
            within=number(within.trace()),
            between=number(apart.square().sum() / classes),
        )
        if len(squares):
            spread = ((right @ within) * right).sum(-1)
            found["value"] = number(classes * (spread / squares).sum())
            found["per_class"] = number((spread / squares).sum())
        return found
