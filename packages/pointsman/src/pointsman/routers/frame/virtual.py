"""Virtual experts: AdaMoE (Zeng et al. 2024, arXiv 2406.13233), MoE++ (Jin et al. 2024, arXiv 2410.07348), LongCat.

They take part in the choice but cost next to nothing: `zero` adds nothing, `copy` adds its weight times the input,
`constant` a trained mix of the input and a vector. Their scores are the columns after those of the E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pointsman.routers.frame.stage_values import Selection

Kind = Literal["zero", "copy", "constant", "mixed"]


def virtual_experts(router: str, nulls: int, kind: Kind) -> tuple[str, ...]:
    """The kinds of the virtual experts, in the order of their columns.

    Raises:
        ValueError: `nulls` is less than the 3 that `mixed` needs; `router` is named.
    """
    if kind != "mixed":
        return (kind,) * nulls
    if nulls < 3:
        raise ValueError(f"{router}: option nulls={nulls}: kind=mixed allows whole numbers from 3")
    return ("zero", "copy", *("constant",) * (nulls - 2))


def weightless(selection: Selection, num_experts: int, virtual: tuple[str, ...], renormalize: bool) -> Selection:
    """The selection with weight 0 for chosen zero experts; with `renormalize` the other weights sum to 1 again."""
    # one kind's columns are in one run
    start = num_experts + virtual.index("zero")
    zero = (selection.experts >= start) & (selection.experts < start + virtual.count("zero"))
    weights = selection.weights.masked_fill(zero, 0)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return replace(selection, weights=weights)


def apart(experts: Tensor, weights: Tensor, num_experts: int, virtual: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [N, k] with -1 for virtual ones, their weights [N, k], and the virtual experts' weights [N, V]."""
    column = experts - num_experts
    other = column < 0
    apart = weights.new_zeros(weights.shape[0], virtual + 1)
    apart = apart.scatter(1, column.masked_fill(other, virtual), weights)
    return experts.masked_fill(~other, -1), weights.masked_fill(~other, 0), apart[:, :virtual]
