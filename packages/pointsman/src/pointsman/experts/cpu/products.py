"""The experts forward and backward, written out, for all assignments of a call.

For assignments a = (token t, expert e, weight w) with rows x_a = x_t, pre-activations u_a = W_in x_a + b_in and hidden
units h_a = act(u_a); gated g_a = W_gate x_a + b_gate and h_a = act(g_a) u_a; with dropout h_a times mask / (1 - p):

    y_t = sum_a w_a (W_out h_a + b_out)
    dw_a = h_a . (W_out' dy_t) + b_out . dy_t       so that the experts' outputs need not be saved
    dh_a = w_a W_out' dy_t
    dW_out = sum_a w_a dy_t h_a',   dW_in = sum_a du_a x_a',   dx_t = sum_a W_in' du_a

Backward gathers x_a again. Each piece saves only h of a ReLU, whose zeros show the mask; otherwise u, and g of gated
experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pointsman.experts.cpu.sorting import Piece, Sorted
from pointsman.ops.feed_forward import ACTIVATIONS, DERIVATIVES, ExpertParameters

Saved = tuple[Tensor, ...]
"""What a piece [n, hidden] saves: ungated (h) or (u), gated (u, g)."""

COPIED = 1 << 13
"""Elements of one expert's weight up to which a copy of its gradient takes less time than a call."""


@dataclass(frozen=True)
class Options:
    """How experts compute: activation, dropout probability and the seed of its mask."""

    activation: str
    dropout: float
    seed: int

    @property
    def generator(self) -> torch.Generator | None:
        """Of all masks of a call; forward and backward visit the pieces in the same order."""
        return torch.Generator().manual_seed(self.seed) if self.dropout else None


def forward(
    hidden: Tensor, weight: Tensor, at: Sorted, p: ExpertParameters, options: Options, save: bool
) -> tuple[Tensor, list[Saved]]:
    """The combined output [tokens, dim], and what each piece saves for `backward`.

    Args:
        hidden: [tokens, dim].
        weight: the combine weights as the routing holds them, at least float32.
        save: whether backward will follow.
    """
    output = hidden.new_zeros(hidden.shape, dtype=weight.dtype)  # sums are in at least float32
    weights, generator = weight.reshape(-1).index_select(0, at.order)[:, None], options.generator
    saved: list[Saved] = []
    for piece in at.pieces:
        token = at.token[piece.rows]
        rows = hidden.index_select(0, token)
        up = _linear(rows, p.w_in, p.b_in, at, piece)
        gate = None if p.w_gate is None else _linear(rows, p.w_gate, p.b_gate, at, piece)
        if gate is not None:
            units = ACTIVATIONS[options.activation](gate).mul_(up)
        elif options.activation == "relu":
            units = up.relu_()
        else:
            units = ACTIVATIONS[options.activation](up)
        if options.dropout:
            units.mul_(_mask(units, options, generator))
        if save:
            saved.append((up,) if gate is None else (up, gate))
        results, factor = _linear(units, p.w_out, p.b_out, at, piece), weights[piece.rows]
        weighted = results.mul_(factor) if results.dtype == factor.dtype else results * factor
        output.index_add_(0, token, weighted)
    return output.to(hidden.dtype), saved


