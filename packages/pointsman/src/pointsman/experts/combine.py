"""What a layer may do with a routing beyond adding weighted outputs (`pointsman.routing.Combine`): one class a kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pointsman.experts.shared import CHUNK
from pointsman.ops.linear import refuse_second_derivatives, upcast
from pointsman.routing import Combine, Routing, one_expert_each


@dataclass(frozen=True)
class PerPair(Combine):
    """Each pair's output on its own.

    Attributes:
        on_input: whether a weight multiplies its expert's input, not its output (Llama 4).
        means: [E, dim], which stand for the outputs of experts that a token did not choose (Default MoE); the sums of
            the experts' outputs are then statistics of the selector: `outputs` [E, dim] and `served` [E].
        others: [B*T, E], the weights of the means: 0 where the expert was chosen, and for padding.
    """

    on_input: bool = False
    means: Tensor | None = None
    others: Tensor | None = None
    one_graph: ClassVar[bool] = False

    def __call__(self, layer: Any, hidden: Tensor, routing: Routing) -> tuple[Tensor, Mapping[str, Tensor]]:
        pairs = routing.pairs
        weight = pairs.weight.to(hidden.dtype)[:, None]
        rows = hidden.index_select(0, pairs.token)
        each = one_expert_each(pairs.expert, routing.num_experts, pairs.weight.dtype)
        result = layer.experts(rows * weight if self.on_input else rows, each)
        weighted = result if self.on_input else result * weight.to(result.dtype)
        output = result.new_zeros(hidden.shape).index_add(0, pairs.token, weighted)
        if self.means is None or self.others is None:
            return output, {}
        output = output + self.others.to(output.dtype) @ self.means.to(output.dtype)
        found = upcast(result.detach())
        outputs = found.new_zeros(routing.num_experts, found.shape[-1]).index_add(0, pairs.expert, found)
        return output, {"select.outputs": outputs, "select.served": pairs.offsets.diff()}

    def scaled(self, factor: float) -> Combine:
        kept = super().scaled(factor)
        return PerPair(kept.flat, self.on_input, self.means, None if self.others is None else self.others * factor)

    def weights(self) -> dict[str, Tensor]:
        return {} if self.others is None else {"means": self.others}

    def weighted(self, weights: Mapping[str, Tensor]) -> Combine:
        return replace(self, flat=None, others=weights.get("means"))


class _OfOthers(torch.autograd.Function):
    """0 [tokens, dim], whose gradient of `others` [tokens, E] is that of the sum of all experts' outputs times it."""

    @staticmethod
    def forward(ctx: Any, others: Tensor, output: Tensor, hidden: Tensor, experts: Any) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.experts, ctx.dtype = experts, others.dtype
        return torch.zeros_like(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("dense_gradient", plain=False)
        hidden: Tensor = ctx.saved_tensors[0]
        parts = zip(torch.split(hidden, CHUNK), torch.split(grads[0], CHUNK), strict=True)
        found = [torch.einsum("ted,td->te", upcast(ctx.experts.every(one)), upcast(grad)) for one, grad in parts]
        return torch.cat(found).to(ctx.dtype), None, None, None


@dataclass(frozen=True)
class Dense(Combine):
    """The weighted sum, and a gradient for weights that the other experts' outputs would have (DenseMixer, 2025).

    Attributes:
        others: [B*T, E], these weights; 0 where an expert was chosen, and for padding. They change no output.
    """

    others: Tensor = field(kw_only=True)
    one_graph: ClassVar[bool] = False

    def __call__(self, layer: Any, hidden: Tensor, routing: Routing) -> tuple[Tensor, Mapping[str, Tensor]]:
        output = layer.experts(hidden, routing)
        if torch.is_grad_enabled() and self.others.requires_grad:
            output = output + _OfOthers.apply(self.others, output.detach(), hidden.detach(), layer.experts)  # type: ignore[no-untyped-call]
        return output, {}


def on_inputs(combine: Combine) -> Combine:
    """The same, but a weight multiplies its expert's input."""
    if isinstance(combine, Virtual):
        return replace(combine, inner=on_inputs(combine.inner))
    return replace(combine if isinstance(combine, PerPair) else PerPair(combine.flat), on_input=True)


@dataclass(frozen=True)
class Slots(Combine):
    """y = C E(D^T x), for each sequence: each expert sees P weighted means of its tokens (Soft MoE, arXiv 2308.00951).

    Experts and weights of the routing then only tell how much of each expert is in a token's output.

    Attributes:
        dispatch: D [B, T, E, P], the weight of each token in each slot.
        combine: C [B, T, E, P], the weight of each slot's output in each token's output.
    """

    dispatch: Tensor = field(kw_only=True)
    combine: Tensor = field(kw_only=True)

    def __call__(self, layer: Any, hidden: Tensor, routing: Routing) -> tuple[Tensor, Mapping[str, Tensor]]:
        batch, length, num_experts, each = self.dispatch.shape
        dispatch = self.dispatch.flatten(2).to(hidden.dtype)
        mixed = dispatch.transpose(1, 2) @ hidden.view(batch, length, hidden.shape[-1])  # [B, E P, dim]
        expert = torch.arange(num_experts, device=hidden.device).repeat_interleave(each).repeat(batch)
        result = layer.experts(mixed.flatten(0, 1), one_expert_each(expert, num_experts, self.dispatch.dtype))
        back = self.combine.flatten(2).to(result.dtype)
        return (back @ result.view(batch, num_experts * each, result.shape[-1])).flatten(0, 1), {}

    def weights(self) -> dict[str, Tensor]:
        return {"dispatch": self.dispatch, "combine": self.combine}

    def weighted(self, weights: Mapping[str, Tensor]) -> Combine:
        return Slots(dispatch=weights["dispatch"], combine=weights["combine"])


@dataclass(frozen=True)
class Virtual(Combine):
    """`inner`, and what virtual experts add (`pointsman.experts.shared`).

    Attributes:
        first: E.
        every: [B*T, k], what was chosen, with E + v for virtual expert v.
        shares: [B*T, V], the combine weights of virtual experts, 0 where not chosen.
        inner: how the other experts' outputs are combined.
    """

    first: int = field(kw_only=True)
    every: Tensor = field(kw_only=True)
    shares: Tensor = field(kw_only=True)
    inner: Combine = field(kw_only=True)

    @property
    def virtual(self) -> int:  # type: ignore[override]
        return self.shares.shape[1]

    @property
    def one_graph(self) -> bool:  # type: ignore[override]
        return self.inner.one_graph

    def __call__(self, layer: Any, hidden: Tensor, routing: Routing) -> tuple[Tensor, Mapping[str, Tensor]]:
        output, statistics = self.inner(layer, hidden, routing)
        if layer.virtual is not None:
            output = output + layer.virtual(hidden, self.shares).to(output.dtype)
        return output, statistics

    def chosen(self, experts: Tensor) -> Tensor:
        return torch.where(self.every < self.first, experts, self.every)

    def chosen_weights(self, weights: Tensor) -> Tensor:
        column = self.every - self.first
        return torch.where(column < 0, weights, self.shares.gather(1, column.clamp_min(0)))

    def joined(self, others: Sequence[Any]) -> Combine:
        every, shares = torch.cat([one.every for one in others]), torch.cat([one.shares for one in others])
        return replace(self, every=every, shares=shares, inner=Combine())

    def weights(self) -> dict[str, Tensor]:
        return {**self.inner.weights(), "virtual": self.shares}

    def weighted(self, weights: Mapping[str, Tensor]) -> Combine:
        return replace(self, inner=self.inner.weighted(weights), shares=weights["virtual"])

    def rows(self, function: Callable[[Tensor], Tensor]) -> Combine:
        return replace(self, inner=self.inner.rows(function), every=function(self.every), shares=function(self.shares))
