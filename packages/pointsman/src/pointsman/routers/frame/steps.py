"""What happens to a selection after the choice, where an option asks for it: steps `Selection -> Selection`.

Virtual experts: AdaMoE (Zeng et al. 2024, arXiv 2406.13233), MoE++ (Jin et al. 2024, arXiv 2410.07348), LongCat. They
take part in the choice but cost next to nothing: `zero` adds nothing, `copy` adds its weight times the input,
`constant` a trained mix of the input and a vector. Their scores are the columns after those of the E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pointsman.experts.combine import PerPair, Virtual
from pointsman.routers.frame.stage_values import LossInput, Selection
from pointsman.routers.frame.stages import renormalized

Kind = Literal["zero", "copy", "constant", "mixed"]
MOST_NULLS = 4096


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


def weightless(selection: Selection, given: LossInput, *, virtual: tuple[str, ...], renormalize: bool) -> Selection:
    """Weight 0 for chosen zero experts; with `renormalize` the other weights sum to 1 again."""
    start = given.num_experts + virtual.index("zero")  # one kind's columns are in one run
    zero = (selection.experts >= start) & (selection.experts < start + virtual.count("zero"))
    weights = selection.weights.masked_fill(zero, 0)
    return replace(selection, weights=renormalized(weights) if renormalize else weights)


def scaled(selection: Selection, given: LossInput, *, factor: float) -> Selection:
    """All weights times `factor`."""
    return replace(selection, weights=selection.weights * factor, how=selection.combine.scaled(factor))


def apart(selection: Selection, given: LossInput, *, virtual: int) -> Selection:
    """Virtual experts are taken out: -1 in their places, their weights [N, V] beside the others'."""
    experts, weights = selection.experts, selection.weights
    column = experts - given.num_experts
    others = column < 0
    shares = weights.new_zeros(weights.shape[0], virtual + 1)
    shares = shares.scatter(1, column.masked_fill(others, virtual), weights)[:, :virtual]
    left = selection.without(~others)
    return replace(left, how=Virtual(first=given.num_experts, every=experts, shares=shares, inner=left.combine))


def on_inputs(selection: Selection, given: LossInput) -> Selection:
    """A weight multiplies its expert's input."""
    combine = selection.combine
    if isinstance(combine, Virtual):
        return replace(selection, how=replace(combine, inner=PerPair(on_input=True)))
    if isinstance(combine, PerPair):
        return replace(selection, how=replace(combine, on_input=True))
    return replace(selection, how=PerPair(flat=combine.flat, on_input=True))
