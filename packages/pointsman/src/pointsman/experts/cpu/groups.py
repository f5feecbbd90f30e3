"""Which experts share one batched product: small ones, and those of nearly as many rows, through torch.bmm.

A group is a run of adjacent experts, each padded to the rows of its busiest. Where a product is small, the call costs
more than the padding. In bfloat16 torch.bmm is oneDNN's, and the better product for all but large experts; in float32
it is BLAS's, which pays for experts that are small or have few rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pointsman.ops.gemm import IN_CACHE
from pointsman.ops.kernels import Kernels

FEW_ROWS = 24  # in float32
PADDING = 20  # rows for every 100


class Grouping(NamedTuple):
    """When experts share a group.

    Attributes:
        spare: how many rows of padding cost less than one more product.
        rows_per_expert: how many rows an expert has at most.
        rows_per_group: how many rows a group has at most.
        percent: how many rows of padding for every 100 a group may have, besides.
    """

    spare: int
    rows_per_expert: int
    rows_per_group: int
    percent: int = 0


def grouping(dtype: torch.dtype, size: int, kernels: Kernels | None = None, assignments: int = 0) -> Grouping | None:
    """How experts whose weights have `size` elements are grouped; None: each is computed alone.

    Args:
        kernels: None for a bound on what any kernels would do.
        assignments: of the whole call. The gathered rows and gradients of a group are in memory at once, so that a
            group stays a share of the call.
    """
    if dtype == torch.bfloat16:
        if size > IN_CACHE:
            return None
        spare = min(128, (1 << 23) // size)
        padded = kernels is None or kernels.batched_bf16 == "padded"
        rows = 2048  # more rows leave the cache and gain little
        if padded:
            rows = max(rows, min(4096, (1 << 29) // size, assignments // 2))
        return Grouping(spare, rows, rows, PADDING if padded else 0)
    most = (1 << 22) // size if size <= 1 << 16 else FEW_ROWS
    return Grouping(min(128, (1 << 21) // size), most, 2048) if size <= 1 << 17 else None


def group(rows: list[int], first: int, end: int, limits: Grouping) -> list[tuple[int, int]]:
    """The experts from `first` to `end` in groups (first, number), given the rows that each needs alone."""
    number, busiest = end - first, max(rows[first:end])
    total = sum(rows[first:end])
    bound = min(limits.rows_per_group, total + total * limits.percent // 100 + (number - 1) * limits.spare)
    if number == 1 or (busiest <= limits.rows_per_expert and number * busiest <= bound):
        return [(first, number)]
    middle = first + number // 2
    return group(rows, first, middle, limits) + group(rows, middle, end, limits)
