"""The CPU experts as a custom operator: one opaque node for torch.compile.

What backward needs is passed on as one tensor, whose size follows from shapes alone: `rows_at_most` rows of hidden
units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pointsman.experts.cpu.function import Chosen, Layout, Options, evaluate
from pointsman.experts.cpu.groups import grouping
from pointsman.experts.cpu.hidden_units import Saved
from pointsman.experts.cpu.permute import rows_at_most
from pointsman.ops.feed_forward import ExpertParameters
from pointsman.ops.kernels import Kernels


def apply(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
    seed: Tensor,
    code: str,
) -> Tensor:
    """`cpu.apply` for graphs: the seed is a tensor."""
    # a constant of the graph, so that torch does not reuse a cached graph of a version that needed another size; an
    # exported program is for inference, whatever the number of tokens
    room = room_for(expert, parameters) if torch.is_grad_enabled() and not torch.compiler.is_exporting() else 0
    outputs: tuple[Tensor, Tensor] = experts_forward(
        hidden, weight, token, expert, *parameters, seed, activation, dropout, code, room
    )
    return outputs[0]


@torch.library.custom_op("pointsman::experts_forward", mutates_args=())
def experts_forward(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    seed: Tensor,
    activation: str,
    dropout: float,
    code: str,
    room: int,
) -> tuple[Tensor, Tensor]:
    """The output [tokens, dim], and `room` elements with what `experts_backward` needs; 0 where none follows."""
    parameters = ExpertParameters(w_in, w_out, b_in, b_out, w_gate, b_gate)
    options = Options(activation, dropout, int(seed), Kernels.decoded(code))
    chosen = Chosen(token, expert)
    if not room:
        return evaluate(hidden, weight, chosen, parameters, options), hidden.new_empty(0)
    output, saved = Layout(hidden, chosen, parameters, options).forward(hidden, weight, parameters, save=True)
    packed, start = hidden.new_empty(room), 0
    each = 1 if w_gate is None else 2
    for tensor in (tensor for item in saved for tensor in item[:each]):
        packed[start : start + tensor.numel()].view_as(tensor).copy_(tensor)
        start += tensor.numel()
    return output, packed


@experts_forward.register_fake
def _(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(rest[-1])


def room_for(expert: Tensor, parameters: ExpertParameters) -> int:
    """A bound on the elements of the hidden units, for any routing of that shape."""
    count, width, dim = parameters.w_in.shape
    rows = rows_at_most(expert.numel(), count, grouping(parameters.w_in.dtype, width * dim))
    return rows * width * (1 if parameters.w_gate is None else 2)


@torch.library.custom_op("pointsman::experts_backward", mutates_args=())
def experts_backward(
    gradient: Tensor,
    packed: Tensor,
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None,
    b_out: Tensor | None,
    w_gate: Tensor | None,
    b_gate: Tensor | None,
    seed: Tensor,
    activation: str,
    dropout: float,
    code: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Gradients of hidden, weight and the six parameters; empty tensors where not wanted."""
    parameters = ExpertParameters(w_in, w_out, b_in, b_out, w_gate, b_gate)
    options = Options(activation, dropout, int(seed), Kernels.decoded(code))
    layout = Layout(hidden, Chosen(token, expert), parameters, options)
    saved = _unpack(packed, layout, len(hidden), parameters)
    dx, dw, gradients = layout.backward(gradient, hidden, weight, parameters, saved, wanted)
    return [hidden.new_empty(0) if tensor is None else tensor for tensor in (dx, dw, *gradients)]


def _unpack(packed: Tensor, layout: Layout, tokens: int, parameters: ExpertParameters) -> list[Saved]:
    width = parameters.w_in.shape[1]
    each = 1 if parameters.w_gate is None else 2
    saved, start = [], 0
    for rows in layout.saved_rows(tokens, parameters):
        size = rows * width
        saved.append(tuple(packed[start + i * size : start + (i + 1) * size].view(rows, width) for i in range(each)))
        start += each * size
    return saved


@experts_backward.register_fake
def _(gradient: Tensor, packed: Tensor, *inputs: Any) -> list[Tensor]:
    hidden, weight, _, _, *parameters = inputs[:10]
    wanted = inputs[-1]
    return [
        hidden.new_empty(0) if tensor is None or not needed else torch.empty_like(tensor)
        for tensor, needed in zip((hidden, weight, *parameters), wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, activation, dropout, code, _ = inputs
    ctx.options = activation, dropout, code
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    packed, *tensors = ctx.saved_tensors
    if not packed.numel() and tensors[3].numel():
        raise RuntimeError("pointsman: a layer exported by torch.export is for inference; it has no backward")
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1], *needs[4:10]]
    results = experts_backward(gradient, packed, *tensors, *ctx.options, wanted)
    hidden, weight, *parameters = (result if needed else None for result, needed in zip(results, wanted, strict=True))
    return hidden, weight, None, None, *parameters, None, None, None, None, None


experts_forward.register_autograd(_backward, setup_context=_setup_context)
