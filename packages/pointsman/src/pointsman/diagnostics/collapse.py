"""Representation collapse: the variance of hidden states within an expert's tokens against that between experts."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from pointsman.diagnostics.base import Given, RoutingDiagnostic, first_choice, number
from pointsman.routing import Routing


class RepresentationCollapse(RoutingDiagnostic):
    """RC = Tr(S_W pinv(S_B)) of the router's input (X-MoE, Eq. 11). A larger value means less collapse.

    A token's class is its expert (at k > 1 the first one); the paper does not define the classes. With n_c tokens and
    mean mu_c in class c, C classes, n tokens and their mean mu:
        S_W = 1/n sum_c sum_(t in c) (h_t - mu_c)(h_t - mu_c)^T,    S_B = 1/C sum_c (mu_c - mu)(mu_c - mu)^T
    (S_B is not weighted by class size, mu is the mean over tokens: Zhu et al. 2021). Experts with fewer than two tokens
    are ignored. Eigenvalues of S_B up to max(dim, C) eps lambda_max count as zero. The value grows with the width and
    falls with C: compare only models of equal width and C. `classes` is C, `class_tokens` n_c, `rank` that of S_B,
    `per_class` RC / C (Zhu et al.'s NC1), `between` and `within` the traces of S_B and S_W. All are None for C < 2.

    State: a count and a mean for each class, and one centred [dim, dim] matrix, in float64.
    """

    def __init__(self) -> None:
        self.count: Tensor | None = None  # [E]
        self.mean: Tensor | None = None  # [E, dim]
        self.scatter: Tensor | None = None  # [dim, dim], n S_W

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        if hidden is None:
            raise ValueError("RepresentationCollapse: update needs hidden [tokens, dim], the router's input")
        hidden = hidden.detach().reshape(-1, hidden.shape[-1]).double()
        classes = first_choice(routing, mask) + 1  # 0: no expert
        hidden = torch.where(classes[:, None] > 0, hidden, 0.0)
        rows = routing.num_experts + 1
        real = (classes > 0).double()
        count = hidden.new_zeros(rows).index_add_(0, classes, real)
        mean = hidden.new_zeros(rows, hidden.shape[1]).index_add_(0, classes, hidden) / count.clamp_min(1)[:, None]
        centred = (hidden - mean[classes]) * real[:, None]
        self._combine(count[1:], mean[1:], centred.T @ centred)

    def merge(self, other: Self) -> Self:
        if other.count is not None and other.mean is not None and other.scatter is not None:
            self._combine(other.count, other.mean, other.scatter)
        return self

    def _combine(self, count: Tensor, mean: Tensor, scatter: Tensor) -> None:
        if self.count is None or self.mean is None or self.scatter is None:
            self.count, self.mean, self.scatter = count.clone(), mean.clone(), scatter.clone()
            return
        count, mean, scatter = (tensor.to(self.count.device) for tensor in (count, mean, scatter))
        total = self.count + count
        share = count / total.clamp_min(1)
        delta = mean - self.mean
        self.scatter += scatter + (delta * (self.count * share)[:, None]).T @ delta
        self.mean += delta * share[:, None]
        self.count = total

    def result(self) -> dict[str, Any]:
        names = ("value", "per_class", "within", "between")
        found: dict[str, Any] = {"tokens": 0, "classes": 0, "rank": 0, "class_tokens": [], **dict.fromkeys(names)}
        if self.count is None or self.mean is None or self.scatter is None:
            return found
        count = self.count.cpu()
        kept = count >= 2
        classes, tokens = int(kept.sum()), float(count[kept].sum())
        found |= {"tokens": int(tokens), "classes": classes, "class_tokens": count.long().tolist()}
        if classes < 2:
            return found
        mean, count = self.mean.cpu()[kept], count[kept]
        centred = mean - (mean * (count / tokens)[:, None]).sum(0)
        within = self.scatter.cpu() / tokens
        # pinv(S_B) = C sum_r v_r v_r^T / s_r^2 with the singular values and right vectors of the C x dim matrix
        _, singular, right = torch.linalg.svd(centred, full_matrices=False)
        squares = singular.square()
        limit = max(centred.shape[1], classes) * torch.finfo(torch.float64).eps * squares.max()
        right, squares = right[squares > limit], squares[squares > limit]
        between = number(centred.square().sum() / classes)
        found |= {"rank": len(squares), "within": number(within.trace()), "between": between}
        if len(squares):
            per_class = (((right @ within) * right).sum(-1) / squares).sum()
            found |= {"value": number(classes * per_class), "per_class": number(per_class)}
        return found
