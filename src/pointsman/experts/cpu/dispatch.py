"""Which row goes where: the plan that brings each expert's tokens together on a CPU, and back.

A *slot* is one (token, expert, weight) assignment; slots are listed in the order of their tokens. Experts work on
*rows*: the slots sorted by expert, each expert's part padded to one of few sizes, since oneDNN builds a new kernel
(0.2 to 0.5 ms) for every row count that it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Slots(NamedTuple):
    """The assignments in the order of their tokens.

    Attributes:
        expert: [S] int64.
        bags: [tokens] int64, the first slot of each token.
        per_token: k where every token has k slots, otherwise 0.
        chosen: [S], which of the given assignments each slot is; None: all as they were given.
    """

    expert: Tensor
    bags: Tensor
    per_token: int
    chosen: Tensor | None


def slots_of_tokens(experts: Tensor) -> Slots:
    """From each token's experts [tokens, k]; -1 is left out."""
    tokens, k = experts.shape
    flat = experts.reshape(-1)
    valid = flat.numpy() >= 0
    if valid.all():
        return Slots(flat, torch.arange(0, tokens * k, k, device=flat.device), k, None)
    chosen = torch.from_numpy(np.flatnonzero(valid))
    return Slots(flat.index_select(0, chosen), _starts(valid.reshape(tokens, k).sum(1)), 0, chosen)


def slots_of_pairs(token: Tensor, expert: Tensor, tokens: int) -> Slots:
    """From (token, expert) pairs [P] in any order."""
    chosen = torch.from_numpy(np.argsort(token.numpy(), kind="stable"))
    bags = _starts(np.bincount(token.numpy(), minlength=tokens))
    return Slots(expert.index_select(0, chosen), bags, 0, chosen)


