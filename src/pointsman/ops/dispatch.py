"""Which row goes where: the plan that brings each expert's tokens together on a CPU, and back.

A *slot* is one (token, expert, weight) assignment; slots are listed in the order of their tokens. Experts work on
*rows*: the slots sorted by expert, each expert's part padded to one of few sizes, since oneDNN builds a new kernel
(0.2 to 0.5 ms) for every row count that it has not seen.
"""

from __future__ import annotations

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


def bucket(rows: int) -> int:
    """The padded size of an expert with that many rows: at most 16 sizes an octave, 3 % more rows on average."""
    if rows <= 8:
        return rows
    step = 8 if rows <= 128 else 1 << (rows.bit_length() - 5)
    return -(-rows // step) * step


class Part(NamedTuple):
    """One expert's part: its slots among the sorted slots, their number, and its padded rows."""

    slots: slice
    size: int
    rows: slice


def rows_at_most(slots: int, num_experts: int) -> int:
    """A bound on the rows of any plan for so many slots: a bucket adds at most 7 rows, or a sixteenth."""
    return slots + slots // 16 + 8 * num_experts


@dataclass(frozen=True)
class Plan:
    """Where each slot's row lies.

    Attributes:
        order: [S] the slots sorted by expert.
        token: [S] the token of each sorted slot.
        starts: [total] the first slot of each row, counted in its expert's part; of a padded row the part's end.
        position: [S] the row of each slot in token order.
        bags: [tokens] the first slot of each token.
        parts: each expert's part.
        total: rows of all experts.
    """

    order: Tensor
    token: Tensor
    starts: Tensor
    position: Tensor
    bags: Tensor
    parts: list[Part]
    total: int

    def combine(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Each token's weighted sum over the rows [total, dim] of its slots: [tokens, dim]."""
        if not self.total:
            return rows.new_zeros(self.bags.numel(), rows.shape[1])
        return F.embedding_bag(self.position, rows, self.bags, mode="sum", per_sample_weights=weight)

    def gather(self, hidden: Tensor, part: Part, weight: Tensor | None = None) -> Tensor:
        """The hidden states of an expert's tokens, zeros behind them: [padded, dim], a new tensor.

        Args:
            hidden: [tokens, dim].
            weight: [S], a factor for each sorted slot, in the dtype of `hidden`; None: 1.
        """
        factor = None if weight is None else weight[part.slots]
        # bags of one token, and of none: with its weighting and its padding half the time of index_select, mul and zero
        return F.embedding_bag(
            self.token[part.slots], hidden, self.starts[part.rows], mode="sum", per_sample_weights=factor
        )


def plan(slots: Slots, num_experts: int) -> Plan:
    """The plan for these slots. numpy sorts short integers by radix: a tenth of torch.argsort's time."""
    narrow = np.uint8 if num_experts <= 256 else np.uint16 if num_experts <= 65536 else np.int64
    ids = slots.expert.numpy().astype(narrow)
    order = np.argsort(ids, kind="stable")
    counts = np.bincount(ids, minlength=num_experts)
    parts, slot, row = [], 0, 0
    for count in counts.tolist():
        parts.append(Part(slice(slot, slot + count), count, slice(row, row + bucket(count))))
        slot, row = slot + count, parts[-1].rows.stop
    first_slot = np.array([part.slots.start for part in parts])
    first_row = np.array([part.rows.start for part in parts])
    padded = np.diff(first_row, append=row)
    position = np.empty_like(order)
    position[order] = np.arange(order.size) + np.repeat(first_row - first_slot, counts)
    starts = np.minimum(np.arange(row) - np.repeat(first_row, padded), np.repeat(counts, padded))
    k = slots.per_token
    token = order // k if k else np.searchsorted(slots.bags.numpy(), order, side="right") - 1
    tensor = torch.from_numpy
    return Plan(tensor(order), tensor(token), tensor(starts), tensor(position), slots.bags, parts, row)
