"""All experts at once: permute, grouped matrix products, combine. The entry that chooses the path."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pointsman.ops import cpu, reference
from pointsman.ops.dispatch import Plan, plan, slots
from pointsman.ops.feedforward import Gradients, HiddenUnits
from pointsman.ops.gemm import choose
from pointsman.ops.kernels import Kernels, measure_kernels
from pointsman.ops.recycling import empty_gradient
from pointsman.ops.reference import ExpertParameters
from pointsman.routing import Routing


def apply_experts(
    hidden: Tensor,
    routing: Routing,
    parameters: ExpertParameters,
    activation: str = "relu",
    dropout: float = 0.0,
    kernels: Kernels | None = None,
) -> Tensor:
    """`reference.apply_experts` on the fastest path that this device has.

    Under autocast hidden states and weights are cast, and so is the output. With dropout one number is drawn from the
    default generator, whatever the routing: runs that route differently stay aligned in all other random draws.

    Args:
        hidden: [tokens, dim].
        routing: whose experts and weights are combined.
        activation: "relu", "gelu" or "silu".
        dropout: probability with which hidden units of an expert are dropped (0 in evaluation).
        kernels: what `measure_kernels` chose for this run; None: what it chooses for this process.

    Returns:
        [tokens, dim], in the dtype of `hidden`, or autocast's.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden = hidden.to(dtype)
        cast = (None if tensor is None else tensor.to(dtype) for tensor in parameters)
        parameters = ExpertParameters(*cast)  # type: ignore[arg-type]
    with torch.autocast(kind, enabled=False):
        return _apply(hidden, routing, parameters, activation, dropout, kernels or measure_kernels())


def _apply(
    hidden: Tensor, routing: Routing, parameters: ExpertParameters, activation: str, dropout: float, kernels: Kernels
) -> Tensor:
    seed = int(torch.empty((), dtype=torch.int64).random_()) if dropout else 0
    dtypes = {tensor.dtype for tensor in (hidden, *parameters) if tensor is not None}
    if kernels.path == "plain" or hidden.device.type != "cpu" or len(dtypes) > 1 or not dtypes <= _FAST_DTYPES:
        generator = torch.Generator(hidden.device).manual_seed(seed) if dropout else None
        return reference.apply_experts(hidden, routing, parameters, activation, dropout, generator)
    assigned = slots(routing, hidden.shape[0])
    layout = plan(assigned.expert, assigned.bags, assigned.per_token, parameters.w_in.shape[0])
    weight = assigned.weight.to(hidden.dtype)
    options = _Options(activation, dropout, seed, kernels.gemm)
    dense = ExpertParameters(*(None if tensor is None else tensor.contiguous() for tensor in parameters))  # type: ignore[arg-type]
    tensors = (hidden, weight, *parameters)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        output: Tensor = _Experts.apply(hidden, weight, layout, options, *dense)  # type: ignore[no-untyped-call]
        return output
    return cpu.forward(hidden, weight, dense, layout, options.hidden_units(hidden.dtype), keep=False)[0]


_FAST_DTYPES = {torch.float32, torch.bfloat16}


class _Options(NamedTuple):
    activation: str
    dropout: float
    seed: int
    gemm: str

    def hidden_units(self, dtype: torch.dtype) -> HiddenUnits:
        generator = torch.Generator().manual_seed(self.seed) if self.dropout else None
        return HiddenUnits(self.activation, self.dropout, choose(self.gemm, dtype), generator)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, layout: Plan, options: _Options, *tensors: Tensor | None
    ) -> Tensor:
        parameters = ExpertParameters(*tensors)  # type: ignore[arg-type]
        first = options.hidden_units(hidden.dtype)
        output, kept = cpu.forward(hidden, weight, parameters, layout, first, keep=True)
        ctx.layout, ctx.options, ctx.widths = layout, options, [len(item) for item in kept]
        ctx.save_for_backward(hidden, weight, *tensors, *(tensor for item in kept for tensor in item))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        hidden, weight, *rest = ctx.saved_tensors
        parameters, flat = ExpertParameters(*rest[:6]), iter(rest[6:])
        kept = [tuple(next(flat) for _ in range(width)) for width in ctx.widths]
        hidden_wanted, weight_wanted, _, _, *wanted = ctx.needs_input_grad
        gradients = Gradients(
            *(
                empty_gradient(tensor) if needed and tensor is not None else None
                for tensor, needed in zip(parameters, wanted, strict=True)
            )
        )
        hidden_gradient, weight_gradient = cpu.backward(
            gradient.contiguous(),
            hidden,
            weight,
            parameters,
            ctx.layout,
            ctx.options.hidden_units(hidden.dtype),
            kept,
            gradients,
            hidden_wanted,
            weight_wanted,
        )
        return hidden_gradient, weight_gradient, None, None, *gradients
