"""The experts on a GPU, on `torch.nn.functional.grouped_mm`: no host synchronisation, no shape that depends on data.

In bfloat16 on Hopper and data-centre Blackwell (compute capability 9 and 10) a whole training step can therefore be
captured in a CUDA graph; in float32 and half, and on other devices, `grouped_mm` itself is a loop over the groups.

The mathematics is that of `sparse.py`. Assignments to -1 sort behind all experts: `grouped_mm` leaves their rows
undefined, so every tensor of rows is masked before it is combined. Nothing here is particular to CUDA except its aim:
the tests run it on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu.hidden_units import DERIVATIVES, refuse_second_derivatives
from pointsman.experts.reference import ACTIVATIONS, ExpertParameters

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
MOST_GROUPS = 1024  # grouped_mm's kernel takes fewer


class Layout(NamedTuple):
    """Where the row of each assignment lies: assignments are in token order, rows sorted by expert, dropped ones last.

    `token` [A] and `expert` [A] of each row (a dropped row: the last expert), `dropped` [A, 1], `order` [A] the
    assignment of each row, `row` [A] the row of each assignment, `token_offsets` [tokens] the first assignment of each
    token, `ends` [E] int32.
    """

    token: Tensor
    expert: Tensor
    dropped: Tensor
    order: Tensor
    row: Tensor
    token_offsets: Tensor
    ends: Tensor

    def permute(self, hidden: Tensor) -> Tensor:
        return hidden.index_select(0, self.token)

    def combine(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Each token's weighted sum over its rows [A, dim], whose dropped ones are overwritten: [tokens, dim]."""
        rows.masked_fill_(self.dropped, 0)
        return F.embedding_bag(self.row, rows, self.token_offsets, mode="sum", per_sample_weights=weight)


