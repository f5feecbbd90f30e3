"""Statistics of routings: entropy and margin, load, co-activation, what mixing does, and what changes."""

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pointsman.auxiliary import assignment_counts
from pointsman.diagnostics.base import (
    Diagnostic,
    Given,
    Moments,
    RoutingDiagnostic,
    chosen,
    first_choice,
    number,
    numbers,
    ratio,
    table,
    unmixed,
)
from pointsman.ops.selection import members
from pointsman.routing import Routing


def entropies(probs: Tensor) -> Tensor:
    """H = -sum_i p_i ln p_i of each row [tokens, E], in nats and float64; rows are first normalised to sum 1."""
    probs = probs.detach().double()
    total = probs.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(probs / torch.where(total > 0, total, 1.0)).sum(-1)
    return entropy


class Entropy(RoutingDiagnostic):
    """Entropy of the router's full distribution over all E experts, before top-k, averaged over tokens.

    H_t = -sum_i p_ti ln p_ti in nats (HyperRouter, Tables 4 and A5); `uniform`: ln E, virtual experts included. `mean`
    and `std` (population, over tokens) are of the distribution before mixing: the softmax of all logits, or sigmoids
    normalised to sum 1; `mixed_mean` and `mixed_std` of the distribution after mixing; `ratio` = mixed_mean / mean
    (Mutual-Inform's ratio is to another model: see `diagnose`, `against`).
    """

    def __init__(self) -> None:
        self.before, self.after = Moments(), Moments()
        self.columns = 0

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        self.columns = routing.probs.shape[-1]
        before = unmixed(routing)
        of_before = entropies(before)
        self.before.add(of_before, mask)
        self.after.add(of_before if before is routing.probs else entropies(routing.probs), mask)

    def merge(self, other: Self) -> Self:
        self.columns = self.columns or other.columns
        return super().merge(other)

    def result(self) -> dict[str, Any]:
        before, after, uniform = self.before, self.after, math.log(self.columns) if self.columns else None
        return {
            "tokens": before.count, "mean": before.mean, "std": before.std, "mixed_mean": after.mean,
            "mixed_std": after.std, "ratio": ratio(after.mean, before.mean), "uniform": uniform,
        }  # fmt: skip


class Margin(RoutingDiagnostic):
    """The margin of the choice, m_t = p_(k) - p_(k+1): the sorted probabilities after mixing.

    `mean`, `std` (population, over tokens). None for k = E and for expert choice. A selection bias is not part of the
    probabilities.
    """

    def __init__(self) -> None:
        self.margin = Moments()

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        k, columns = routing.experts.shape[-1], routing.probs.shape[-1]
        if k < columns and routing.requested:
            best = routing.probs.detach().topk(k + 1, dim=-1).values.double()
            self.margin.add(best[:, k - 1] - best[:, k], mask)

    def result(self) -> dict[str, Any]:
        return {"tokens": self.margin.count, "mean": self.margin.mean, "std": self.margin.std}


CHUNK = 1 << 14  # rows of the multi-hot matrix that co-activation builds at a time


def load_summary(assigned: Tensor) -> dict[str, Any]:
    """Statistics of one load vector n [E], the number of assignments of each expert.

    `share` f_i = n_i / sum n; `cv` = std(n) / mean(n), population (its square: Shazeer's CV^2); `dead`: the experts
    without an assignment; `effective` = exp(H(f)), from 1 to E; `max_violation` = (max n - mean n) / mean n (MaxVio).
    """
    assigned = assigned.double().cpu()
    total, experts = float(assigned.sum()), assigned.numel()
    if not total:
        return {"share": [None] * experts, "dead": [], **dict.fromkeys(("cv", "effective", "max_violation"))}
    share = assigned / total
    mean = total / experts
    return {
        "share": numbers(share),
        "dead": torch.nonzero(assigned == 0)[:, 0].tolist(),
        "cv": number(assigned.std(correction=0) / mean),
        "effective": number(torch.special.entr(share).sum().exp()),
        "max_violation": number((assigned.max() - mean) / mean),
    }


