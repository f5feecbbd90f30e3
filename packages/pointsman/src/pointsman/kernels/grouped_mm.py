"""The experts on a GPU, on `torch.nn.functional.grouped_mm`: no host synchronisation, no shape that depends on data.

In bfloat16 on Hopper and data-centre Blackwell (compute capability 9 and 10) a whole training step can therefore be
captured in a CUDA graph; in float32 and half, and on other devices, `grouped_mm` itself is a loop over the groups.

The mathematics is that of `experts/reference.py`. Assignments to -1 sort behind all experts: `grouped_mm` leaves their
rows undefined, and all of them are represented by one spare row, which adds nothing to a sum. Nothing here is
particular to CUDA except its aim: the tests run it on a CPU. `docs/gpu.md` counts its operators and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.ops.feed_forward import ACTIVATIONS, DERIVATIVES, ExpertParameters
from pointsman.ops.linear import refuse_second_derivatives

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
MOST_GROUPS = 1024  # grouped_mm's kernel takes fewer
ROWS_FOR_A_COLUMN = 64  # rows an expert from which a bias costs less as a column of the weights than row by row
FEW = 2  # rows a token for which `embedding_bag` takes longer than a gather, a product and a sum


class Layout(NamedTuple):
    """Where the row of each assignment lies: assignments are in token order, rows sorted by expert, dropped ones last.

    A is the number of assignments; row A is spare. `token` [A + 1] of each row, `order` [A + 1] the assignment of each
    row, `row` [A] int32 the row of each assignment (A if it is dropped), `dropped` [A] of each assignment, `ends` [E]
    int32 where the rows of each expert end, `token_offsets` [tokens] int32 the first assignment of each token: None
    where they are `k` apart and rows are to be gathered and summed.
    """

    token: Tensor
    order: Tensor
    row: Tensor
    dropped: Tensor
    ends: Tensor
    token_offsets: Tensor | None
    k: int

    def permute(self, hidden: Tensor) -> Tensor:
        """[tokens, dim] -> [A + 1, dim]."""
        return hidden.index_select(0, self.token)

    def combine(self, rows: Tensor, weight: Tensor | None) -> Tensor:
        """Each token's sum over its rows [A + 1, dim], but for the spare one, weighted if `weight` is given:
        [tokens, dim]. Overwrites the spare row."""
        spare, offsets = len(rows) - 1, self.token_offsets
        if offsets is not None:
            return F.embedding_bag(self.row, rows, offsets, mode="sum", per_sample_weights=weight, padding_idx=spare)
        rows[spare].zero_()
        found = rows.index_select(0, self.row)
        found = found if weight is None else found.mul_(weight[:, None])
        return found if self.k == 1 else found.view(-1, self.k, rows.shape[1]).sum(1)


def layout(expert: Tensor, token: Tensor | int, token_offsets: Tensor | None, num_experts: int) -> Layout:
    """The layout of assignments [A] in token order; `expert` is -1 where one is dropped.

    Args:
        token: [A], the token of each; or k, where each token has k of them.
    """
    keys = _sort_keys(expert, num_experts)
    sorted_keys, order = torch.sort(keys, stable=True)
    count = order.numel()
    places = torch.arange(count, dtype=torch.int32, device=order.device)
    dropped = keys >= num_experts
    row = torch.empty_like(places).scatter_(0, order, places).masked_fill_(dropped, count)
    experts = torch.arange(num_experts, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(sorted_keys, experts, right=True, out_int32=True)
    order = F.pad(order, (0, 1))
    k = token if isinstance(token, int) else 0
    of_rows = token.index_select(0, order) if isinstance(token, Tensor) else order // k
    return Layout(of_rows, order, row, dropped, ends, token_offsets, k)


def _sort_keys(expert: Tensor, num_experts: int) -> Tensor:
    """The smallest integers that sort like the experts, dropped assignments behind: a sort passes over every byte."""
    if num_experts <= 255:
        return expert.clamp(-1, num_experts).to(torch.uint8)  # -1 becomes 255
    narrow = torch.int16 if num_experts < 2**15 else torch.int32
    return torch.where(expert < 0, num_experts, expert).clamp_max(num_experts).to(narrow)


def apply(
    hidden: Tensor, weight: Tensor, token: Tensor | None, expert: Tensor, parameters: ExpertParameters, activation: str,
    dropout: float,
) -> Tensor:  # fmt: skip
    """The experts' combined output [tokens, dim].

    Args:
        hidden: [tokens, dim].
        weight: one for each assignment, in the shape of `expert`.
        token: [P] the token of each pair; None: `expert` is [tokens, k].
        expert: [tokens, k], -1 for none, or [P].
    """
    assert expert.numel(), "nothing to do: grouped_mm takes no empty tensors"
    (tokens, dim), num_experts = hidden.shape, len(parameters.w_in)
    flat, factors = expert.reshape(-1), weight.reshape(-1)
    of_rows: Tensor | int = (k := expert.shape[-1])
    token_offsets = None
    if token is None and k > FEW and not _narrow(parameters):
        token_offsets = torch.arange(0, tokens * k, k, dtype=torch.int32, device=hidden.device)
    elif token is not None:
        of_rows, order = torch.sort(token, stable=True)
        token_offsets = torch.searchsorted(of_rows, torch.arange(tokens, device=hidden.device), out_int32=True)
        flat, factors = flat.index_select(0, order), factors.index_select(0, order)
    check_experts(flat, num_experts)
    where = layout(flat, of_rows, token_offsets, num_experts)
    factors = factors.masked_fill(where.dropped, 0)
    as_column = flat.numel() >= ROWS_FOR_A_COLUMN * num_experts
    padded = _padded(parameters, parameters.b_in is not None and as_column)
    output: Tensor = _Experts.apply(hidden, factors.to(hidden.dtype), where, activation, dropout, *padded)  # type: ignore[no-untyped-call]
    output = output[:, :dim] if output.shape[1] > dim else output
    if parameters.b_out is None:
        return output
    shares = output_bias_shares(factors, flat, of_rows, tokens, num_experts)
    return torch.addmm(output, shares.to(hidden.dtype), parameters.b_out)


def check_experts(expert: Tensor, num_experts: int) -> None:
    """Fails on the device where an assignment is to an expert that does not exist (not in graphs, which it would break
    up; there such an assignment is dropped)."""
    if torch.compiler.is_compiling() or (expert.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    torch._assert_async((expert < num_experts).all(), f"a routing names an expert beyond the {num_experts} that exist")


def output_bias_shares(weight: Tensor, expert: Tensor, token: Tensor | int, tokens: int, num_experts: int) -> Tensor:
    """[tokens, E]: the combine weight of each expert, with which W_out's biases enter a token's output.

    One narrow product replaces a bias added to every row. Arguments are those of `layout`, `weight` [A] being 0 where
    an assignment is dropped: only zeros are added to a place twice, in whatever order.
    """
    known = expert.clamp(0, num_experts - 1)
    if isinstance(token, int):
        shares = weight.new_zeros(tokens, num_experts)
        return shares.scatter_add(1, known.view(tokens, token), weight.view(tokens, token))
    shares = weight.new_zeros(tokens * num_experts)
    return shares.scatter_add(0, token * num_experts + known, weight).view(tokens, num_experts)


def _padded(parameters: ExpertParameters, bias_as_column: bool) -> ExpertParameters:
    """The weights with widths that are multiples of 8 (`grouped_mm` wants rows of whole 16 bytes), without b_out.

    With `bias_as_column`, b_in and b_gate are the column of W_in and W_gate that follows the inputs' `dim`.
    """
    _, hidden_dim, dim = parameters.w_in.shape
    more_hidden, more = -hidden_dim % 8, -(dim + bias_as_column) % 8 + bias_as_column

    def inward(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
        if weight is not None and bias is not None and bias_as_column:
            zeros = weight.new_zeros(1).expand(*weight.shape[:2], more - 1)
            return _pad(torch.cat([weight, bias[:, :, None], zeros], 2), (0, 0, 0, more_hidden))
        return None if weight is None else _pad(weight, (0, more, 0, more_hidden))

    def bias(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None or bias_as_column else _pad(tensor, (0, more_hidden))

    w_in = inward(parameters.w_in, parameters.b_in)
    assert w_in is not None
    w_out = _pad(parameters.w_out, (0, more_hidden, 0, -dim % 8))
    w_gate = inward(parameters.w_gate, parameters.b_gate)
    return ExpertParameters(w_in, w_out, bias(parameters.b_in), None, w_gate, bias(parameters.b_gate))


def _pad(tensor: Tensor, amounts: tuple[int, ...]) -> Tensor:
    return F.pad(tensor, amounts) if any(amounts) else tensor


class _Experts(torch.autograd.Function):
    """Saves the hidden units of ungated ReLU experts, whose zeros also show the dropout mask, otherwise what comes
    before the activation. Weights are multiplied where rows are narrower: into the hidden units, or into what has the
    width of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, where: Layout, activation: str, dropout: float,
        *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        p = ExpertParameters(*tensors)  # type: ignore[arg-type]
        ctx.dim = hidden.shape[1]
        if more := p.w_in.shape[2] - ctx.dim:  # 1 meets the biases, or zeros
            hidden = F.pad(hidden, (0, more), value=1.0)
        rows = where.permute(hidden)
        up = _linear(rows, p.w_in, p.b_in, where)
        gate = None if p.w_gate is None else _linear(rows, p.w_gate, p.b_gate, where)
        del rows
        relu = activation == "relu" and gate is None
        units = up.relu_() if relu else ACTIVATIONS[activation](up if gate is None else gate)
        units = units if gate is None else units.mul_(up)
        mask = None
        if dropout:
            units, mask = torch.native_dropout(units, dropout, True)
        narrow = _narrow(p)
        factors = weight.index_select(0, where.order)[:, None] if narrow else None
        rows = grouped_mm(units if factors is None else units * factors, p.w_out.transpose(-1, -2), where.ends)
        output = where.combine(rows, None if narrow else weight)
        ctx.activation, ctx.dropout, ctx.k = activation, dropout, where.k
        saved = (units, None, None) if relu else (up, gate, mask)
        ctx.save_for_backward(hidden, weight, *saved, *where[:6], *tensors)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        hidden, weight, up, gate, mask, *rest = ctx.saved_tensors
        activation, dropout = ctx.activation, ctx.dropout
        where, p = Layout._make([*rest[:6], ctx.k]), ExpertParameters(*rest[6:])
        hidden_wanted, weight_wanted, _, _, _, *wanted = ctx.needs_input_grad
        scale = 1 / (1 - dropout) if 0 < dropout < 1 else float(dropout == 0)
        relu, narrow = activation == "relu" and gate is None, _narrow(p)
        derivative: Callable[[Tensor, Tensor], Tensor] = DERIVATIVES[activation]
        factors = weight.index_select(0, where.order)[:, None]
        outer = where.permute(gradient.contiguous())
        inner = grouped_mm(outer, p.w_out, where.ends)
        if relu:
            units = up
        else:
            activated = ACTIVATIONS[activation](up if gate is None else gate)
            units = activated if gate is None else activated * up
            units = units if mask is None else torch.ops.aten.native_dropout_backward(units, mask, scale)
        weight_gradient = None
        if weight_wanted:  # that of a dropped assignment, read from the spare row, is undefined: `apply` masks it
            exact = torch.float64 if units.dtype == torch.float64 else torch.float32
            sums = (units * inner).sum(-1, dtype=exact)
            weight_gradient = sums.index_select(0, where.row).to(weight.dtype)
        # of ReLU's mask only the zeros are known here, so its scale enters with the weights
        inward, inward_factors = (weight * scale, factors * scale) if relu and dropout else (weight, factors)
        inner = inner.mul_(inward_factors) if narrow else inner
        if mask is not None:
            inner = torch.ops.aten.native_dropout_backward(inner, mask, scale)
        if gate is None:
            through_up, through_gate = derivative(inner, up), None
        else:
            through_up, through_gate = inner * activated, derivative(inner * up, gate)
        hidden_gradient = None
        if hidden_wanted:
            width = ctx.dim + -ctx.dim % 8
            rows = grouped_mm(through_up, p.w_in[:, :, :width], where.ends)
            if through_gate is not None:
                assert p.w_gate is not None
                rows = rows + grouped_mm(through_gate, p.w_gate[:, :, :width], where.ends)
            hidden_gradient = where.combine(rows, None if narrow else inward)[:, : ctx.dim]
        inputs = where.permute(hidden) if wanted[0] or wanted[4] else None
        if narrow:
            units, inward_factors = units * factors if wanted[1] else units, torch.ones_like(factors)
        else:
            inputs = None if inputs is None else inputs.mul_(inward_factors)
            outer = outer.mul_(factors) if wanted[1] else outer
        lefts = (through_up, outer, through_up, None, through_gate, through_gate)
        rights = (inputs, units, inward_factors, None, inputs, inward_factors)
        gradients = [
            _outer_products(left, right, where.ends) if needed and left is not None and right is not None else None
            for left, right, needed in zip(lefts, rights, wanted, strict=True)
        ]
        return hidden_gradient, weight_gradient, None, None, None, *gradients


