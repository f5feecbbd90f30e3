"""The CPU experts as a custom operator: one opaque node for torch.compile.

What backward needs is passed on as one tensor, whose size follows from shapes alone: hidden units of every assignment,
u or h and, gated, g: [1 or 2, A, hidden]. Rows of assignments to no expert stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pointsman.experts.cpu import products
from pointsman.experts.cpu.function import Chosen, evaluate
from pointsman.experts.cpu.products import Options
from pointsman.ops.feed_forward import ExpertParameters


def apply(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
    seed: Tensor,
) -> Tensor:
    """`cpu.function.apply` for graphs: the seed is a tensor."""
    # an exported program is for inference, whatever the number of tokens
    save = torch.is_grad_enabled() and not torch.compiler.is_exporting()
    outputs: tuple[Tensor, Tensor] = experts_forward(
        hidden, weight, token, expert, *parameters, seed, activation, dropout, save
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
    save: bool,
) -> tuple[Tensor, Tensor]:
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
    wanted: Sequence[bool],
) -> list[Tensor]:
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
