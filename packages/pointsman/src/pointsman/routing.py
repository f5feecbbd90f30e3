"""What a router decided (`Routing`), and what it may look at (`RoutingContext`).

Shapes: B sequences, T tokens a sequence, E experts, k chosen experts, H heads, D head width, S keys (memory + T).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

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
        query: [B, H, T, D]; key, value: [B, H, S, D], grouped heads repeated, with S = memory + T.
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
        past: what `Routing.carry` of the earlier segment handed on, of which a model keeps the newest rows.
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
class Combine:
    """How a layer makes its output of a routing: here the weighted sum of the chosen experts' outputs.

    The other kinds are in `pointsman.experts.combine`.

    Attributes:
        flat: the pairs, where the experts chose them; None: they follow from the routing's experts and weights.
    """

    flat: Pairs | None = None
    virtual: ClassVar[int] = 0
    """V, how many of the last columns of probs and logits are experts without weights in the layer's experts."""
    one_graph: ClassVar[bool] = True
    """Whether a compiler can make one graph of it: no shape depends on which experts were chosen."""

    def __call__(self, layer: Any, hidden: Tensor, routing: Routing) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The output [tokens, dim] of a layer's experts for hidden [tokens, dim], and statistics for the router.

        Args:
            layer: has `experts`, a function of (hidden, routing), and `virtual`, the virtual experts or None.
        """
        return layer.experts(hidden, routing), {}

    def scaled(self, factor: float) -> Combine:
        """The same with all weights that it holds times `factor`."""
        return self if self.flat is None else replace(self, flat=replace(self.flat, weight=self.flat.weight * factor))

    def chosen(self, experts: Tensor) -> Tensor:
        """`experts` [N, k] of the routing, with E + v where virtual expert v was chosen."""
        return experts

    def chosen_weights(self, weights: Tensor) -> Tensor:
        """`weights` [N, k] of the routing, with that of virtual expert v where it was chosen."""
        return weights

    def joined(self, others: Sequence[Any]) -> Combine:
        """That of the tokens of several routings in a row, `others` and this one's among them."""
        return Combine()

    def weights(self) -> dict[str, Tensor]:
        """The differentiable weights [tokens, ...] that enter the output besides `Routing.weights`."""
        return {}

    def weighted(self, weights: Mapping[str, Tensor]) -> Combine:
        """The same with other `weights`."""
        return replace(self, flat=None)

    def rows(self, function: Callable[[Tensor], Tensor]) -> Combine:
        """What is left of it of rows that `function` took from each tensor of a row for each token."""
        return Combine()


WEIGHTED_SUM = Combine()


@dataclass(frozen=True)
class Routing:
    """Which experts, with what weight.

    Attributes:
        experts: [B*T, k] int64; -1: none (padding, over capacity, a virtual expert). Where experts choose [B*T, E].
        weights: [B*T, k], the combine weights, at least float32; 0 where experts is -1.
        probs: [B*T, E], the distribution that selection saw, after mixing.
        logits: [B*T, E], before normalisation and mixing.
        losses: name -> scalar, already weighted.
        carry: tensors [B, S, ...] of the S tokens so far that later ones need, for `RoutingContext.past`.
        unmixed: [B*T, E], the distribution before mixing; `probs` itself without a mixer.
        statistics: what the router's stages sum over a step, by `stage.name`, detached.
        above: what the sparse layers above get as `RoutingContext.below`.
        how: how the layer makes its output of this; None: by the weighted sum. Read `combine`.
    """

    experts: Tensor
    weights: Tensor
    probs: Tensor
    logits: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    carry: RouterState | None = None
    unmixed: Tensor | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    above: RouterState | None = None
    how: Combine | None = None  # torch.compile makes no graph of an object as default

    @property
    def combine(self) -> Combine:
        """How the layer makes its output of this."""
        return WEIGHTED_SUM if self.how is None else self.how

    @property
    def num_experts(self) -> int:
        """E, without virtual experts."""
        return self.probs.shape[-1] - self.combine.virtual

    @property
    def chosen(self) -> Tensor:
        """[B*T, k]: `experts` with E + v in the place of virtual expert v."""
        return self.combine.chosen(self.experts)

    @property
    def chosen_weights(self) -> Tensor:
        """[B*T, k]: the combine weights of `chosen`."""
        return self.combine.chosen_weights(self.weights)

    @property
    def dense_weights(self) -> Tensor:
        """[B*T, E + V]: the combine weights by expert, 0 where not chosen; those of virtual experts last."""
        empty = torch.zeros_like(self.probs, dtype=self.weights.dtype)
        return empty.scatter_add(1, self.chosen.clamp_min(0), self.chosen_weights)

    @property
    def requested(self) -> int:
        """How many experts each token asked for; 0 where experts chose tokens."""
        return self.experts.shape[-1] if self.combine.flat is None else 0

    @property
    def assignments(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weight, token and expert of the assignments, for kernels: [P] each; without pairs [B*T, k], token None."""
        flat = self.combine.flat
        return (self.weights, None, self.experts) if flat is None else (flat.weight, flat.token, flat.expert)

    @property
    def pairs(self) -> Pairs:
        """The expert-sorted pairs; assignments to -1 are left out."""
        if self.combine.flat is not None:
            return self.combine.flat
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
        found: Routing = _detached(self)
        return found


def check_given(spec: str, dim: int, needs: Set[str], hidden: Tensor, context: RoutingContext) -> None:
    """ValueError unless hidden states [B, T, dim] and their context are what a router of this spec can take."""
    if hidden.dim() != 3 or hidden.shape[-1] != dim or not hidden.dtype.is_floating_point:
        raise ValueError(f"{spec}: hidden: float [B, T, {dim}] or [N, {dim}], not {hidden.dtype} {[*hidden.shape]}")
    if context.padding_mask is not None:
        check_padding_mask(context.padding_mask, hidden.shape[:2], f"{spec}: ")
    for need in needs:
        if (given := getattr(context, need)) is None:
            raise ValueError(f"{spec}: the router needs RoutingContext.{need}, which this model does not give")
        if need == "token_ids" and given.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{spec}: RoutingContext.token_ids must be int64, got {given.dtype}")
        if need in ("token_ids", "attention"):
            seen, there = given.shape if need == "token_ids" else given.output.shape[:2], hidden.shape[:2]
            if seen != there:
                told = " tokens, the hidden states of ".join(" x ".join(map(str, one)) for one in (seen, there))
                raise ValueError(f"{spec}: RoutingContext.{need} is of {told}")


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, Mapping):
        return {name: _detached(one) for name, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _detached(getattr(value, one.name)) for one in fields(value)})
    return value


def one_expert_each(expert: Tensor, num_experts: int, dtype: torch.dtype) -> Routing:
    """The routing that sends each row to the expert `expert` [P] with weight 1."""
    one = torch.ones(expert.shape[0], 1, dtype=dtype, device=expert.device)
    return Routing(expert[:, None], one, one.expand(-1, num_experts), one)