def backward(
    gradient: Tensor, hidden: Tensor, weight: Tensor, at: Sorted, p: ExpertParameters, options: Options,
    saved: Sequence[Saved], wanted: Sequence[bool], empty: Callable[[Tensor], Tensor] = torch.empty_like,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of `hidden`, `weight` and the six parameters, as far as they are `wanted`.

    Args:
        gradient: [tokens, dim], contiguous.
        empty: makes room for the gradient of a parameter.
    """
    generator, flat = options.generator, weight.reshape(-1)
    weights = flat.index_select(0, at.order)[:, None]
    d_hidden = hidden.new_zeros(hidden.shape, dtype=weight.dtype) if wanted[0] else None
    d_weights = torch.empty_like(weights) if wanted[1] else None
    found = [empty(t) if one and t is not None else None for t, one in zip(p, wanted[2:], strict=True)]
    d_in, d_out, d_b_in, d_b_out, d_gate, d_b_gate = found
    for piece, kept in zip(at.pieces, saved, strict=True):
        token, factor = at.token[piece.rows], weights[piece.rows]
        units, activated, mask = _recomputed(kept, options, generator)
        outer = gradient.index_select(0, token)
        inner = _product(outer, p.w_out, piece)
        if d_weights is not None:
            each = (units * inner.to(weight.dtype)).sum(-1, keepdim=True)  # in at least float32
            if p.b_out is not None:
                each += (outer.to(weight.dtype) * _of_rows(p.b_out, at, piece)).sum(-1, keepdim=True)
            d_weights[piece.rows] = each
        factor = factor.to(outer.dtype)
        outer.mul_(factor)
        _weight_gradient(d_out, outer, units, at, piece)
        _bias_gradient(d_b_out, outer, at, piece)
        del outer
        up, gate = _before(inner.mul_(factor), kept, activated, mask, options)
        rows = hidden.index_select(0, token) if d_in is not None or d_gate is not None else None
        for through, of_weight, of_bias in ((up, d_in, d_b_in), (gate, d_gate, d_b_gate)):
            if through is not None:
                _weight_gradient(of_weight, through, rows, at, piece)
                _bias_gradient(of_bias, through, at, piece)
        if d_hidden is not None:
            d_rows = _product(up, p.w_in, piece)
            if gate is not None and p.w_gate is not None:
                d_rows.add_(_product(gate, p.w_gate, piece))
            d_hidden.index_add_(0, token, d_rows.to(weight.dtype))
    without = [expert for expert, count in enumerate(at.counts) if not count]
    for tensor in found:
        if tensor is not None:
            for expert in without:
                tensor[expert].zero_()
    return [
        None if d_hidden is None else d_hidden.to(hidden.dtype),
        None if d_weights is None else torch.zeros_like(flat).index_copy_(0, at.order, d_weights[:, 0]).view_as(weight),
        *found,
    ]


def _mask(units: Tensor, options: Options, generator: torch.Generator | None) -> Tensor:
    """The dropout mask over 1 - p."""
    kept = torch.empty_like(units).bernoulli_(1 - options.dropout, generator=generator)
    return kept.div_(max(1 - options.dropout, 1e-12))


def _recomputed(
    kept: Saved, options: Options, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """h again, act(g) of gated experts, and the dropout mask where h does not show it."""
    if len(kept) == 1 and options.activation == "relu":
        return kept[0], None, None
    activated = ACTIVATIONS[options.activation](kept[-1])
    units = activated if len(kept) == 1 else activated * kept[0]
    mask = _mask(units, options, generator) if options.dropout else None
    return units if mask is None else units.mul_(mask), activated, mask


def _before(
    gradient: Tensor, kept: Saved, activated: Tensor | None, mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Gradients of u and, gated, of g from that of h, which may be overwritten."""
    if activated is None:
        torch.ops.aten.threshold_backward.grad_input(gradient, kept[0], 0, grad_input=gradient)
        return (gradient.div_(max(1 - options.dropout, 1e-12)) if options.dropout else gradient), None
    if mask is not None:
        gradient.mul_(mask)
    derivative = DERIVATIVES[options.activation]
    if len(kept) == 1:
        return derivative(gradient, kept[0]), None
    through_gate = derivative(gradient * kept[0], kept[1])
    return gradient.mul_(activated), through_gate


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, at: Sorted, piece: Piece) -> Tensor:
    """Rows [n, in] times their experts' weights [E, out, in] transposed, plus bias [E, out]: [n, out]."""
    if piece.alone:
        columns = weight[piece.first].t()
        return torch.mm(rows, columns) if bias is None else torch.addmm(bias[piece.first], rows, columns)
    output = F.grouped_mm(rows, weight[piece.first : piece.end].mT, offs=piece.ends)
    return output if bias is None else output.add_(_of_rows(bias, at, piece))


def _product(rows: Tensor, weight: Tensor, piece: Piece) -> Tensor:
    """Rows [n, out] times their experts' weights [E, out, in]: [n, in]."""
    if piece.alone:
        return torch.mm(rows, weight[piece.first])
    return F.grouped_mm(rows, weight[piece.first : piece.end], offs=piece.ends)


def _of_rows(bias: Tensor, at: Sorted, piece: Piece) -> Tensor:
    """The bias [E, out] of each row: [n, out], or [out] where all have the same."""
    return bias[piece.first] if piece.alone else bias.index_select(0, at.expert[piece.rows])


def _weight_gradient(total: Tensor | None, gradient: Tensor, rows: Tensor | None, at: Sorted, piece: Piece) -> None:
    """Each expert's sum of gradient' rows, [out, in], into `total` [E, out, in]."""
    if total is None or rows is None:
        return
    if not piece.alone and total[0].numel() <= COPIED:
        total[piece.first : piece.end] = F.grouped_mm(gradient.t(), rows, offs=piece.ends)
        return
    counts = [len(rows)] if piece.alone else at.counts[piece.first : piece.end]
    lefts, rights = gradient.split_with_sizes(counts), rows.split_with_sizes(counts)
    for one, left, right in zip(total[piece.first : piece.end].unbind(0), lefts, rights, strict=True):
        if piece.opens:
            torch.mm(left.t(), right, out=one)
        else:
            one.addmm_(left.t(), right)


def _bias_gradient(total: Tensor | None, gradient: Tensor, at: Sorted, piece: Piece) -> None:
    """Each expert's sum of `gradient` [n, out], into `total` [E, out]."""
    if total is None:
        return
    if piece.alone:
        one = gradient.sum(0)
        total[piece.first] = one if piece.opens else total[piece.first] + one
    else:
        total[piece.first : piece.end].zero_().index_add_(0, at.expert[piece.rows] - piece.first, gradient)
