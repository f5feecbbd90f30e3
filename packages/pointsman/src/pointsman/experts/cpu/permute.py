"""Permute and unpermute: rows sorted by expert, and each token's weighted sum of its rows.

An assignment is one (token, expert, weight). Experts compute rows: the assignments sorted by expert, each expert's rows
padded to one of few bucket sizes, because oneDNN builds a new kernel (0.2 to 0.5 ms) for every new row count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu.groups import Grouping, group


class Assignments(NamedTuple):
    """The assignments of a call in the order of their tokens.

    Attributes:
        expert: [A] int64.
        token_offsets: [tokens] int64, the first assignment of each token.
        per_token: k where every token has k assignments, otherwise 0.
        source: [A], where each stands in what the routing gave; None: in the same place.
    """

    expert: Tensor
    token_offsets: Tensor
    per_token: int
    source: Tensor | None


def assignments_of_tokens(experts: Tensor) -> Assignments:
    """From each token's experts [tokens, k]; -1 is left out."""
    tokens, k = experts.shape
    flat = experts.reshape(-1)
    valid = flat.numpy() >= 0
    if valid.all():
        return Assignments(flat, torch.arange(0, tokens * k, k, device=flat.device), k, None)
    source = torch.from_numpy(np.flatnonzero(valid))
    return Assignments(flat.index_select(0, source), _offsets(valid.reshape(tokens, k).sum(1)), 0, source)


def assignments_of_pairs(token: Tensor, expert: Tensor, tokens: int) -> Assignments:
    """From (token, expert) pairs [A] in any order."""
    source = torch.from_numpy(np.argsort(token.numpy(), kind="stable"))
    token_offsets = _offsets(np.bincount(token.numpy(), minlength=tokens))
    return Assignments(expert.index_select(0, source), token_offsets, 0, source)