class Load(RoutingDiagnostic):
    """The number of assignments of each expert: every one of a token's k choices counts 1, padding and dropped ones 0.

    The figures of `load_summary`, and `tokens`, `assignments`, `unfilled` (the share of the entries of
    `Routing.experts` that are no expert, not a virtual one either: over capacity, or not chosen where k is the most or
    the mean; None for expert choice).
    """

    def __init__(self) -> None:
        self.assigned: Tensor | None = None
        self.tokens: Tensor | None = None
        self.requested: Tensor | None = None  # tokens * k; tokens * E where k is a mean
        self.filled: Tensor | None = None  # of these, by virtual experts as well

    def update(self, routing: Routing, mask: Given = None, *, hidden: Given = None, token_ids: Given = None) -> None:
        experts = chosen(routing, mask)
        real = experts.new_tensor(experts.shape[0]) if mask is None else mask.to(experts.device).sum()
        self._add(
            assigned=assignment_counts(experts, routing.num_experts).double(),
            tokens=real.double(),
            requested=real.double() * routing.requested,
            filled=(chosen(routing, mask, virtual=True) >= 0).sum().double(),
        )

    def result(self) -> dict[str, Any]:
        if self.assigned is None or self.tokens is None or self.requested is None or self.filled is None:
            return {"tokens": 0, "assignments": 0, "unfilled": None, **load_summary(torch.zeros(0))}
        requested = float(self.requested)
        return {
            "tokens": int(self.tokens),
            "assignments": int(self.assigned.sum()),
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
            hot = members(experts[start : start + CHUNK], width).double()  # autocast would round float32's products
            together += hot.T @ hot
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


class Mixing(Diagnostic):
    """S[i, i] and exp(H(S[i, :])) of the mixing matrix S in p_i = sum_j S[i, j] e_j (Mutual-Inform), over tokens.

    `own_mean`: the mean of S[i, i]; at 1 the mixer has no effect (as similarity with tau 1 on layer-normed inputs).
    `effective_mean`: the mean of exp(H(S[i, :])), the effective number of tokens that token i is mixed with, from 1;
    tokens of earlier segments count. `changed`: the share of tokens whose set of experts is not that of the k largest
    scores before mixing, of those with k experts.
    """

    def __init__(self) -> None:
        self.own, self.effective, self.changed = Moments(), Moments(), Moments()

    def update(self, own: Tensor, effective: Tensor, mask: Tensor | None = None) -> None:
        """Adds one forward: S[i, i] and the effective number, both [B, T]; `mask` [B, T], True for a real token."""
        mask = None if mask is None else mask.reshape(-1)
        self.own.add(own.reshape(-1), mask)
        self.effective.add(effective.reshape(-1), mask)

    def update_choice(self, routing: Routing, mask: Tensor | None = None) -> None:
        """Adds whether mixing changed the experts of each token; `mask` [tokens], True for a real token."""
        experts, before = chosen(routing, mask, virtual=True), unmixed(routing)
        alone = before.topk(experts.shape[-1], dim=-1).indices
        one, two = (members(each, before.shape[-1]) for each in (experts, alone))
        self.changed.add((one != two).any(-1), (experts >= 0).all(-1))

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.own.count,
            "own_mean": self.own.mean,
            "effective_mean": self.effective.mean,
            "changed": self.changed.mean,
        }