def _starts(counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(np.cumsum(counts) - counts)


def refuse_beyond(highest: int, num_experts: int) -> None:
    """ValueError if the highest chosen expert does not exist: what reads weights by it would not notice."""
    if highest >= num_experts:
        raise ValueError(f"a token is assigned to expert {highest}: there are {num_experts}, from 0")


def bucket(rows: int) -> int:
    """The padded size of an expert with that many rows: at most 16 sizes an octave, 3 % more rows on average."""
    if rows <= 8:
        return rows
    step = 8 if rows <= 128 else 1 << (rows.bit_length() - 5)
    return -(-rows // step) * step


class Part(NamedTuple):
    """Adjacent experts that are computed together: mostly one; small ones padded to as many rows each.

    Attributes:
        number: how many experts.
        size: how many slots.
        token: [size], the tokens of its slots.
        starts: [rows], the first of its slots that each row takes; of a padded row where its expert's slots end.
        unused: which of its experts have no slot.
    """

    number: int
    size: int
    token: Tensor
    starts: Tensor
    unused: list[int]

    def gather(self, hidden: Tensor, factor: Tensor | None = None) -> Tensor:
        """The hidden states of its tokens, zeros behind each expert's: [rows, dim], a new tensor.

        Args:
            hidden: [tokens, dim].
            factor: [size], one for each slot, in the dtype of `hidden`; None: 1.
        """
        # bags of one token, and of none: with its weighting and its padding half the time of index_select, mul and zero
        return F.embedding_bag(self.token, hidden, self.starts, mode="sum", per_sample_weights=factor)

    def apart(self, rows: Tensor) -> Tensor:
        """Its rows [n, width], of several experts as [number, n / number, width]."""
        return rows if self.number == 1 else rows.view(self.number, -1, rows.shape[1])


class Sharing(NamedTuple):
    """When experts share a part.

    Attributes:
        spare: how many rows of padding cost less than to compute one more expert apart.
        most: how many rows an expert has at most.
        rows: how many rows a part has at most.
        percent: how many rows of padding for every 100 it may have, besides.
    """

    spare: int
    most: int
    rows: int
    percent: int = 0


def rows_at_most(slots: int, num_experts: int, sharing: Sharing | None = None) -> int:
    """A bound on the rows of any plan for so many slots: a bucket adds at most 7 rows, or a sixteenth."""
    apart = slots + slots // 16 + 8 * num_experts
    return apart if sharing is None else apart + apart * sharing.percent // 100 + sharing.spare * num_experts


def together(sizes: list[int], first: int, end: int, sharing: Sharing) -> list[tuple[int, int]]:
    """The experts from `first` to `end` in parts (first, number), given the rows that each needs alone."""
    number, busiest = end - first, max(sizes[first:end])
    total = sum(sizes[first:end])
    bound = min(sharing.rows, total + total * sharing.percent // 100 + (number - 1) * sharing.spare)
    if number == 1 or (busiest <= sharing.most and number * busiest <= bound):
        return [(first, number)]
    middle = first + number // 2
    return together(sizes, first, middle, sharing) + together(sizes, middle, end, sharing)


@dataclass(frozen=True)
class Plan:
    """Where each slot's row lies.

    Attributes:
        order: [S] the slots sorted by expert.
        position: [S] the row of each slot in token order.
        bags: [tokens] the first slot of each token.
        parts: in the order of their experts.
        total: rows of all experts.
    """

    order: Tensor
    position: Tensor
    bags: Tensor
    parts: list[Part]
    total: int

    def combine(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Each token's sum over the rows [total, dim] of its slots, weighted or not: [tokens, dim]."""
        if not self.total:
            return rows.new_zeros(self.bags.numel(), rows.shape[1])
        return F.embedding_bag(self.position, rows, self.bags, mode="sum", per_sample_weights=weight)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Each part's rows of a tensor [total, …]: views."""
        return rows.split_with_sizes([len(part.starts) for part in self.parts])

    def split_slots(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Each part's slots of a tensor [S, …] of the sorted ones: views."""
        return slots.split_with_sizes([part.size for part in self.parts])

    def split_experts(self, experts: Tensor | None) -> Sequence[Tensor | None]:
        """Each part's experts of a tensor [E, …]: views, of one expert without that dimension."""
        if experts is None:
            return [None] * len(self.parts)
        if len(self.parts) == len(experts):
            return experts.unbind(0)
        parts = experts.split_with_sizes([part.number for part in self.parts])
        return [part[0] if len(part) == 1 else part for part in parts]


def plan(slots: Slots, num_experts: int, sharing: Sharing | None = None) -> Plan:
    """The plan for these slots.

    numpy sorts short integers by radix: a tenth of torch.argsort's time.

    Args:
        sharing: when experts share a part; None: each has its own.
    """
    narrow = np.uint8 if num_experts <= 256 else np.uint16 if num_experts <= 65536 else np.int64
    given = slots.expert.numpy()
    refuse_beyond(given.max(initial=-1), num_experts)
    ids = given.astype(narrow)
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids, minlength=num_experts)
    sizes = [bucket(count) for count in counts.tolist()]
    groups = together(sizes, 0, num_experts, sharing) if sharing else [(index, 1) for index in range(num_experts)]
    firsts = [first for first, _ in groups]
    numbers = [number for _, number in groups]
    padded = np.repeat([max(sizes[first : first + number]) for first, number in groups], numbers)
    first_slot, first_row = np.cumsum(counts) - counts, np.cumsum(padded) - padded
    position = np.empty_like(order)
    position[order] = np.arange(order.size) + np.repeat(first_row - first_slot, counts)
    total = int(padded.sum())
    starts = np.minimum(np.arange(total) - np.repeat(first_row, padded), np.repeat(counts, padded))
    if len(groups) < num_experts:
        starts += np.repeat(first_slot - np.repeat(first_slot[firsts], numbers), padded)
    k = slots.per_token
    token = order // k if k else np.searchsorted(slots.bags.numpy(), order, side="right") - 1
    slot_counts, row_counts = (np.add.reduceat(each, firsts).tolist() for each in (counts, padded))
    tokens = torch.from_numpy(token).split_with_sizes(slot_counts)
    row_starts = torch.from_numpy(starts).split_with_sizes(row_counts)
    unused: list[list[int]] = [[] for _ in groups]
    if len(groups) < num_experts:
        group = np.repeat(np.arange(len(groups)), numbers)
        for index in np.flatnonzero(counts == 0).tolist():
            unused[group[index]].append(index - firsts[group[index]])
    parts = [Part(*part) for part in zip(numbers, slot_counts, tokens, row_starts, unused, strict=True)]
    return Plan(torch.from_numpy(order), torch.from_numpy(position), slots.bags, parts, total)
