"""The experts on a CPU as one differentiable operation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointsman.experts.cpu import products
from pointsman.experts.cpu.memory import empty_gradient
from pointsman.experts.cpu.products import Options
from pointsman.experts.cpu.sorting import Sorted, refuse_beyond, sort
from pointsman.ops.feed_forward import ACTIVATIONS, ExpertParameters
from pointsman.ops.linear import refuse_second_derivatives

DTYPES = {torch.float32, torch.bfloat16}


class Chosen(NamedTuple):
    """The experts of each token: `expert` [tokens, k] (-1: none); or, with `token` [A], pairs: `expert` [A]."""

    token: Tensor | None
    expert: Tensor

    def sorted_for(self, p: ExpertParameters) -> Sorted:
        """The assignments in the order of their experts."""
        num_experts, width, dim = p.w_in.shape
        whole = not (width | dim) * p.w_in.element_size() % 16  # grouped_mm takes rows of whole 16 bytes
        return sort(*self, num_experts, max(width, dim), together=whole)


def apply(hidden: Tensor, weight: Tensor, chosen: Chosen, parameters: ExpertParameters, options: Options) -> Tensor:
    """The experts' combined output [tokens, dim], for contiguous tensors of one dtype of `DTYPES`."""
    given = (hidden, weight, *parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        output: Tensor = _Experts.apply(hidden, weight, chosen, options, *parameters)  # type: ignore[no-untyped-call]
        return output
    return evaluate(hidden, weight, chosen, parameters, options)


def evaluate(hidden: Tensor, weight: Tensor, chosen: Chosen, parameters: ExpertParameters, options: Options) -> Tensor:
    """`apply` where no backward follows."""
    if chosen.token is None and len(hidden) == 1 and not options.dropout:
        return _one_token(hidden[0], weight[0].tolist(), chosen.expert[0].tolist(), parameters, options.activation)
    return products.forward(hidden, weight, chosen.sorted_for(parameters), parameters, options, save=False)[0]


def _one_token(
    hidden: Tensor, weights: list[float], experts: list[int], p: ExpertParameters, activation: str
) -> Tensor:
    """Decoding: nothing is sorted, and as few calls as possible, since these and reading the weights take the time."""
    refuse_beyond(max(experts), len(p.w_in))
    output = torch.zeros_like(hidden, dtype=torch.float32)

    def linear(row: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        return torch.mv(weight[expert], row) if bias is None else torch.addmv(bias[expert], weight[expert], row)

    for expert, weight in zip(experts, weights, strict=True):
        if expert >= 0:
            units = linear(hidden, p.w_in, p.b_in, expert)
            if p.w_gate is None:
                units = units.relu_() if activation == "relu" else ACTIVATIONS[activation](units)
            else:
                units.mul_(ACTIVATIONS[activation](linear(hidden, p.w_gate, p.b_gate, expert)))
            output.add_(linear(units, p.w_out, p.b_out, expert), alpha=weight)
    return output.to(hidden.dtype)[None]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, chosen: Chosen, options: Options, *tensors: Tensor | None
    ) -> Tensor:
        parameters = ExpertParameters(*tensors)  # type: ignore[arg-type]
        ctx.at, ctx.options = chosen.sorted_for(parameters), options
        output, saved = products.forward(hidden, weight, ctx.at, parameters, options, save=True)
        ctx.save_for_backward(hidden, weight, *tensors, *(tensor for kept in saved for tensor in kept))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        hidden, weight, *rest = ctx.saved_tensors
        parameters, flat = ExpertParameters(*rest[:6]), rest[6:]
        each = 1 if parameters.w_gate is None else 2
        saved = [tuple(flat[start : start + each]) for start in range(0, len(flat), each)]
        needs = ctx.needs_input_grad
        wanted = [*needs[:2], *needs[4:]]
        given = gradient.contiguous(), hidden, weight, ctx.at, parameters, ctx.options, saved, wanted
        d_hidden, d_weight, *gradients = products.backward(*given, empty_gradient)
        return d_hidden, d_weight, None, None, *gradients
