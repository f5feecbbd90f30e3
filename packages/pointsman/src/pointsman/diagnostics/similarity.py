"""Similarity of experts: of their weights, and of their outputs for the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pointsman.diagnostics.base import Given, RoutingDiagnostic, chosen, number, table
from pointsman.diagnostics.observe import evaluating
from pointsman.routing import Routing


def weight_similarity(experts: nn.Module) -> dict[str, Any]:
    """Cosine between the experts' weights: `cosine` [E, E], and `mean` over pairs i != j.

    An expert's vector is the concatenation of its slices of all parameters with leading dimension E. The figure depends
    on the order of an expert's hidden units, although its function does not; `OutputSimilarity` avoids that.
    """
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    gram = torch.zeros(num_experts, num_experts, dtype=torch.float64)
    for parameter in experts.parameters():
        if parameter.shape[:1] == (num_experts,):
            flat = parameter.detach().reshape(num_experts, -1)
            for piece in flat.split(1 << 20, dim=1):  # type: ignore[no-untyped-call]
                gram += (piece.double() @ piece.double().T).cpu()
    cosine = _unit(gram)
    return {"cosine": table(cosine), "mean": _mean_over_pairs(cosine)}


class OutputSimilarity(RoutingDiagnostic):
    """Similarity of the outputs E_i(h) of all experts for the same tokens, regardless of routing.

    `cosine` [E, E]: the mean over tokens of cos(E_i(h_t), E_j(h_t)). `cka` [E, E]: linear CKA of the outputs,
    HSIC(X_i, X_j) / sqrt(HSIC(X_i, X_i) HSIC(X_j, X_j)) with the unbiased HSIC summed over updates (minibatch CKA,
    Nguyen et al. 2021), invariant to rotation and scale. `cosine_mean`, `cka_mean`: over pairs i != j.

    Each update computes all experts for at most `most` evenly spaced tokens.

    Args:
        experts: the layer's experts: called as experts(hidden [tokens, dim], routing), with `num_experts`.
        most: at least 4 for CKA.
    """

    def __init__(self, experts: nn.Module, most: int = 128) -> None:
        self.experts = experts
        self.most = most
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        self.tokens: Tensor | None = None
        self.cosine: Tensor | None = None
        self.hsic: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the experts, for merging in another process."""
        return {**vars(self), "experts": None}

    @torch.no_grad()
    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        if hidden is None:
            raise ValueError("OutputSimilarity: update needs hidden [tokens, dim], the experts' input")
        hidden = hidden.detach().reshape(-1, hidden.shape[-1])
        real = torch.nonzero((chosen(routing, mask) >= 0).any(-1))[:, 0]
        if not len(real):
            return
        real = real[torch.linspace(0, len(real) - 1, min(self.most, len(real)), device=real.device).round().long()]
        outputs = expert_outputs(self.experts, hidden[real]).double()
        unit = torch.nn.functional.normalize(outputs, dim=-1)
        tokens = outputs.new_tensor(float(len(real)))
        self._add(tokens=tokens, cosine=torch.einsum("itd,jtd->ij", unit, unit), hsic=_unbiased_hsic(outputs))

    def result(self) -> dict[str, Any]:
        if self.tokens is None or self.cosine is None or self.hsic is None:
            return {"tokens": 0, "cosine": [], "cosine_mean": None, "cka": [], "cka_mean": None}
        cosine, cka = (self.cosine / self.tokens).cpu(), _unit(self.hsic.cpu())
        return {
            "tokens": int(self.tokens),
            "cosine": table(cosine),
            "cosine_mean": _mean_over_pairs(cosine),
            "cka": table(cka),
            "cka_mean": _mean_over_pairs(cka),
        }


def expert_outputs(experts: nn.Module, hidden: Tensor) -> Tensor:
    """[E, tokens, dim]: every expert on every token of `hidden` [tokens, dim], in evaluation mode."""
    num_experts, tokens = int(experts.num_experts), hidden.shape[0]  # type: ignore[arg-type]
    hidden = hidden.to(next(experts.parameters()).dtype)  # under autocast the dtypes may differ
    ones = torch.ones(tokens, 1, device=hidden.device)
    every = ones.expand(tokens, num_experts)
    chosen = [torch.full((tokens, 1), index, device=hidden.device) for index in range(num_experts)]
    with evaluating(experts):
        return torch.stack([experts(hidden, Routing(one, ones, every, every)) for one in chosen])


def _unbiased_hsic(outputs: Tensor) -> Tensor:
    """HSIC_1 (Song et al. 2012) between the linear kernels of every two experts' outputs [E, n, dim]: [E, E]."""
    experts, n, _ = outputs.shape
    if n < 4:
        return outputs.new_zeros(experts, experts)
    kernel = outputs @ outputs.mT
    kernel.diagonal(dim1=1, dim2=2).zero_()
    flat, rows, total = kernel.flatten(1), kernel.sum(-1), kernel.sum((1, 2))
    trace = flat @ flat.T
    return (trace + torch.outer(total, total) / ((n - 1) * (n - 2)) - (rows @ rows.T) * 2 / (n - 2)) / (n * (n - 3))


def _unit(gram: Tensor) -> Tensor:
    """G_ij / sqrt(G_ii G_jj); nan if a diagonal entry is not above 0."""
    size = torch.where(gram.diagonal() > 0, gram.diagonal(), torch.nan).sqrt()
    return gram / torch.outer(size, size)


def _mean_over_pairs(values: Tensor) -> float | None:
    off_diagonal = values[~torch.eye(values.shape[0], dtype=torch.bool)]
    return number(off_diagonal.nanmean()) if off_diagonal.numel() else None
