"""What the options of every router add: the balance loss, capacity, virtual experts, scale, weights on inputs.

Each is built only where an option asks for it. A step is a function `Selection -> Selection` after the choice.

Virtual experts: AdaMoE (Zeng et al. 2024, arXiv 2406.13233), MoE++ (Jin et al. 2024, arXiv 2410.07348), LongCat. They
take part in the choice but cost next to nothing: `zero` adds nothing, `copy` adds its weight times the input,
`constant` a trained mix of the input and a vector. Their scores are the columns after those of the E experts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pointsman import auxiliary
from pointsman.experts.combine import Dense, Virtual, on_inputs
from pointsman.ops.drawing import rand_like
from pointsman.ops.selection import members
from pointsman.routers.frame.stage_values import LossInput, Selection, Stage, Step, Tensors
from pointsman.routers.frame.stages import FLOOR, Stages, of_chosen, renormalized
from pointsman.routing import RoutingContext

ROUNDING = 1e-9  # 1.1 * 100 * 2 / 4 is 55, and a little more in floating point
Kind = Literal["zero", "copy", "constant", "mixed"]


class Balance(Stage):
    """E sum_i f_i P_i (`auxiliary.balance`), 1.0 at perfect balance.

    Args:
        scope, basis: the options `balance_scope` and `balance_on`; "sequence" with "scores" is DeepSeek-V3's, "step" is
            of Qiu et al. 2025, arXiv 2501.11873.
        temperature: of the softmax.
        reuse: whether the router's probabilities before mixing are that softmax.
        counted: the experts [N, j] that f counts; None: those that were chosen.
        virtual: how many of the last experts are virtual; eta: the factor of their part (MoE++).
        pooled: whether these are alike: their f is their mean f (AdaMoE's null experts).
    """

    def __init__(
        self, scope: str = "batch", basis: str = "softmax", temperature: float = 1.0, reuse: bool = False,
        counted: Callable[[LossInput], Tensor] | None = None, pooled: bool = False, virtual: int = 0, eta: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scope, self.basis, self.temperature, self.reuse = scope, basis, temperature, reuse
        self.counted, self.pooled, self.virtual, self.eta = counted, pooled, virtual, eta
        self.needs_step_end = scope == "step"

    def forward(self, given: LossInput) -> Tensor:
        probs, experts = self._probs(given), self._experts(given)
        if self.virtual:
            alike = probs[:, -self.virtual :]
            if self.pooled:  # the mean of P over them gives the same sum of f_i P_i as the mean of f
                alike = alike.mean(-1, keepdim=True).expand(-1, self.virtual)
            probs = torch.cat([probs[:, : -self.virtual], self.eta * alike], -1)
        if self.scope == "sequence":
            shape = given.batch, given.length
            mask = None if given.mask is None else given.mask.view(shape)
            probs, experts = (one.reshape(*shape, one.shape[-1]) for one in (probs, experts))
            return auxiliary.sequence_balance(probs, experts, mask, ranks=given.ranks)
        earlier = None
        if self.scope == "step" and self.training:
            earlier = self.sums.get("counts", torch.zeros(probs.shape[-1], dtype=torch.int64, device=probs.device))
        return auxiliary.balance(probs, experts, given.mask, earlier_counts=earlier, ranks=given.ranks)

    def statistics(self, given: LossInput) -> Tensors:
        """What `gather` is to sum."""
        if self.scope != "step" or not self.training:
            return {}
        return {"counts": auxiliary.assignment_counts(self._experts(given), given.logits.shape[-1])}

    def _probs(self, given: LossInput) -> Tensor:
        if self.basis == "scores":
            total = given.unmixed.sum(-1, keepdim=True)
            return given.unmixed / total.clamp_min(torch.finfo(total.dtype).tiny)
        return given.unmixed if self.reuse else torch.softmax(given.logits / self.temperature, -1)

    def _experts(self, given: LossInput) -> Tensor:
        experts = given.experts if self.counted is None else self.counted(given)
        return experts if given.mask is None else experts.masked_fill(~given.mask[:, None], -1)


class Capacity(Stage):
    """An expert takes at most ceil(factor L k / E) assignments of a group, L without padding; at least one.

    Args:
        training, evaluation: the factor in each mode; None: nothing is dropped.
        order, scope, unit, rounding, multiple: the options `capacity_…` (`entries.COMMON`). By "token" what is kept
            depends on no later token, but on how many there are; "round" takes halves to the even number.
        total: what the weights of the kept assignments sum to; 0: they stay as they are.
        divided: whether they are scores that were divided by their sum before.
    """

    def __init__(
        self, training: float | None, evaluation: float | None, order: str, scope: str, unit: str = "share",
        rounding: str = "ceil", multiple: int = 1, total: float = 0.0, divided: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.factors, self.order, self.scope, self.unit = (training, evaluation), order, scope, unit
        self.rounding, self.multiple, self.total, self.divided = rounding, multiple, total, divided
        self.one_process = "capacity_scope=batch is of all ranks' tokens together" if scope == "batch" else ""
        if unit == "tokens" and not all(one is None or float(one).is_integer() for one in self.factors):
            raise ValueError("capacity_unit=tokens: capacity and eval_capacity must be whole numbers")
        causal, invariant = order == "token" and scope == "sequence", scope == "sequence"
        self.causal, self.batch_invariant = causal or evaluation is None, invariant or evaluation is None
        self.training_causal = causal or training is None
        self.training_batch_invariant = invariant or training is None
        self.stochastic = order == "random" and evaluation is not None
        self.training_stochastic = order == "random" and training is not None

    @property
    def factor(self) -> float | None:
        """That of the present mode."""
        return self.factors[0 if self.training else 1]

    def step(self, selection: Selection, given: LossInput) -> Selection:
        """The selection without what is over capacity; a replayed one, which was limited before, loses nothing."""
        if self.factor is None:
            return selection
        if not given.replayed:
            kept = self(selection.experts, given.probs, given.num_experts, given.k, given.context, given.batch)
            selection = selection.without(kept < 0)
        if not self.total:
            return selection
        # divided twice by the sums of small scores, gradients would overflow
        weights = of_chosen(given.probs, selection.experts) if self.divided else selection.weights
        return replace(selection, weights=self.total * renormalized(weights))

    def forward(
        self, experts: Tensor, probs: Tensor, num_experts: int, k: int, context: RoutingContext, batch: int
    ) -> Tensor:
        """experts [N, W] in 0 … E - 1, -1 for none, probs [N, at least E] -> with -1 where an expert is full."""
        if self.factor is None:
            return experts
        width = experts.shape[1]  # E, not k, where experts choose
        groups = 1 if self.scope == "batch" else batch
        length = experts.shape[0] // max(groups, 1)
        mask = None if context.padding_mask is None else context.padding_mask.reshape(groups, length)
        slots = experts.reshape(groups, length * width)  # [N, W] -> [G, L W]
        if mask is not None:
            slots = torch.where(mask.repeat_interleave(width, dim=1), slots, num_experts)
        limit: Tensor | int = int(self.factor)
        if self.unit == "share":
            limit = self._limit(self.factor * k / num_experts, length, mask)
        if self.order == "token":
            kept = _places(slots) < limit
        else:
            turn = self._turn(probs.detach().reshape(groups, length, probs.shape[-1]), slots, width)
            kept = torch.empty_like(slots, dtype=torch.bool)
            kept.scatter_(1, turn, _places(slots.gather(1, turn)) < limit)
        return experts.masked_fill(~kept.reshape(-1, width), -1)

    def _limit(self, each: float, length: int, mask: Tensor | None) -> Tensor | int:
        """How many assignments each group's experts take, `each` for a real token: a number, or [G, 1]."""
        if mask is None:
            number = math.ceil(each * length - ROUNDING) if self.rounding == "ceil" else round(each * length)
            return -(-max(1, number) // self.multiple) * self.multiple
        exact = torch.float32 if mask.device.type == "mps" else torch.float64  # which has nothing better
        share = each * mask.sum(1, keepdim=True, dtype=exact)
        limit = (torch.ceil(share - ROUNDING) if self.rounding == "ceil" else share.round()).clamp_min(1).long()
        return -(-limit // self.multiple) * self.multiple

    def _turn(self, probs: Tensor, slots: Tensor, width: int) -> Tensor:
        """[G, L W]: the assignments, as places in reading order, in the order in which they take their places."""
        groups, length, _ = probs.shape
        if self.order == "probs":
            each = probs.gather(2, slots.reshape(groups, length, width).clamp(0, probs.shape[2] - 1))
            return each.flatten(1).argsort(dim=1, descending=True, stable=True)
        if self.order == "priority":
            tokens = probs.amax(-1).argsort(dim=1, descending=True, stable=True)
        elif self.order == "random":
            tokens = rand_like(probs[..., 0].reshape(-1, 1), self.ranks).view(groups, length).argsort(dim=1)
        else:
            tokens = torch.arange(length, device=probs.device).expand(groups, length)
        ranks = torch.arange(width, device=probs.device)[None, :, None]
        return (tokens[:, None] * width + ranks).flatten(1)


def _places(slots: Tensor) -> Tensor:
    """[G, S]: how many earlier assignments of the group went to the same expert; by sorting, not a one-hot."""
    order = torch.argsort(slots, dim=1, stable=True)
    ordered = slots.gather(1, order)
    start = torch.searchsorted(ordered, ordered, right=False)
    return torch.empty_like(slots).scatter_(1, order, torch.arange(slots.shape[1], device=slots.device) - start)


def virtual_experts(router: str, nulls: int, kind: Kind) -> tuple[str, ...]:
    """The kinds of the virtual experts, in the order of their columns; ValueError for fewer than `mixed` needs."""
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


def inputs(selection: Selection, given: LossInput) -> Selection:
    """Combine weights multiply the inputs of experts."""
    return replace(selection, how=on_inputs(selection.combine))


def all_outputs(selection: Selection, given: LossInput, *, scale: float, renormalize: bool) -> Selection:
    """Scores of the experts that were not chosen get a gradient, as if their outputs had entered with these weights."""
    gone = members(selection.experts, given.num_experts)
    others = scale * given.probs.masked_fill(gone if given.mask is None else gone | ~given.mask[:, None], 0)
    if renormalize:  # by the sum of the chosen ones, as a number
        others = others / of_chosen(given.probs, given.experts).sum(-1, keepdim=True).detach().clamp_min(FLOOR)
    return replace(selection, how=Dense(selection.combine.flat, others=others))


def after_the_choice(
    options: Mapping[str, Any], stages: Stages, virtual: tuple[str, ...], renormalize: bool
) -> tuple[Capacity | None, tuple[Step, ...]]:
    """The limit of capacity and all steps in their order, where the options of every router ask for them."""
    found: list[Step] = []
    scale, total = options["scale"], options["capacity_total"] == "one"
    if "zero" in virtual:
        found.append(partial(weightless, virtual=virtual, renormalize=renormalize))
    if scale != 1:
        found.append(partial(scaled, factor=scale))
    if virtual:
        found.append(partial(apart, virtual=len(virtual)))
    factors = options["capacity"], options["eval_capacity"]
    limit: Capacity | None = None
    if factors != (None, None):
        if total and virtual:
            raise ValueError("capacity_total=one: nulls, virtual experts, are not allowed with it")
        rest = {name: options[f"capacity_{name}"] for name in ("order", "scope", "unit", "rounding", "multiple")}
        evaluation = factors[0] if factors[1] is None else factors[1]
        small = renormalize and "distribution" not in stages.normalize.gives
        limit = Capacity(factors[0], evaluation, **rest, total=scale if total else 0.0, divided=small)
        found.append(limit.step)
    found += stages.steps
    if options["dense_gradient"]:
        found.append(partial(all_outputs, scale=scale, renormalize=renormalize))
    if options["weigh"] == "input":
        found.append(inputs)
    return limit, tuple(found)
