"""The experts on a CPU as one differentiable operation, and the same as an operator for torch.compile.

A large weight gradient takes the memory of an earlier gradient of the same parameter. glibc gives large freed blocks
back to the system, and a fresh page costs a fault every 4 KB: with large experts a third of a training step. Nothing is
reused while anything refers to it: each buffer is a NumPy array that torch holds for as long as the gradient's storage
lives, be it through a view, a NumPy array or a DLPack capsule; then a finalizer puts its block back.

The operator passes on what backward needs as one tensor, whose size follows from shapes alone: hidden units of every
assignment, u or h and, gated, g: [1 or 2, A, hidden]. Rows of assignments to no expert stay empty.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu import products
from pointsman.experts.cpu.products import Options
from pointsman.experts.cpu.sorting import Sorted, refuse_beyond, sort
from pointsman.ops.feed_forward import ACTIVATIONS, ExpertParameters
from pointsman.ops.kernels import exporting
from pointsman.ops.linear import refuse_second_derivatives

SMALLEST = 1 << 20
"""Bytes; smaller gradients are left to the allocator, which keeps such blocks."""
_KEPT = 2  # freed blocks of a parameter: two gradients are there when a second backward adds to the first
_ALIGNMENT = 64  # bytes, torch's own

Block = np.ndarray[Any, np.dtype[np.uint8]]
_freed: weakref.WeakKeyDictionary[torch.UntypedStorage, list[Block]] = weakref.WeakKeyDictionary()
"""A parameter's storage -> the blocks of its freed gradients; they go with the parameter. No result depends on them."""


def empty_gradient(parameter: Tensor) -> Tensor:
    """`torch.empty_like(parameter)`, in the memory of a freed gradient if the parameter is a large contiguous leaf."""
    size = parameter.nbytes
    if size < SMALLEST or not parameter.is_leaf or not parameter.is_contiguous():
        return torch.empty_like(parameter)
    freed = _freed.setdefault(parameter.untyped_storage(), [])
    block = _taken(freed, size + _ALIGNMENT)
    start = -block.ctypes.data % _ALIGNMENT
    buffer = block[start : start + size]
    finalizer = weakref.finalize(buffer, _put_back, freed, block)
    finalizer.atexit = False
    gradient = torch.empty(0, dtype=parameter.dtype, device="cpu")
    return gradient.set_(torch.from_numpy(buffer).untyped_storage(), 0, parameter.shape, parameter.stride())


def forget() -> None:
    """Releases all freed buffers."""
    for freed in list(_freed.values()):
        freed.clear()


def _taken(freed: list[Block], size: int) -> Block:
    while freed:
        try:
            block = freed.pop()
        except IndexError:  # another thread was faster
            break
        if block.nbytes == size:
            return block
    return np.empty(size, np.uint8)


def _put_back(freed: list[Block], block: Block) -> None:
    if len(freed) < _KEPT:
        freed.append(block)


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
        if row.dtype != torch.float32:  # torch.mv takes twice the time in bf16
            return F.linear(row, weight[expert], None if bias is None else bias[expert])
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


def apply_traced(
    hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor, parameters: ExpertParameters,
    activation: str, dropout: float, seed: Tensor,
) -> Tensor:  # fmt: skip
    """`apply` for graphs: the seed is a tensor."""
    # an exported program is for inference, whatever the number of tokens
    save = torch.is_grad_enabled() and not exporting()
    outputs: tuple[Tensor, Tensor] = experts_forward(
        hidden, weight, token, expert, *parameters, seed, activation, dropout, save
    )
    return outputs[0]


@torch.library.custom_op("pointsman::experts_forward", mutates_args=())
def experts_forward(
    hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor, w_in: Tensor, w_out: Tensor,
    b_in: Tensor | None, b_out: Tensor | None, w_gate: Tensor | None, b_gate: Tensor | None, seed: Tensor,
    activation: str, dropout: float, save: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [tokens, dim], and what `experts_backward` needs, [0] where none follows."""
    parameters = ExpertParameters(w_in, w_out, b_in, b_out, w_gate, b_gate)
    options, chosen = Options(activation, dropout, int(seed)), Chosen(token, expert)
    if not save:
        return evaluate(hidden, weight, chosen, parameters, options), hidden.new_empty(0)
    at = chosen.sorted_for(parameters)
    output, saved = products.forward(hidden, weight, at, parameters, options, save=True)
    packed = _room(hidden, expert, w_in, w_gate)
    for piece, kept in zip(at.pieces, saved, strict=True):
        for whole, part in zip(packed, kept, strict=True):
            whole[piece.rows] = part
    return output, packed


def _room(hidden: Tensor, expert: Tensor, w_in: Tensor, w_gate: Tensor | None) -> Tensor:
    return hidden.new_empty(1 if w_gate is None else 2, expert.numel(), w_in.shape[1])


@experts_forward.register_fake
def _(hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    w_in, w_gate, save = rest[0], rest[4], rest[-1]
    return hidden.new_empty(hidden.shape), _room(hidden, expert, w_in, w_gate) if save else hidden.new_empty(0)


@torch.library.custom_op("pointsman::experts_backward", mutates_args=())
def experts_backward(
    gradient: Tensor, packed: Tensor, hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor,
    w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None, w_gate: Tensor | None,
    b_gate: Tensor | None, seed: Tensor, activation: str, dropout: float, wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight and the six parameters; empty tensors where not wanted."""
    parameters = ExpertParameters(w_in, w_out, b_in, b_out, w_gate, b_gate)
    at = Chosen(token, expert).sorted_for(parameters)
    saved = [tuple(packed[:, piece.rows]) for piece in at.pieces]
    options = Options(activation, dropout, int(seed))
    found = products.backward(gradient.contiguous(), hidden, weight, at, parameters, options, saved, wanted)
    return [hidden.new_empty(0) if tensor is None else tensor for tensor in found]


@experts_backward.register_fake
def _(gradient: Tensor, packed: Tensor, *inputs: Any) -> list[Tensor]:
    hidden, weight, _, _, *parameters = inputs[:10]
    wanted = inputs[-1]
    return [
        hidden.new_empty(0) if tensor is None or not needed else torch.empty_like(tensor)
        for tensor, needed in zip((hidden, weight, *parameters), wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, activation, dropout, _ = inputs
    ctx.options = activation, dropout
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    packed, *tensors = ctx.saved_tensors
    if not packed.numel() and tensors[3].numel():
        raise RuntimeError("pointsman: a layer exported by torch.export is for inference; it has no backward")
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], *needs[4:10]]
    results = experts_backward(gradient, packed, *tensors, *ctx.options, wanted)
    hidden, weight, *parameters = (result if needed else None for result, needed in zip(results, wanted, strict=True))
    return hidden, weight, None, None, *parameters, None, None, None, None


experts_forward.register_autograd(_backward, setup_context=_setup_context)