def _narrow(p: ExpertParameters) -> bool:
    """Whether hidden units are narrower than inputs."""
    return p.w_out.shape[2] < p.w_out.shape[1]


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, where: Layout) -> Tensor:
    output = grouped_mm(rows, weight.transpose(-1, -2), where.ends)
    if bias is None:
        return output
    places = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    expert = torch.searchsorted(where.ends, places, right=True).clamp_max_(len(bias) - 1)
    return output.add_(bias.index_select(0, expert))


def _outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Each group's left' right: [E, m, n]; with `right` [S, 1] a bias gradient: [E, m]."""
    if right.shape[1] > 1:
        return zeros_without_rows(grouped_mm(left.t(), right, ends), ends)
    columns = right.expand(-1, 8).contiguous()
    return zeros_without_rows(grouped_mm(columns.t(), left, ends)[:, 0], ends)


def zeros_without_rows(products: Tensor, ends: Tensor) -> Tensor:
    """Zeros for groups without rows, where `grouped_mm` leaves anything: on Blackwell (pytorch issue 172439)."""
    if products.device.type == "cuda" and torch.cuda.get_device_capability(products.device)[0] == 9:
        return products  # right on Hopper, where a pass over all gradients is saved
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return products.masked_fill_(empty.view(-1, *[1] * (products.dim() - 1)), 0)


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`F.grouped_mm`; in graphs an operator of ours, whose operands keep their strides: Inductor may lay out those of
    torch's as it refuses on a GPU. Besides, its shape inference knows bfloat16 only."""
    if left.dtype == torch.bfloat16 and not torch.compiler.is_compiling():
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
