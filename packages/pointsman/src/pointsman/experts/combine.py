"""What a layer does with a routing beyond adding weighted outputs: slots, means of outputs, weights on inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pointsman.ops.linear import upcast
from pointsman.routing import Routing, Slots, one_expert_each

Run = Callable[[Tensor, Routing], Tensor]


def combine(experts: Run, hidden: Tensor, routing: Routing) -> tuple[Tensor, dict[str, Tensor]]:
    """The output [tokens, dim] of `experts` (hidden [tokens, dim], a Routing), and statistics for the router.

    The statistics are those that `Selection.means` asks for; otherwise there are none.
    """
    if routing.slots is not None:
        return through_slots(experts, hidden, routing.slots), {}
    if routing.means is None and not routing.weigh_input:
        return experts(hidden, routing), {}
    pairs = routing.pairs
    weight = pairs.weight.to(hidden.dtype)[:, None]
    rows = hidden.index_select(0, pairs.token)
    each = one_expert_each(pairs.expert, routing.num_experts, pairs.weight.dtype)
    result = experts(rows * weight if routing.weigh_input else rows, each)
    weighted = result if routing.weigh_input else result * weight.to(result.dtype)
    output = result.new_zeros(hidden.shape).index_add(0, pairs.token, weighted)
    if routing.means is None:
        return output, {}
    means = routing.means
    output = output + means.weights.to(output.dtype) @ means.values.to(output.dtype)
    found = upcast(result.detach())
    outputs = found.new_zeros(routing.num_experts, found.shape[-1]).index_add(0, pairs.expert, found)
    return output, {"select.outputs": outputs, "select.served": pairs.offsets.diff()}


def through_slots(experts: Run, hidden: Tensor, slots: Slots) -> Tensor:
    """y = C E(D^T x), for each sequence (Soft MoE, Puigcerver et al. 2023, arXiv 2308.00951): [tokens, dim]."""
    batch, length, num_experts, each = slots.dispatch.shape
    dispatch = slots.dispatch.flatten(2).to(hidden.dtype)
    mixed = dispatch.transpose(1, 2) @ hidden.view(batch, length, hidden.shape[-1])  # [B, E P, dim]
    expert = torch.arange(num_experts, device=hidden.device).repeat_interleave(each).repeat(batch)
    result = experts(mixed.flatten(0, 1), one_expert_each(expert, num_experts, slots.dispatch.dtype))
    back = slots.combine.flatten(2).to(result.dtype)
    return (back @ result.view(batch, num_experts * each, result.shape[-1])).flatten(0, 1)
