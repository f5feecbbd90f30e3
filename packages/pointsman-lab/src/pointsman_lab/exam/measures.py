"""Measures of a routing whose truth is known."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pointsman import Routing
from pointsman.auxiliary import assignment_counts


def table(first: Tensor, second: Tensor, rows: int, columns: int) -> np.ndarray:
    """[rows, columns] counts of the pairs (first, second), both [N] int64."""
    pairs = first.reshape(-1) * columns + second.reshape(-1)
    return pairs.bincount(minlength=rows * columns).view(rows, columns).numpy()


def adjusted_mutual_information(counts: np.ndarray) -> float:
    """AMI = (I - E[I]) / (mean(H) - E[I]) of a table of counts: 1 for the same partition, 0 for chance.

    E[I] is exact, over all tables with the same sums (Vinh, Epps and Bailey 2010, JMLR 11, Eq. 24a); the mean of the
    two entropies is arithmetic.
    """
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0].astype(np.int64)
    if 1 in counts.shape:
        return float(counts.shape == (1, 1))
    n, a, b = int(counts.sum()), counts.sum(1), counts.sum(0)
    logs = np.concatenate([[0.0, 0.0], np.log(np.arange(2, n + 2))]).cumsum()  # log m!

    def entropy(sums: np.ndarray) -> float:
        return float(-(sums / n * np.log(sums / n)).sum())

    held = counts > 0
    mutual = float((counts[held] / n * np.log(n * counts[held] / np.outer(a, b)[held])).sum())
    expected = 0.0
    for i in a:
        for j in b:
            m = np.arange(max(1, i + j - n), min(i, j) + 1)
            chance = logs[i] + logs[j] + logs[n - i] + logs[n - j] - logs[n] - logs[m] - logs[i - m] - logs[j - m]
            expected += float((m / n * np.log(n * m / (i * j)) * np.exp(chance - logs[n - i - j + m])).sum())
    mean = (entropy(a) + entropy(b)) / 2
    return (mutual - expected) / max(mean - expected, np.finfo(float).eps)


def heaviest(routing: Routing) -> Tensor:
    """[N] the expert of each token with the largest weight; E where it has none."""
    place = routing.weights.masked_fill(routing.experts < 0, -1).argmax(-1, keepdim=True)
    expert = routing.experts.gather(-1, place)[:, 0]
    return expert.masked_fill(expert < 0, routing.num_experts)


def experts_per_token(routing: Routing) -> float:
    """How many experts a token has, on average."""
    return float((routing.experts >= 0).sum() / len(routing.experts))


def used(routing: Routing) -> int:
    """How many experts have more than a fifth of an equal share of the assignments."""
    loads = assignment_counts(routing.experts, routing.num_experts)
    return int((loads > 0.2 * loads.sum() / routing.num_experts).sum())
