"""What experts are for: collapse of representations, similarity of experts, dependence on token ids."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from pointsman._values import check_whole
from pointsman.diagnostics.base import Given, RoutingDiagnostic, chosen, first_choice, number, table
from pointsman.diagnostics.observe import evaluating
from pointsman.routing import Routing


class RepresentationCollapse(RoutingDiagnostic):
    """RC = Tr(S_W pinv(S_B)) of the router's input (X-MoE, Eq. 11). A larger value means less collapse.

    A token's class is its expert (at k > 1 the first one); the paper does not define the classes. With n_c tokens and
    mean mu_c in class c, C classes, n tokens and their mean mu:
        S_W = 1/n sum_c sum_(t in c) (h_t - mu_c)(h_t - mu_c)^T,    S_B = 1/C sum_c (mu_c - mu)(mu_c - mu)^T
    (S_B is not weighted by class size, mu is the mean over tokens: Zhu et al. 2021). Experts with fewer than two tokens
    are ignored. Eigenvalues of S_B up to max(dim, C) eps lambda_max count as zero. The value grows with the width and
    falls with C: compare only models of equal width and C. `classes` is C, `class_tokens` n_c, `rank` that of S_B;
    `value` is RC, `per_class` RC / C (NC1), `between` and `within` the traces of S_B and S_W: None for C < 2.

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
        self.scatter = self.scatter + scatter + (delta * (self.count * share)[:, None]).T @ delta
        self.mean = self.mean + delta * share[:, None]
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
        mean, count = self.mean.cpu()[kept], count[kept]
        if classes < 2 or not mean.isfinite().all():
            return found
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
        cosine, gram = (self.cosine / self.tokens).cpu(), self.hsic.cpu()
        size = torch.where(gram.diagonal() > 0, gram.diagonal(), torch.nan).sqrt()
        cka = gram / torch.outer(size, size)  # nan if a diagonal entry is not above 0
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


def _mean_over_pairs(values: Tensor) -> float | None:
    off_diagonal = values[~torch.eye(values.shape[0], dtype=torch.bool)]
    return number(off_diagonal.nanmean()) if off_diagonal.numel() else None


TOP = 20  # token ids listed for each expert


class Specialisation(RoutingDiagnostic):
    """Mutual information of expert and token id, from the table n_vi of assignments.

    n_vi = the number of assignments of tokens with id v to expert i; each of a token's k choices counts 1.
    `mutual_information` I = sum_vi p_vi ln(p_vi / (p_v p_i)) in nats, p = n / sum n (0: id and expert are independent).
    It is biased upwards if there are few tokens per id: `corrected` subtracts Miller and Madow's bias
    (cells - ids - experts + 1) / (2 sum n), counting those that occur, and is at least 0.
    `saturation`: the mean over assignments of the share of the token id's most frequent expert.
    `top`: for each expert its 20 most frequent ids as [id, count, share of all assignments of that id].

    `ids`: how many occur, in at most `most_ids` rows; larger ones share the last (`pooled`): I is then a lower bound.
    """

    def __init__(self, most_ids: int = 1 << 16) -> None:
        check_whole("Specialisation: most_ids", most_ids)
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

    @torch.inference_mode(False)  # tensors of inference take no sums outside of it
    def _grown(self, ids: int, num_experts: int, device: torch.device) -> Tensor:
        """The table, extended to at least `ids` rows."""
        rows = min(self.most_ids, max(256, 1 << (ids - 1).bit_length()))
        if self.table is None:
            self.table = torch.zeros(rows, num_experts, dtype=torch.int32, device=device)
        elif self.table.shape[0] < ids:
            self.table = torch.cat([self.table, self.table.new_zeros(rows - self.table.shape[0], num_experts)])
        return self.table

    def merge(self, other: Self) -> Self:
        if other.table is not None:
            if other.most_ids != self.most_ids:
                raise ValueError(f"Specialisation: most_ids={self.most_ids} and {other.most_ids} do not merge")
            mine = self._grown(other.table.shape[0], other.table.shape[1], other.table.device)
            mine[: other.table.shape[0]] += other.table.to(mine.device)
        return self

    def result(self) -> dict[str, Any]:
        names = ("mutual_information", "corrected", "saturation")
        if self.table is None:
            return {"assignments": 0, "ids": 0, "pooled": False, **dict.fromkeys(names), "top": []}
        counts = self.table.cpu().double()
        total = float(counts.sum())
        of_id, of_expert = counts.sum(1), counts.sum(0)

        def entropy(values: Tensor) -> float:
            return float(torch.special.entr(values / total).sum())

        information = max(0.0, entropy(of_expert) + entropy(of_id) - entropy(counts))
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
            "saturation": number(counts.max(1).values.sum() / total),
            "top": top,
        }
