"""What a router decided (`Routing`), and what it may look at (`RoutingContext`).

Shapes: B sequences, T tokens a sequence, E experts, k chosen experts, H heads, D head width, S keys (memory + T).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


def check_padding_mask(mask: Tensor, shape: Sequence[int], where: str = "") -> None:
    """ValueError unless a padding mask is of this shape and bool."""
    if list(mask.shape) != list(shape):
        raise ValueError(f"{where}padding_mask must be {list(shape)}, got {list(mask.shape)}")
    if mask.dtype != torch.bool:
        raise ValueError(f"{where}padding_mask must be bool, True for a real token, got {mask.dtype}")


Responses = Callable[[Callable[[Tensor], tuple[Tensor, ...]]], tuple[Tensor, ...]]
"""Applies a function of all experts' outputs, [n, E, dim] -> tensors [n, ...], to all tokens, in chunks."""

RouterState = Mapping[str, Tensor]
"""What a mixer needs of earlier tokens: tensors [B, S, ...], the newest token last."""


@dataclass(frozen=True)
class Pairs:
    """The chosen (token, expert) pairs, sorted by expert: what the kernels read.

    Attributes:
        token: [P] int64, the row of each pair in the flattened hidden states.
        expert: [P] int64, ascending.
        weight: [P], the combine weight of each pair (differentiable).
        offsets: [E + 1] int64; the pairs of expert e are `offsets[e]:offsets[e + 1]`.
    """

    token: Tensor
    expert: Tensor
    weight: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class AttentionTrace:
    """The attention that produced the router's input, for routers that let attended tokens inform each other.

    Attributes:
        query: [B, H, T, D]; key, value: [B, H, S, D] with S = memory + T.
        out_weight: [H, D, dim], the blocks of the output projection as it is.
        output: [B, T, dim], the raw attention output, before residual and norm.
        scale: factor of the query-key products.
        bias: function (start, stop) of a block of query rows to what is added to the scaled products of that block,
            [B, H, stop - start, S] or broadcastable to it; None without a relative-position term.
        side_by_side: [B, T, H * D], the heads' outputs, if `output` is their projection by `out_weight` and nothing
            else: what an output projection keeps anyway, so that nobody has to keep `output`.
        each_head: queries, keys and values again, as a tuple of H tensors [B, T or S, D] each, if gradients of few
            heads are cheaper through these than through the whole.
        causal: whether each query saw only itself and earlier keys, also where the router's context is not causal.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out_weight: Tensor
    output: Tensor
    scale: float
    bias: Callable[[int, int], Tensor] | None = None
    side_by_side: Tensor | None = None
    each_head: tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    causal: bool = False


@dataclass(frozen=True)
class RoutingContext:
    """All that a router may look at besides the hidden states.

    Attributes:
        causal: whether token i may only depend on tokens j <= i of its sequence.
        padding_mask: [B, T] bool, True for a real token; None where all are real.
        token_ids: [B, T] int64.
        attention: the trace of the attention before the layer.
        past: what `Routing.carry` of the earlier segment handed on.
        responses: asks all experts of the layer (`Responses`); the layer gives it to a router that asks.
        below: what `Routing.above` of the sparse layer below handed on: tensors [B, T, ...], with gradient.
    """

    causal: bool = True
    padding_mask: Tensor | None = None
    token_ids: Tensor | None = None
    attention: AttentionTrace | None = None
    past: RouterState | None = None
    below: RouterState | None = None
    responses: Responses | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Slots:
    """Soft routing: each expert sees P weighted means of a sequence's tokens.

    Attributes:
        dispatch: [B, T, E, P], the weight of each token in each slot.
        combine: [B, T, E, P], the weight of each slot's output in each token's output.
    """

    dispatch: Tensor
    combine: Tensor


@dataclass(frozen=True)
class Means:
    """Means of the experts' earlier outputs, which stand for the experts that a token did not choose.

    Attributes:
        weights: [B*T, E], 0 where the expert was chosen, and for padding.
        values: [E, dim].
    """

    weights: Tensor
    values: Tensor


@dataclass(frozen=True)
class Routing:
    """Which experts, with what weight.

    Attributes:
        experts: [B*T, k] int64; -1 means none (padding, over capacity). Under expert choice [B*T, E].
        weights: [B*T, k], the combine weights, at least float32; 0 where experts is -1.
        probs: [B*T, E], the distribution that selection saw, after mixing.
        logits: [B*T, E], before normalisation and mixing.
        losses: name -> scalar, already weighted.
        carry: what the router needs of these tokens later, for `RoutingContext.past`.
        unmixed: [B*T, E], the distribution before mixing; `probs` itself without a mixer.
        statistics: what the router's stages sum over a step, by `stage.name`, detached.
        flat: pairs that a router chose itself (expert choice); otherwise they follow from experts and weights.
        virtual: V, how many of the last columns of probs and logits are virtual experts, which have no weights in the
            layer's experts; a chosen one is -1 in `experts`.
        virtual_weights: [B*T, V], the combine weights of virtual experts, 0 where not chosen; None without any.
        chosen: [B*T, k], `experts` with E + v in the place of virtual expert v; None without virtual experts.
        above: what the sparse layers above get as `RoutingContext.below`.
        slots: of soft routing; experts and weights then only tell how much of each expert is in a token's output.
        means: what is added for the experts that were not chosen.
        weigh_input: whether a weight multiplies its expert's input, not the output.
    """

    experts: Tensor
    weights: Tensor
    probs: Tensor
    logits: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    carry: RouterState | None = None
    unmixed: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    flat: Pairs | None = None
    virtual: int = 0
    virtual_weights: Tensor | None = None
    chosen: Tensor | None = None
    above: RouterState | None = None
    slots: Slots | None = None
    means: Means | None = None
    weigh_input: bool = False

    @property
    def num_experts(self) -> int:
        """E, without virtual experts."""
        return self.probs.shape[-1] - self.virtual

    @property
    def pairs(self) -> Pairs:
        """The expert-sorted pairs; assignments to -1 are left out."""
        if self.flat is not None:
            return self.flat
        order, expert, offsets = self._sorted
        # the weight is taken anew each time: one that is kept belongs to the first use's graph, freed by its backward
        weight = self.weights.reshape(-1).index_select(0, order)
        return Pairs(order // self.experts.shape[-1], expert, weight, offsets)

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The assignments [P] in the order of their experts, their experts, and `Pairs.offsets`."""
        chosen = self.experts.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        if chosen.is_meta:  # shapes alone: as if no assignment were to -1
            return order, chosen, chosen.new_empty(self.num_experts + 1)
        order = order[chosen.index_select(0, order) >= 0]
        expert = chosen.index_select(0, order)
        offsets = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=chosen.device)
        offsets[1:] = torch.bincount(expert, minlength=self.num_experts).cumsum(0)
        return order, expert, offsets

    def detach(self) -> Routing:
        """The same routing without autograd history."""

        def state(tensors: RouterState | None) -> RouterState | None:
            return None if tensors is None else {name: value.detach() for name, value in tensors.items()}

        flat, slots, means = self.flat, self.slots, self.means
        return replace(
            self,
            weights=self.weights.detach(),
            probs=self.probs.detach(),
            logits=self.logits.detach(),
            losses={name: value.detach() for name, value in self.losses.items()},
            carry=state(self.carry),
            unmixed=None if self.unmixed is None else self.unmixed.detach(),
            flat=None if flat is None else replace(flat, weight=flat.weight.detach()),
            above=state(self.above),
            slots=None if slots is None else Slots(slots.dispatch.detach(), slots.combine.detach()),
            means=None if means is None else Means(means.weights.detach(), means.values.detach()),
            virtual_weights=None if self.virtual_weights is None else self.virtual_weights.detach(),
        )


def one_expert_each(expert: Tensor, num_experts: int, dtype: torch.dtype) -> Routing:
    """The routing that sends each row to the expert `expert` [P] with weight 1."""
    one = torch.ones(expert.shape[0], 1, dtype=dtype, device=expert.device)
    return Routing(expert[:, None], one, one.expand(-1, num_experts), one)