def layout(expert: Tensor, token: Tensor, token_offsets: Tensor, num_experts: int) -> Layout:
    """The layout of assignments [A] in token order; `expert` is -1 where one is dropped."""
    keys = torch.where(expert < 0, num_experts, expert)
    sorted_keys, order = torch.sort(keys, stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    experts = torch.arange(num_experts, device=keys.device)
    ends = torch.searchsorted(sorted_keys, experts, right=True, out_int32=True)
    dropped = (sorted_keys == num_experts)[:, None]
    of_rows = token.index_select(0, order), sorted_keys.clamp_max(num_experts - 1), dropped
    return Layout(*of_rows, order, row, token_offsets, ends)


def apply(
    hidden: Tensor,
    weight: Tensor,
    token: Tensor | None,
    expert: Tensor,
    parameters: ExpertParameters,
    activation: str,
    dropout: float,
) -> Tensor:
    """The experts' combined output [tokens, dim].

    Args:
        hidden: [tokens, dim].
        weight: one for each assignment, in the shape of `expert`.
        token: [P] the token of each pair; None: `expert` is [tokens, k].
        expert: [tokens, k], -1 for none, or [P].
    """
    assert expert.numel(), "nothing to do: grouped_mm takes no empty tensors"
    tokens = torch.arange(hidden.shape[0], device=hidden.device)
    flat, factors = expert.reshape(-1), weight.reshape(-1)
    if token is None:
        token_offsets = tokens * expert.shape[1]
        owner = tokens.repeat_interleave(expert.shape[1], output_size=flat.numel())
    else:
        owner, order = torch.sort(token, stable=True)
        token_offsets = torch.searchsorted(owner, tokens)
        flat, factors = flat.index_select(0, order), factors.index_select(0, order)
    factors = torch.where(flat < 0, 0, factors).to(hidden.dtype)
    where = layout(flat, owner, token_offsets, parameters.w_in.shape[0])
    dim = hidden.shape[1]
    padded = _padded(parameters)
    more = padded.w_in.shape[2] - dim
    rows = F.pad(hidden, (0, more)) if more else hidden
    output: Tensor = _Experts.apply(rows, factors, where, activation, dropout, *padded)  # type: ignore[no-untyped-call]
    return output[:, :dim] if more else output


def _padded(parameters: ExpertParameters) -> ExpertParameters:
    """Both widths brought to multiples of 8 with zeros: `grouped_mm` wants rows of whole 16 bytes."""
    _, hidden_dim, dim = parameters.w_in.shape
    more_hidden, more = -hidden_dim % 8, -dim % 8
    if not more_hidden and not more:
        return parameters
    inward, outward = (0, more, 0, more_hidden), (0, more_hidden, 0, more)
    pads = [inward, outward, (0, more_hidden), (0, more), inward, (0, more_hidden)]
    each = zip(parameters, pads, strict=True)
    return ExpertParameters(*(None if tensor is None else F.pad(tensor, pad) for tensor, pad in each))  # type: ignore[arg-type]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        where: Layout,
        activation: str,
        dropout: float,
        *tensors: Tensor | None,
    ) -> Tensor:
        p = ExpertParameters(*tensors)  # type: ignore[arg-type]
        rows = where.permute(hidden)
        up = _linear(rows, p.w_in, p.b_in, where)
        gate = None if p.w_gate is None else _linear(rows, p.w_gate, p.b_gate, where)
        units = ACTIVATIONS[activation](up) if gate is None else ACTIVATIONS[activation](gate) * up
        mask = None
        if dropout:
            units, mask = torch.native_dropout(units, dropout, True)
        output = where.combine(_linear(units, p.w_out, p.b_out, where), weight)
        ctx.activation, ctx.dropout = activation, dropout
        ctx.save_for_backward(hidden, weight, up, gate, mask, *where, *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        hidden, weight, up, gate, mask, *rest = ctx.saved_tensors
        where, p = Layout(*rest[:7]), ExpertParameters(*rest[7:])
        hidden_wanted, weight_wanted, _, _, _, *wanted = ctx.needs_input_grad
        act = ACTIVATIONS[ctx.activation]
        derivative: Callable[[Tensor, Tensor], Tensor] = DERIVATIVES[ctx.activation]
        factors = weight.index_select(0, where.order)[:, None]
        outer = where.permute(gradient.contiguous())
        inner = grouped_mm(outer, p.w_out, where.ends)
        units = act(up) if gate is None else act(gate) * up
        if mask is not None:
            scaled = mask * (1 / (1 - ctx.dropout) if ctx.dropout < 1 else 0.0)
            units = (units * scaled).to(units.dtype)  # the factor is float32
        weight_gradient = None
        if weight_wanted:
            rows = (units * inner).sum(-1)
            if p.b_out is not None:
                rows = rows + (outer * p.b_out.index_select(0, where.expert)).sum(-1)
            weight_gradient = rows.masked_fill(where.dropped[:, 0], 0).index_select(0, where.row)
        if mask is not None:
            inner = (inner * scaled).to(inner.dtype)
        if gate is None:
            through_up, through_gate = derivative(inner, up), None
        else:
            through_up, through_gate = inner * act(gate), derivative(inner * up, gate)
        outer = outer * factors
        inputs = where.permute(hidden) * factors
        hidden_gradient = None
        if hidden_wanted:
            rows = grouped_mm(through_up, p.w_in, where.ends)
            if through_gate is not None:
                assert p.w_gate is not None
                rows = rows + grouped_mm(through_gate, p.w_gate, where.ends)
            hidden_gradient = where.combine(rows, weight)
        lefts = (through_up, outer, through_up, outer, through_gate, through_gate)
        rights = (inputs, units, factors, None, inputs, factors)
        gradients = [
            _outer_products(left, right, where.ends) if needed and left is not None else None
            for left, right, needed in zip(lefts, rights, wanted, strict=True)
        ]
        return hidden_gradient, weight_gradient, None, None, None, *gradients


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, where: Layout) -> Tensor:
    output = grouped_mm(rows, weight.transpose(-1, -2), where.ends)
    return output if bias is None else output + bias.index_select(0, where.expert)


def _outer_products(left: Tensor, right: Tensor | None, ends: Tensor) -> Tensor:
    """Each group's left' right: [E, m, n]; with `right` [S, 1] or None (ones), a bias gradient: [E, m]."""
    if right is not None and right.shape[1] > 1:
        return _without_empty(grouped_mm(left.t(), right, ends), ends)
    columns = left.new_ones(left.shape[0], 8) if right is None else right.expand(-1, 8).contiguous()
    return _without_empty(grouped_mm(columns.t(), left, ends)[:, 0], ends)


def _without_empty(products: Tensor, ends: Tensor) -> Tensor:
    """Zeros for groups without rows, where `grouped_mm` leaves anything: on Blackwell (pytorch issue 172439)."""
    if products.device.type == "cuda" and torch.cuda.get_device_capability(products.device)[0] == 9:
        return products  # right on Hopper, where a pass over all gradients is saved
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return products.masked_fill_(empty.view(-1, *[1] * (products.dim() - 1)), 0)


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`F.grouped_mm`, whose shape inference under torch.compile knows bfloat16 only."""
    if left.dtype == torch.bfloat16:
        return F.grouped_mm(left, right, offs=ends)
    output: Tensor = _grouped_mm(left, right, ends)
    return output


@torch.library.custom_op("pointsman::grouped_mm", mutates_args=())
def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(left, right, offs=ends)


@_grouped_mm.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[1])
