"""Capacity: how many assignments an expert takes at most, and which ones it keeps.

Shapes: G groups (sequences, or one batch), L tokens of a group, W choices a token, best first.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from pointsman.routers.frame.stage_values import LossInput, Selection
from pointsman.routers.frame.stages import Stage
from pointsman.routing import RoutingContext

ROUNDING = 1e-9  # 1.1 * 100 * 2 / 4 is 55, and a little more in floating point
Order = Literal["token", "rank", "priority"]
Scope = Literal["sequence", "batch"]
Unit = Literal["share", "tokens"]


class Capacity(Stage):
    """An expert takes at most ceil(factor L k / E) assignments of a group, L without padding; at least one.

    Args:
        training, evaluation: the factor in each mode; None: nothing is dropped.
        order: who comes first. "token": earlier tokens, then better choices of a token; what is kept at a token depends
            on no later token, but on how many there are. "rank": all first choices, then all second ones, …, earlier
            tokens first (GShard, V-MoE). "priority": the same with tokens by falling largest probability (V-MoE's batch
            priority routing).
        scope: what a group is: each "sequence", or all tokens of the micro-"batch".
        unit: what the factor is: a "share" of L k / E, or the number of assignments itself ("tokens").
    """

    def __init__(
        self, training: float | None, evaluation: float | None, order: Order, scope: Scope, unit: Unit = "share"
    ) -> None:
        super().__init__()
        self.factors, self.order, self.scope, self.unit = (training, evaluation), order, scope, unit
        if unit == "tokens" and not all(one is None or float(one).is_integer() for one in self.factors):
            raise ValueError("capacity_unit=tokens: capacity and eval_capacity must be whole numbers")
        causal, invariant = order == "token" and scope == "sequence", scope == "sequence"
        self.causal, self.batch_invariant = causal or evaluation is None, invariant or evaluation is None
        self.training_causal = causal or training is None
        self.training_batch_invariant = invariant or training is None

    @property
    def factor(self) -> float | None:
        """That of the present mode."""
        return self.factors[0 if self.training else 1]

    def step(self, selection: Selection, given: LossInput) -> Selection:
        """The selection without what is over capacity; a replayed one, which was limited before, stays."""
        if self.factor is None or given.replayed:
            return selection
        kept = self(selection.experts, given.probs, given.num_experts, given.k, given.context, given.batch)
        return selection.without(kept < 0)

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
        each = self.factor * k / num_experts
        counted = self.unit == "tokens"
        capacity: Tensor | int = int(self.factor) if counted else max(1, math.ceil(each * length - ROUNDING))
        slots = experts.reshape(groups, length * width)
        if mask is not None:
            slots = torch.where(mask.repeat_interleave(width, dim=1), slots, num_experts)
        if mask is not None and not counted:
            exact = torch.float32 if mask.device.type == "mps" else torch.float64  # which has nothing better
            tokens = mask.sum(1, keepdim=True, dtype=exact)
            capacity = torch.ceil(each * tokens - ROUNDING).clamp_min(1).long()
        if self.order == "token":
            kept = _places(slots) < capacity
        else:
            turn = self._turn(probs.detach().reshape(groups, length, probs.shape[-1]), width)
            kept = torch.empty_like(slots, dtype=torch.bool)
            kept.scatter_(1, turn, _places(slots.gather(1, turn)) < capacity)
        return experts.masked_fill(~kept.reshape(-1, width), -1)

    def _turn(self, probs: Tensor, width: int) -> Tensor:
        """[G, L W]: the assignments, as places in reading order, in the order in which they take their places."""
        groups, length, _ = probs.shape
        if self.order == "priority":
            tokens = probs.amax(-1).argsort(dim=1, descending=True, stable=True)
        else:
            tokens = torch.arange(length, device=probs.device).expand(groups, length)
        ranks = torch.arange(width, device=probs.device)[None, :, None]
        return (tokens[:, None] * width + ranks).flatten(1)

    def extra_repr(self) -> str:
        training, evaluation = self.factors
        return f"training={training}, evaluation={evaluation}, order={self.order}, scope={self.scope}, unit={self.unit}"


def _places(slots: Tensor) -> Tensor:
    """[G, S]: how many earlier assignments of the group went to the same expert; by sorting, not a one-hot."""
    order = torch.argsort(slots, dim=1, stable=True)
    ordered = slots.gather(1, order)
    start = torch.searchsorted(ordered, ordered, right=False)
    return torch.empty_like(slots).scatter_(1, order, torch.arange(slots.shape[1], device=slots.device) - start)
