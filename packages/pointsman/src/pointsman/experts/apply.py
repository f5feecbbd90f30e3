"""All experts at once: permute, grouped matrix products, combine. The entry that chooses the path."""

import torch
from torch import Tensor
from torch.nn import Parameter

from pointsman.experts import reference
from pointsman.experts.cpu import function
from pointsman.experts.cpu.products import Options
from pointsman.kernels import grouped_mm
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import exporting, plain_wanted, with_triton
from pointsman.ops.linear import autocast_dtype, transformed
from pointsman.routing import Routing


def apply_experts(
    hidden: Tensor, routing: Routing, parameters: ExpertParameters, activation: str = "relu", dropout: float = 0.0
) -> Tensor:
    """`reference.apply_experts` on the fastest path that this device has: hidden [tokens, dim] -> [tokens, dim].

    Under autocast hidden states and weights are cast, and so is the output; float64, as everywhere in torch, is not.
    With dropout one number is drawn on a CPU from the default generator, whatever the routing: runs that route
    differently stay aligned in all other random draws. On CUDA it is one for each assignment and hidden unit.
    """
    if (dtype := autocast_dtype(hidden, parameters.w_in)) is not None:
        parameters = parameters.map(lambda tensor: tensor.to(dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            return apply_experts(hidden.to(dtype), routing, parameters, activation, dropout)
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise ValueError("torch.jit.trace would keep the experts that its example chose: use torch.export")
    weight, token, expert = routing.assignments
    if token is None and expert.shape[0] != hidden.shape[0]:
        raise ValueError(f"the routing is of {len(expert)} tokens, the hidden states are of {len(hidden)}")
    path = _path(hidden, parameters, expert)
    if path == "cuda" and token is None and with_triton(hidden):
        from pointsman.kernels.triton import function as triton

        return triton.apply(hidden, weight, expert, parameters, activation, dropout)
    if path == "cuda":
        return grouped_mm.apply(hidden, weight, token, expert, parameters, activation, dropout)
    seed = torch.randint(2**62, (), device="cpu") if dropout else None
    if path == "plain":
        generator = None if seed is None else torch.Generator(hidden.device).manual_seed(int(seed))
        return reference.apply_experts(hidden, routing, parameters, activation, dropout, generator)
    parameters, hidden = parameters.map(_each_contiguous), hidden.contiguous()
    if torch.compiler.is_compiling() or hidden.is_meta:  # shapes alone, which the operator knows
        seed = torch.zeros((), dtype=torch.int64, device="cpu") if seed is None else seed
        return function.apply_traced(hidden, weight, token, expert, parameters, activation, dropout, seed)
    options = Options(activation, dropout, 0 if seed is None else int(seed))
    return function.apply(hidden, weight, function.Chosen(token, expert), parameters, options)


def _path(hidden: Tensor, parameters: ExpertParameters, expert: Tensor) -> str:
    """ "cpu" or "cuda" where the fast path of that device can be taken, "meta" for shapes alone, otherwise "plain"."""
    if hidden.is_meta and not transformed():
        return "meta"
    if plain_wanted() or transformed() or not (exporting() or expert.numel()):  # an export may not ask for it
        return "plain"
    kind, dtype = hidden.device.type, hidden.dtype
    if dtype not in _DTYPES.get(kind, set()):
        return "plain"
    known: set[type] = {Tensor, Parameter}
    if exporting():
        from torch._subclasses.fake_tensor import FakeTensor

        known.add(FakeTensor)
    for tensor in (hidden, *parameters):
        if tensor is not None and (tensor.dtype != dtype or type(tensor) not in known):
            return "plain"  # sharded over processes, quantised, …
    if kind == "cuda" and dtype == torch.bfloat16 and len(parameters.w_in) >= grouped_mm.MOST_GROUPS:
        return "plain"
    return kind


_DTYPES = {"cpu": function.DTYPES, "cuda": grouped_mm.DTYPES}


def _each_contiguous(tensor: Tensor) -> Tensor:
    """The weights with every single expert's contiguous: halves of a fused [E, 2 * hidden, dim] stay views."""
    return tensor if tensor.is_contiguous() or tensor[0].is_contiguous() else tensor.contiguous()