class Fluctuation(Diagnostic):
    """Routing fluctuation: the share of tokens whose experts differ between two routings of the same inputs.

    `top1` = mean_t [first expert_a(t) != first expert_b(t)] (X-MoE's RF; both models in evaluation, nothing dropped).
    `sets` = mean_t [{experts_a(t)} != {experts_b(t)}], regardless of order: "one or both choices" switch
    (Mutual-Inform, k = 2); None if the two have different k. `overlap` = mean_t |A & B| / min(|A|, |B|).
    `by_expert`: for each expert i, the share of the tokens with first expert i in a that have another one in b.
    Tokens without an expert in a or b are not counted. The first expert is the one with the largest combine weight.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # tokens, changed first expert, changed sets, overlap, tokens of equal k
        self.by_first: Tensor | None = None  # [E, 2]: tokens with first expert i in a, and those that changed

    def update(self, routing: Routing, other: Routing, mask: Tensor | None = None) -> None:
        """Adds two routings of the same tokens; `mask` [tokens], True for a real token."""
        if routing.experts.shape[0] != other.experts.shape[0] or routing.num_experts != other.num_experts:
            raise ValueError(f"Fluctuation: routings of {routing.experts.shape[0]} tokens over {routing.num_experts} "
                             f"experts and of {other.experts.shape[0]} over {other.num_experts}; both must be of the "
                             "same tokens and experts")  # fmt: skip
        num_experts = routing.num_experts
        first, second = first_choice(routing, mask), first_choice(other, mask)
        real = (first >= 0) & (second >= 0)
        changed = (first != second) & real
        in_one, in_two = (members(chosen(each, mask), num_experts) for each in (routing, other))
        common = (in_one & in_two).sum(-1).double()
        least = torch.minimum(in_one.sum(-1), in_two.sum(-1)).double().clamp_min(1)
        overlap = torch.where(real, common / least, 0.0).sum()
        tokens = real.sum().double()
        same_k = float(routing.experts.shape[-1] == other.experts.shape[-1])
        sets = ((in_one != in_two).any(-1) & real).sum() * same_k
        firsts = (first.where(of, -1)[:, None] for of in (real, changed))
        self._add(
            sums=torch.stack([tokens, changed.sum().double(), sets.double(), overlap, tokens * same_k]),
            by_first=torch.stack([assignment_counts(one, num_experts) for one in firsts], -1).double(),
        )

    def result(self) -> dict[str, Any]:
        tokens, top1, sets, overlap, equal = [0.0] * 5 if self.sums is None else self.sums.tolist()
        by_first = [] if self.by_first is None else self.by_first.tolist()
        return {
            "tokens": int(tokens),
            "top1": ratio(top1, tokens),
            "sets": ratio(sets, equal),
            "overlap": ratio(overlap, tokens),
            "by_expert": [ratio(changed, total) for total, changed in by_first],
        }


def inter_run_consistency(loads: Sequence[Tensor | Sequence[float]]) -> dict[str, Any]:
    """IC of m runs: the mean of the m x m matrix of Pearson correlations between their expert loads (X-MoE, 4.4).

    `with_diagonal` is the paper's figure, IC = sum_ij rho_ij / m^2; its diagonal alone adds 1/m. `without_diagonal` is
    the mean over i != j. A run with the same load on every expert has no correlation: it is not counted in `runs`, and
    `matrix` has None for it. Experts are compared by index, which is meaningful only for runs that start from the same
    weights, as in fine-tuning.

    Args:
        loads: m vectors [E], the number of tokens of each expert (in the paper: of 100 mini-batches).

    Raises:
        ValueError: runs with different numbers of experts.
    """
    rows = [torch.as_tensor(load, dtype=torch.float64).cpu() for load in loads]
    if len({row.shape for row in rows}) > 1:
        raise ValueError(f"inter_run_consistency: loads of {[len(row) for row in rows]} experts: must be equal")
    if not rows:
        return {"runs": 0, "with_diagonal": None, "without_diagonal": None, "matrix": []}
    stacked = torch.stack(rows)
    centred = stacked - stacked.mean(1, keepdim=True)
    norm = centred.norm(dim=1)
    kept = norm > 1e-12 * stacked.norm(dim=1)
    unit = centred / norm[:, None]
    matrix = (unit @ unit.T).clamp(-1, 1).fill_diagonal_(1.0).where(kept[:, None] & kept, torch.nan)
    used = matrix[kept][:, kept]
    m = len(used)
    return {
        "runs": m,
        "with_diagonal": number(used.mean()),
        "without_diagonal": number((used.sum() - m) / (m * (m - 1))) if m > 1 else None,
        "matrix": table(matrix),
    }
