"""The experts in a few obvious lines: the oracle of every fast path, any dtype, gradcheck-able."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.routing import Routing


class ExpertParameters(NamedTuple):
    """The weights of E feed-forward experts, in nn.Linear's layout.

    `w_in` [E, hidden, dim], `w_out` [E, dim, hidden]; `b_in` [E, hidden], `b_out` [E, dim] or None;
    gated experts also `w_gate` [E, hidden, dim] and, with biases, `b_gate` [E, hidden].
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None
    w_gate: Tensor | None = None
    b_gate: Tensor | None = None


ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}


def expert(hidden: Tensor, index: int, parameters: ExpertParameters, activation: str, dropout: float = 0.0) -> Tensor:
    """One expert: W_out act(W_in x + b_in) + b_out; gated: W_out (act(W_gate x + b_gate) * (W_in x + b_in)) + b_out."""
    p = parameters
    up = F.linear(hidden, p.w_in[index], None if p.b_in is None else p.b_in[index])
    if p.w_gate is None:
        up = ACTIVATIONS[activation](up)
    else:
        up = up * ACTIVATIONS[activation](
            F.linear(hidden, p.w_gate[index], None if p.b_gate is None else p.b_gate[index])
        )
    return F.linear(F.dropout(up, dropout), p.w_out[index], None if p.b_out is None else p.b_out[index])


def apply_experts(
    hidden: Tensor, routing: Routing, parameters: ExpertParameters, activation: str = "relu", dropout: float = 0.0
) -> Tensor:
    """y_t = sum over the chosen pairs (t, e) of weight * expert_e(x_t).

    Args:
        hidden: [tokens, dim].
        routing: whose experts and weights are combined.
        dropout: probability with which hidden units of an expert are dropped (0 in evaluation).

    Returns:
        [tokens, dim], in the dtype of `hidden`.
    """
    pairs = routing.pairs
    output = torch.zeros_like(hidden)
    for index in range(parameters.w_in.shape[0]):
        rows = slice(int(pairs.offsets[index]), int(pairs.offsets[index + 1]))
        token = pairs.token[rows]
        weight = pairs.weight[rows].to(hidden.dtype)
        result = expert(hidden.index_select(0, token), index, parameters, activation, dropout)
        output = output.index_add(0, token, result * weight[:, None])
    return output