def _offsets(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(np.cumsum(counts) - counts)


def refuse_beyond(highest: int, num_experts: int) -> None:
    """ValueError if the highest chosen expert does not exist. Reading weights by it would not notice."""
    if highest >= num_experts:
        raise ValueError(f"a token is assigned to expert {highest}: there are {num_experts}, from 0")


def bucket(rows: int) -> int:
    """The padded rows of an expert: at most 16 sizes in each doubling, 3 % more rows on average."""
    if rows <= 8:
        return rows
    step = 8 if rows <= 128 else 1 << (rows.bit_length() - 5)
    return -(-rows // step) * step


class Group(NamedTuple):
    """Adjacent experts that are computed together: mostly one, several small ones with as many padded rows each.

    Attributes:
        num_experts: how many experts.
        size: how many assignments.
        token: [size], their tokens.
        row_starts: [rows], the first assignment that each row takes; of a padded row where its expert's end.
        unused: which of its experts have no token.
    """

    num_experts: int
    size: int
    token: Tensor
    row_starts: Tensor
    unused: list[int]

    def permute(self, hidden: Tensor, factor: Tensor | None = None) -> Tensor:
        """The hidden states of its tokens, zeros in padded rows: [rows, dim], a new tensor.

        Args:
            hidden: [tokens, dim].
            factor: [size], one for each assignment, in the dtype of `hidden`; None: 1.
        """
        # bags of one token or none: half the time of index_select, mul and zero
        return F.embedding_bag(self.token, hidden, self.row_starts, mode="sum", per_sample_weights=factor)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Its rows [n, width], of several experts as [num_experts, n / num_experts, width]."""
        return rows if self.num_experts == 1 else rows.view(self.num_experts, -1, rows.shape[1])


def rows_at_most(assignments: int, num_experts: int, limits: Grouping | None = None) -> int:
    """A bound on the rows of any permutation of so many assignments: a bucket adds at most 7 rows, or a sixteenth."""
    alone = assignments + assignments // 16 + 8 * num_experts
    return alone if limits is None else alone + alone * limits.percent // 100 + limits.spare * num_experts


@dataclass(frozen=True)
class Permutation:
    """Where each assignment's row lies.

    Attributes:
        order: [A] the assignments sorted by expert.
        row: [A] the row of each assignment, in token order.
        token_offsets: [tokens] the first assignment of each token.
        groups: in the order of their experts.
        num_rows: rows of all experts.
    """

    order: Tensor
    row: Tensor
    token_offsets: Tensor
    groups: list[Group]
    num_rows: int

    def combine(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Unpermutes rows [num_rows, dim] and sums those of each token, weighted or not: [tokens, dim]."""
        if not self.num_rows:
            return rows.new_zeros(self.token_offsets.numel(), rows.shape[1])
        return F.embedding_bag(self.row, rows, self.token_offsets, mode="sum", per_sample_weights=weight)

    def split_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each group's rows of a tensor [num_rows, …]: views."""
        return rows.split_with_sizes([len(group.row_starts) for group in self.groups])

    def split_assignments(self, values: Tensor) -> tuple[Tensor, ...]:
        """Each group's part of a tensor [A, …] of the sorted assignments: views."""
        return values.split_with_sizes([group.size for group in self.groups])

    def split_experts(self, experts: Tensor | None) -> Sequence[Tensor | None]:
        """Each group's experts of a tensor [E, …]: views, of one expert without that dimension."""
        if experts is None:
            return [None] * len(self.groups)
        if len(self.groups) == len(experts):
            return experts.unbind(0)
        groups = experts.split_with_sizes([group.num_experts for group in self.groups])
        return [group[0] if len(group) == 1 else group for group in groups]


def permutation(assignments: Assignments, num_experts: int, limits: Grouping | None = None) -> Permutation:
    """Sorts assignments by expert.

    NumPy sorts short integers by radix: a tenth of the time of torch.argsort.

    Args:
        limits: when experts share a group; None: each has its own.
    """
    narrow = np.uint8 if num_experts <= 256 else np.uint16 if num_experts <= 65536 else np.int64
    given = assignments.expert.numpy()
    refuse_beyond(given.max(initial=-1), num_experts)
    expert = given.astype(narrow)
    order = np.argsort(expert, kind="stable")
    num_tokens_per_expert = np.bincount(expert, minlength=num_experts)
    alone = [bucket(count) for count in num_tokens_per_expert.tolist()]
    members = group(alone, 0, num_experts, limits) if limits else [(index, 1) for index in range(num_experts)]
    firsts = [first for first, _ in members]
    numbers = [number for _, number in members]
    padded = np.repeat([max(alone[first : first + number]) for first, number in members], numbers)
    first_assignment = np.cumsum(num_tokens_per_expert) - num_tokens_per_expert
    first_row = np.cumsum(padded) - padded
    row = np.empty_like(order)
    row[order] = np.arange(order.size) + np.repeat(first_row - first_assignment, num_tokens_per_expert)
    num_rows = int(padded.sum())
    starts = np.minimum(np.arange(num_rows) - np.repeat(first_row, padded), np.repeat(num_tokens_per_expert, padded))
    if len(members) < num_experts:
        starts += np.repeat(first_assignment - np.repeat(first_assignment[firsts], numbers), padded)
    k = assignments.per_token
    token = order // k if k else np.searchsorted(assignments.token_offsets.numpy(), order, side="right") - 1
    sizes, row_counts = (np.add.reduceat(each, firsts).tolist() for each in (num_tokens_per_expert, padded))
    tokens = torch.from_numpy(token).split_with_sizes(sizes)
    row_starts = torch.from_numpy(starts).split_with_sizes(row_counts)
    unused: list[list[int]] = [[] for _ in members]
    if len(members) < num_experts:
        of_expert = np.repeat(np.arange(len(members)), numbers)
        for index in np.flatnonzero(num_tokens_per_expert == 0).tolist():
            unused[of_expert[index]].append(index - firsts[of_expert[index]])
    groups = [Group(*each) for each in zip(numbers, sizes, tokens, row_starts, unused, strict=True)]
    return Permutation(torch.from_numpy(order), torch.from_numpy(row), assignments.token_offsets, groups, num_rows)
