"""The experts in a few obvious lines: the oracle of every fast path, any dtype, gradcheck-able."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.feed_forward import ACTIVATIONS, ExpertParameters
from pointsman.routing import Routing


def experts(parameters: ExpertParameters) -> list[ExpertParameters]:
    """The experts one by one: views without the leading dimension.

    One `unbind` for all: under autograd `w_in[0]`, `w_in[1]`, ... would each make a gradient as large as all of `w_in`.
    """
    count = parameters.w_in.shape[0]
    columns = [[None] * count if tensor is None else tensor.unbind(0) for tensor in parameters]
    return [ExpertParameters(*views) for views in zip(*columns, strict=True)]


def expert(
    hidden: Tensor, parameters: ExpertParameters, activation: str, dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """One expert: W_out act(W_in x + b_in) + b_out; gated: W_out (act(W_gate x + b_gate) * (W_in x + b_in)) + b_out.

    Args:
        parameters: of one expert, without the leading dimension.
        dropout: probability with which a hidden unit is dropped; the others are scaled by 1 / (1 - dropout).
        generator: draws the dropped units; None: the default generator.
    """
    p = parameters
    up = F.linear(hidden, p.w_in, p.b_in)
    if p.w_gate is None:
        units = ACTIVATIONS[activation](up)
    else:
        units = up * ACTIVATIONS[activation](F.linear(hidden, p.w_gate, p.b_gate))
    if dropout:
        kept = torch.empty_like(units).bernoulli_(1 - dropout, generator=generator)
        units = units * kept / max(1 - dropout, 1e-12)
    return F.linear(units, p.w_out, p.b_out)


def apply_experts(
    hidden: Tensor, routing: Routing, parameters: ExpertParameters, activation: str = "relu", dropout: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """y_t = sum over the chosen pairs (t, e) of weight * expert_e(x_t).

    Args:
        hidden: [tokens, dim].
        routing: whose experts and weights are combined.
        dropout: probability with which hidden units of an expert are dropped (0 in evaluation).
        generator: draws the dropped units; None: the default generator.

    Returns:
        [tokens, dim], in the dtype of `hidden`.
    """
    pairs = routing.pairs
    output = torch.zeros_like(hidden)
    for index, one in enumerate(experts(parameters)):
        rows = slice(int(pairs.offsets[index]), int(pairs.offsets[index + 1]))
        token = pairs.token[rows]
        weight = pairs.weight[rows].to(hidden.dtype)
        result = expert(hidden.index_select(0, token), one, activation, dropout, generator)
        output = output.index_add(0, token, result * weight[:, None])
    return output
